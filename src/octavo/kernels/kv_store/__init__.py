"""Writing a step's new keys and values into the paged cache. ``triton.py`` is for CUDA,
``cpu.py`` says how a CPU's pool lies and fills it."""
