"""reduce: send gradients to the owners of their elements during the backward."""
