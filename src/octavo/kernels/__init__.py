"""One folder per op: ``reference.py`` says it in torch, ``cpu.py`` is numba, ``triton.py`` CUDA.

``jit``, ``program``, ``team`` and ``vector_ir`` are what the CPU kernels share, ``triton_launch``
and ``gluon`` what CUDA's do. Nothing is imported here.
"""
