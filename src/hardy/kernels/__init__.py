"""Triton kernels for the layers of many slots at once. Imported where a step runs on a GPU."""
