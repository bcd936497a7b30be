"""The memory of one rank: packs of parameters, its shards of masters, gradients and state."""
