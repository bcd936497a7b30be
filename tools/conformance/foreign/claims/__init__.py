"""Claims of PyTorch's tests of FSDP2 and of states, written anew, one function for each test."""
