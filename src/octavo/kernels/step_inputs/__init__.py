"""What one upload brought of a step, laid out where the kernels of the step read it.

``layout.py`` says what it comes as and where it goes; ``triton.py`` is for CUDA.
"""
