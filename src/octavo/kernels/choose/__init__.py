"""Choosing a token from a row of logits, by the rules of ``engine/sampling.py``.

``triton.py`` launches, for CUDA, ``triton_draw.py`` (largest logit, or a draw from all tokens) and
``triton_filter.py`` (a draw from what top-k, top-p and min-p leave); ``engine/sampling.py`` is the
reference.
"""
