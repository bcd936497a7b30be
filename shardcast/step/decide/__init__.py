"""decide: what all ranks must agree on before the update (norm, skip, clip, loss scale)."""
