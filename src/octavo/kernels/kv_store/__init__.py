"""Writing a step's new keys and values into the paged cache. ``triton.py`` is for CUDA."""
