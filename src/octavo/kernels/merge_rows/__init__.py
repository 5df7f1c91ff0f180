"""Merging a few partials of many rows, ``attention/merge.py``'s formula. ``triton.py`` is for
CUDA."""
