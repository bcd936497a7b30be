"""Plans of who owns what, and in which dtype: pure Python, equal on all ranks, without storage."""
