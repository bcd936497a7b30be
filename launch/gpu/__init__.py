"""What `launch/gpu.sh` measures: one module per part."""
