"""Plans of owners and dtypes: pure Python, equal on all ranks, without storage."""
