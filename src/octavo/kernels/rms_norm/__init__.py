"""RMSNorm of many rows, with the residual's addition in front of it. ``triton.py`` is for CUDA."""
