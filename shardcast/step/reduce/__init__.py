"""reduce: gradients of every rank to the owner of their span, while backward runs."""
