"""What one upload brought of a step, laid out where the kernels of the step read it; or what the
step before left there, counted up.

``layout.py`` says what it comes as and where it goes; ``triton.py`` is for CUDA.
"""
