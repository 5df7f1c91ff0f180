"""Triton kernels run here in Triton's interpreter, on CPU tensors."""

import os

os.environ["TRITON_INTERPRET"] = "1"

try:
    from helpers import interpreter
except ImportError:
    pass  # no Triton: the tests of its kernels skip themselves
else:
    interpreter.install()
