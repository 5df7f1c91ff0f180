"""Split-KV attention over a paged cache: partial outputs per segment, and their merge.

``reference.py`` says in torch what the kernels compute; ``cpu.py`` is numba. Import what you use.
"""
