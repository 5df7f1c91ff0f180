"""RMSNorm with the residual's addition in front of it: ``cpu.py`` as an op of a program,
``triton.py`` for CUDA."""
