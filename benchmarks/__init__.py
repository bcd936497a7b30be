"""What `python -m benchmarks` measures: models, systems, counters, and one module per command."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # its model is measured
