"""Triton's interpreter, made to work with numpy >= 2.4 and to take less than half the time.

What it computes is as before: only what it makes anew for every operation is kept here, and one
loop over elements is numpy's. Of the time of a kernel's test, most was this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.language import core, standard
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_block_type = core.block_type.__init__
_numpy_dtype = interpreter._get_np_dtype
_reduce = interpreter.ReduceOps.apply_impl

_patched: set[int] = set()
_block_types: dict[Any, dict[str, Any]] = {}
_dtypes: dict[str, Any] = {}


def install() -> None:
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_language
    interpreter._get_np_dtype = numpy_dtype
    interpreter.ReduceOps.apply_impl = reduce
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Its scalars are arrays of one element, and numpy >= 2.4 no longer turns those into the
    bounds of a ``range``."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def patch_language(function: Any) -> Any:
    """Once for each module, not for every launch and every call of a function in a kernel."""
    module = id(function.__globals__)
    if module not in _patched:
        _patched.add(module)
        _patch_language(function)
    return interpreter._LangPatchScope()  # with nothing to take back


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Equal types are of the same parts; one more is the shape as tensors have it."""
    key = element_ty.name, *map(core._unwrap_if_constexpr, shape)
    parts = _block_types.get(key)
    if parts is None:
        _block_type(self, element_ty, shape)
        parts = _block_types[key] = vars(self) | {"sizes": sizes(self.shape)}
    vars(self).update(parts)


def sizes(shape: Sequence[int]) -> tuple[Any, Any]:
    """The number of elements and the shape of a tensor."""
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


_SCALAR = sizes(())


def tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.sizes if type.is_block() else _SCALAR


def numpy_dtype(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    found = _dtypes.get(element.name)
    if found is None:
        found = _dtypes[element.name] = _numpy_dtype(element)
    return found


def reduce(self: Any, input: Any) -> Any:
    """``tl.sort`` reduces by xor, for which Triton has a loop in Python over all elements."""
    if self.combine_fn != standard._xor_combine:
        return _reduce(self, input)
    [one] = input
    data = np.bitwise_xor.reduce(one.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, one.dtype)
