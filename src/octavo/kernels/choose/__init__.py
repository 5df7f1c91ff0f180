"""Choosing a token from a row of logits, by the rules of ``engine/sampling.py``, the reference.

``triton.py`` launches, for CUDA, ``triton_draw.py`` (largest logit, or a draw from all tokens) and
``triton_filter.py`` (a draw from what top-k, top-p and min-p leave); ``cpu.py`` draws on a CPU.
"""
