"""Gluon, the part of Triton that lays out tensors by hand, and what stands in for it where Triton
is interpreted: Gluon has no interpreter, but without its layouts its functions are Triton's.

Kernels are decorated with ``jit`` and call ``gl``, ``mma_v2``, ``async_copy``, ``tma`` and
``mbarrier``. They must see ``triton.language`` as ``tl``, as the interpreter asks for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.kernels.triton_launch import INTERPRETED

__all__ = [
    "TensorDescriptor",
    "add_here",
    "async_copy",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "mma_v2",
    "next_power_of_2",
    "tma",
    "turned",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

if not INTERPRETED:
    from triton.experimental.gluon import constexpr_function, jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    @jit
    def add_here(a, b):  # type: ignore[no-untyped-def]
        """``a + b`` of fp32 in this place: the compiler would do it at the end, where all summands
        of a tree are held in registers until then."""
        return gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=False, pack=1
        )

    @jit
    def turned(x, layout):  # type: ignore[no-untyped-def]
        """``x`` [16 m, n] of 16 bits, as a product of ``mma_v2`` left it in one warp, as the second
        operand of the next product: each 8 x 8 of it is transposed between the threads."""
        N: gl.constexpr = x.shape[1]
        M: gl.constexpr = x.shape[0]
        x = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            "=r,r",
            [x],
            dtype=x.dtype,
            is_pure=True,
            pack=2,
        )
        x = gl.permute(gl.reshape(x, [M // 8, 8, N // 8, 8]), (0, 3, 2, 1))
        return gl.convert_layout(gl.reshape(x, [M, N]), layout, assert_trivial=True)

else:
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.tools.tensor_descriptor import TensorDescriptor as _TensorDescriptor

    jit = triton.jit

    def constexpr_function(function: Any) -> Any:
        return function

    class _SharedMemory:
        """A block's shared memory as a numpy array."""

        def __init__(self, dtype: Any, array: Any) -> None:
            self._dtype, self._array = dtype, array

        def store(self, value: Any) -> None:
            self._array[...] = value.handle.data

        def load(self, layout: Any) -> Any:
            block = tl.core.block_type(self._dtype, list(self._array.shape))
            return tl.core.tensor(TensorHandle(self._array.copy(), self._dtype), block)

        def index(self, i: Any) -> _SharedMemory:
            return _SharedMemory(self._dtype, self._array[int(i)])

        def slice(self, start: int, length: int, dim: int = 0) -> _SharedMemory:
            where = (slice(None),) * dim + (slice(start, start + length),)
            return _SharedMemory(self._dtype, self._array[where])

        def permute(self, order: tuple[int, ...]) -> _SharedMemory:
            return _SharedMemory(self._dtype, self._array.transpose(order))

        def reshape(self, shape: tuple[int, ...]) -> _SharedMemory:
            return _SharedMemory(self._dtype, self._array.reshape(shape))

        def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> _SharedMemory:
            """Rows of many columns as [n, rows, 64]: on the device, 64 columns of all rows lie side
            by side, then the next 64."""
            columns = [self._array[..., i : i + 64] for i in range(0, self._array.shape[-1], 64)]
            whole = np.concatenate(columns, axis=-2)
            return _SharedMemory(dtype, whole.reshape([int(n) for n in shape]))

        def _keep_alive(self) -> None:
            pass

    def _allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> _SharedMemory:
        kinds = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int64": np.int64}
        memory = _SharedMemory(dtype, np.empty([int(n) for n in shape], kinds[dtype.name]))
        if value is not None:
            memory.store(value)
        return memory

    def add_here(a: Any, b: Any) -> Any:
        return a + b

    def turned(x: Any, layout: Any) -> Any:
        return x

    def _sum(x: Any, axis: int) -> Any:
        """Eight columns as they are added up by four threads that have two each."""
        if axis != 1 or x.shape[1] != 8:
            return tl.sum(x, axis)
        a = x.handle.data
        a = a[:, 0::2] + a[:, 1::2]
        a = a[:, :2] + a[:, 2:]
        kind = tl.core.block_type(x.dtype, [int(x.shape[0])])
        return tl.core.tensor(TensorHandle(a[:, 0] + a[:, 1], x.dtype), kind)

    def _copy(memory: _SharedMemory, pointers: Any, mask: Any = None, **how: Any) -> None:
        """Places that are masked become zero, as they do on the device."""
        memory.store(tl.load(pointers, mask=mask, other=None if mask is None else 0.0))

    def mma_v2(a: Any, b: Any, acc: Any) -> Any:
        """Triton's interpreter multiplies the raw bits of bf16 operands (3.6 to 3.9)."""
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")

    def warpgroup_mma(
        a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        rows = a.load(None) if isinstance(a, _SharedMemory) else a
        return mma_v2(rows, b.load(None), acc if use_acc else acc * 0.0)

    def warpgroup_mma_wait(num_outstanding: int, deps: tuple[Any, ...]) -> Any:
        return deps if len(deps) > 1 else deps[0]

    def _nothing(*args: Any, **how: Any) -> None:
        return None

    fence_async_shared = _nothing

    def _copy_described(tensor: Any, place: Any, barrier: Any, memory: _SharedMemory) -> None:
        memory.store(tensor.load(place))

    tma = SimpleNamespace(async_copy_global_to_shared=_copy_described)
    mbarrier = SimpleNamespace(
        init=_nothing, expect=_nothing, wait=_nothing, MBarrierLayout=_nothing
    )
    TensorDescriptor = SimpleNamespace(
        from_tensor=lambda tensor, block, layout: _TensorDescriptor.from_tensor(tensor, block)
    )
    async_copy = SimpleNamespace(
        async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_nothing
    )
    gl = SimpleNamespace(
        constexpr=tl.constexpr,
        float32=tl.float32,
        int64=tl.int64,
        bfloat16=tl.bfloat16,
        program_id=lambda axis: tl.program_id(axis),
        num_programs=lambda axis: tl.num_programs(axis),
        static_range=range,
        arange=lambda start, end, layout=None: tl.arange(start, end),
        full=lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
        zeros=lambda shape, dtype, layout=None: tl.zeros(shape, dtype),
        load=lambda *args, **how: tl.load(*args, **how),
        store=lambda *args, **how: tl.store(*args, **how),
        split=lambda x: tl.split(x),
        join=lambda a, b: tl.join(a, b),
        sum=_sum,
        max=lambda x, axis: tl.max(x, axis),
        associative_scan=lambda x, axis, combine: tl.associative_scan(x, axis, combine),
        maximum=lambda a, b: tl.maximum(a, b),
        minimum=lambda a, b: tl.minimum(a, b),
        where=lambda condition, a, b: tl.where(condition, a, b),
        exp=lambda x: tl.exp(x),
        exp2=lambda x: tl.exp2(x),
        log2=lambda x: tl.log2(x),
        rsqrt=lambda x: tl.rsqrt(x),
        cdiv=lambda a, b: (a + b - 1) // b,
        atomic_add=lambda *args, **how: tl.atomic_add(*args, **how),
        multiple_of=lambda x, values: x,
        max_contiguous=lambda x, values: x,
        permute=lambda x, order: tl.permute(x, order),
        reshape=lambda x, shape: tl.reshape(x, shape),
        expand_dims=lambda x, axis: tl.expand_dims(x, axis),
        broadcast=lambda a, b: tl.broadcast(a, b),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        thread_barrier=_nothing,
        allocate_shared_memory=_allocate,
        NVMMADistributedLayout=_nothing,
        DotOperandLayout=_nothing,
        DistributedLinearLayout=_nothing,
        BlockedLayout=_nothing,
        SliceLayout=_nothing,
        SwizzledSharedLayout=_nothing,
        NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing),
        PaddedSharedLayout=SimpleNamespace(with_identity_for=_nothing),
    )


@constexpr_function  # type: ignore[untyped-decorator]
def next_power_of_2(n: int) -> int:
    """The next one up, where a kernel is compiled; a number from 1 on."""
    return 1 << (n - 1).bit_length()
