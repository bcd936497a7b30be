"""What a rank does with gradients between two steps; all ranks must do the same."""

BACKWARDS, CLEARS = "synchronized backwards of a step", "clears of their gradients"
STALE = "gradients that parameters of an added group had already"
HISTORY = BACKWARDS, CLEARS, STALE
