"""The sharded optimizer: set-up, the step as one straight line, state in and out."""
