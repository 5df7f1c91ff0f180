"""One folder per op: ``reference.py`` says it in torch, ``cpu.py`` is numba, ``triton.py`` CUDA.

``jit``, ``threads`` and ``vector_ir`` are what the CPU kernels share. Nothing is imported here.
"""
