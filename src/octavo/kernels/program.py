"""A step as a program: compiled ops that a team of threads calls one after another.

An op is a compiled function over one record of plain numbers and addresses. A program is an array
of (address of the op, address of its record), so nothing of Python stands between two ops, and
every op can be tested and timed alone. All threads call every op; an op deals its items out from a
counter, and a barrier stands between it and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import DTypeLike, NDArray

from octavo.kernels.jit import Code, jit, machine_code
from octavo.kernels.late import intrinsic, numba, types
from octavo.kernels.vector_ir import I64, call

PAIR_OF_LINES = 128  # bytes: cache lines are fetched two at a time
_SPINS = 2000  # pauses of some 40 ns before a waiting thread offers its core to others


@dataclass(frozen=True)
class Op:
    """A compiled op and the layout of the record that it works on."""

    name: str
    record: np.dtype[Any]
    address: int
    compiled: Code

    def bind(self, **values: Any) -> Call:
        """The op with its record filled: every field is named, an array stands for its address
        and is kept alive."""
        if set(values) != set(self.record.names or ()):
            wrong = sorted(set(values) ^ set(self.record.names or ()))
            raise TypeError(f"op {self.name}: {', '.join(wrong)} missing or unknown")
        record = np.zeros(1, self.record)
        for name, value in values.items():
            record[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
        return Call(self, record, tuple(v for v in values.values() if isinstance(v, np.ndarray)))


@dataclass(frozen=True)
class Call:
    """One entry of a program. ``record`` [1] may be changed between two runs."""

    op: Op
    record: NDArray[Any]
    kept: tuple[NDArray[Any], ...]


def buffer(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that begins at a pair of cache lines, so that threads that write to two buffers
    share none. numpy's own large arrays begin 16 bytes behind a page."""
    memory = np.zeros(nbytes + PAIR_OF_LINES, np.uint8)
    start = -memory.ctypes.data % PAIR_OF_LINES
    return memory[start : start + nbytes]


class Program:
    """Calls in order, ready for a :class:`~octavo.kernels.team.Team` to run."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self.code = np.array(
            [(each.op.address, each.record.ctypes.data) for each in calls], np.int64
        ).reshape(-1, 2)
        # One counter for each op, and after them the one that the barriers count with.
        self.counters = np.zeros(len(self.calls) + 1, np.int64)


def op(**fields: DTypeLike) -> Callable[[Callable[..., None]], Op]:
    """Compile ``function(thread, num_threads, counter, args)`` as an op over a record.

    ``counter`` is the address of an int64 that is 0 when the op begins and that its threads share
    (:func:`fetch_add`); ``carray(args, 1)[0]`` has the fields: numbers, and addresses as
    int64 (:func:`float32s` and its like make arrays of them). An op neither raises nor allocates.
    """
    record = np.dtype([(name, np.dtype(kind)) for name, kind in fields.items()], align=True)

    def signature() -> Any:
        pointer = types.CPointer(numba.from_dtype(record))
        return types.void(types.int64, types.int64, types.int64, pointer)

    def compiled(function: Callable[..., None]) -> Op:
        code = machine_code(function, f"op {record}", signature)
        return Op(function.__name__, record, code.address, code)

    return compiled


# ---- what ops are written with


def _maker(element: str, kind: Any) -> Any:
    """A compiled function (address, shape) -> array."""

    @intrinsic
    def pointer(typing, address):
        def emit(context, b, signature, arguments):
            return b.inttoptr(arguments[0], context.get_value_type(kept).as_pointer())

        kept = getattr(types, element)
        return types.CPointer(kept)(address), emit

    @jit
    def array(address, shape):
        return numba.carray(pointer(address), shape, kind)

    return array


float32s = _maker("float32", np.float32)
int64s = _maker("int64", np.int64)
int32s = _maker("int32", np.int32)
uint32s = _maker("uint32", np.uint32)
int8s = _maker("int8", np.int8)


@intrinsic
def fetch_add(typing, counter, amount):
    """Add to the int64 at an address, and return what was there before; orders memory."""

    def emit(context, b, signature, arguments):
        pointer = b.inttoptr(arguments[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@jit
def next_run(stop, thread, num_threads, counter, count):
    """The next items of a thread: the first, and where they stop; from ``count`` on there are none.
    ``stop`` is that of those before, -1 if there are none. Seven eighths are dealt out beforehand,
    a run for each thread, so that the weights of one token are one stream, and a core's caches
    have what it reads. The rest are dealt one by one, for threads of unequal speed."""
    share = count * 7 // (8 * num_threads)
    if stop < 0 and share > 0:
        return thread * share, thread * share + share
    item = num_threads * share + fetch_add(counter, 1)
    return item, item + 1


@intrinsic
def load_acquire(typing, address):
    """The int64 at an address, with all that was written before it."""

    def emit(context, b, signature, arguments):
        return b.load_atomic(b.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def pause(typing):
    """Tell the core that this is a loop that waits."""

    def emit(context, b, signature, arguments):
        if b.module.triple.startswith(("x86_64", "i686")):
            call(b, "llvm.x86.sse2.pause", returns=ir.VoidType())
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def sched_yield(typing):
    """Offer the core to another thread. A symbol of the C library: the code can be cached."""

    def emit(context, b, signature, arguments):
        call(b, "sched_yield", returns=ir.IntType(32))
        return context.get_dummy_value()

    return types.void(), emit


# ---- the driver


@intrinsic
def _call(typing, op, thread, num_threads, counter, record):
    def emit(context, b, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64, byte])
        function = b.inttoptr(arguments[0], kind.as_pointer())
        b.call(function, [*arguments[1:4], b.inttoptr(arguments[4], byte)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@jit
def run_ops(code, num_ops, counters, thread, num_threads):
    """One thread's part of a program: every op in order, a barrier after each. ``code`` and
    ``counters`` are the addresses of a :class:`Program`'s arrays; the counters are 0."""
    calls = int64s(code, (num_ops, 2))
    barrier = counters + 8 * num_ops
    for i in range(num_ops):
        _call(calls[i, 0], thread, num_threads, counters + 8 * i, calls[i, 1])
        if num_threads > 1:
            fetch_add(barrier, 1)
            wait_until(barrier, (i + 1) * num_threads, -1)


@jit
def wait_until(address, value, spins):
    """Wait for the int64 at ``address`` to reach ``value``; give up after ``spins`` looks, if that
    isn't negative. Whether it was reached."""
    looks = 0
    while load_acquire(address) < value:
        if looks == spins:
            return False
        looks += 1
        pause()
        if looks % _SPINS == 0:
            sched_yield()
    return True
