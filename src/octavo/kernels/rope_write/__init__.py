"""Between the QKV product and attention: QK-norm, rotation, and the write to the paged cache.

``triton.py`` is for CUDA, ``cpu.py`` numba.
"""
