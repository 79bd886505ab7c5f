"""`scripts/gpu_check`: what the tests do with a stand-in for CUDA, done on a real GPU."""
