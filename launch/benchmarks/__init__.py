"""What `launch/benchmark.py` measures: models, systems, counters, and one module per command."""
