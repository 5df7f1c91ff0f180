"""Triton kernels run here in Triton's interpreter, on CPU tensors."""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

try:
    from triton.runtime import interpreter
except ImportError:
    pass  # the tests of Triton kernels skip themselves
else:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, and numpy >= 2.4 no longer turns
        those into the bounds of a ``range``."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
