"""The FFN's gate: ``act(gate) * up``. ``triton.py`` is for CUDA."""
