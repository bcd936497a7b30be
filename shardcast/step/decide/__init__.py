"""decide: all ranks agree on norm, skip, clip and loss scale before the update."""
