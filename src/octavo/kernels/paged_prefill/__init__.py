"""Causal attention of many query tokens a row over a paged cache: prompts, chunks, mixed batches.

``triton.py`` is for CUDA, ``cpu.py`` numba; ``split_attention/reference.py`` says in torch what
they compute.
"""
