"""PyTorch's tests of FSDP2 and of DCP's states, rewritten: one function for each test."""
