"""Products of up to 256 rows in CUDA C++ (``wide.cu``), for Hopper.

Where there are many rows, arithmetic takes about as long as the weights' way through memory. So
weight rows are on the side of 64 of the instruction and all activation rows, to the next 16, on the
other; tiles of 192 weight rows, which Triton has no tensors for, fill 128 of 132 multiprocessors
evenly; and a warp of its own asks for copies.

NVRTC, which comes with torch, compiles it: all that the table needs when the first of them is asked
for, on all cores, into Triton's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from triton import knobs

from octavo.host import granted_cores
from octavo.kernels.linear_batch.tiles import TABLE, WideTile
from octavo.kernels.triton_launch import INTERPRETED

STEP = 64  # columns
MOST_ROWS = 256
MULTIPLE = 16  # activation rows, of which a kernel is compiled for
MEMORY = 224 << 10  # bytes for stages; what a block can have is some KB more
DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BFLOAT16, SWIZZLE_128, PROMOTE_128 = 9, 3, 2  # CU_TENSOR_MAP_...


class _Map(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 128),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def can_compile() -> bool:
    """Whether NVRTC is there."""
    try:
        return not INTERPRETED and _nvrtc() is not None
    except OSError:
        return False


def launch_wide(x: Tensor, weight: Tensor, out: Tensor, tile: WideTile, *, activation: str) -> None:
    """``linear_batch`` and, with an ``activation``, ``gated_batch``, into ``out`` [P, T, N]; T is
    up to ``MOST_ROWS``, K a multiple of ``STEP`` in each part."""
    (num_rows, k), n = x.shape, out.shape[2]
    tokens, rows = padded(num_rows), tile.groups * (32 if activation else 64)
    assert n % rows == 0
    assert k % (tile.parts * STEP) == 0
    there = (x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()) // k
    tokens_map = _describe(x, (k, min(there, tokens)), (k,), (STEP, tokens))
    if activation:  # 8 rows of gate, 8 of up, and so on
        apart = (k, n * k, 8 * k)
        weight_map = _describe(weight, (k, 8, 2, n // 8), apart, (STEP, 8, 2, rows // 8))
    else:
        weight_map = _describe(weight, (k, n), (k,), (STEP, rows))
    function, memory = _function(tokens, tile.groups, activation, x.device)
    arguments = (
        tokens_map,
        weight_map,
        ctypes.c_void_p(out.data_ptr()),
        *(ctypes.c_uint(number) for number in (num_rows, n, k // tile.parts // STEP)),
    )
    places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    attribute = _Attribute(DEPENDENT)
    attribute.value[0] = 1
    config = _Config(
        (n // rows, tile.parts, 1),
        (tile.groups * 128 + (128 if _is_tight(tokens, tile.groups) else 32), 1, 1),
        memory,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        1,
    )
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, places, None))


def padded(num_rows: int) -> int:
    """Activation rows of the kernel that is taken."""
    assert num_rows <= MOST_ROWS
    return -(-num_rows // MULTIPLE) * MULTIPLE


def _describe(
    matrix: Tensor, sizes: Sequence[int], apart: Sequence[int], box: Sequence[int]
) -> _Map:
    """What the copy engine must know of ``matrix`` in so many dimensions, the last of the matrix
    first; ``apart`` in elements, of all but that one; ``box`` is what it copies at once."""
    found, rank = ctypes.create_string_buffer(192), len(sizes)
    begin = -ctypes.addressof(found) % 64
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(found, begin),
            BFLOAT16,
            rank,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*(matrix.itemsize * stride for stride in apart)),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # not interleaved
            SWIZZLE_128,
            PROMOTE_128,
            0,  # what lies outside becomes zero
        )
    )
    return _Map.from_buffer_copy(found, begin)


@cache
def _function(
    tokens: int, groups: int, activation: str, device: torch.device
) -> tuple[ctypes.c_void_p, int]:
    """The kernel on the device, the current one, and the bytes of its stages."""
    source = kernel_source(tokens, groups, activation)
    place = _place(source)
    if not place.exists():
        with ThreadPoolExecutor(granted_cores()) as threads:
            list(threads.map(_compile, {source, *_all_sources()}))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver, memory = _driver(), _num_stages(tokens, groups) * _stage_bytes(tokens, groups)
    _check(driver.cuModuleLoadData(ctypes.byref(module), place.read_bytes()))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"product"))
    _check(driver.cuFuncSetAttribute(function, SHARED_MEMORY, memory))
    return function, memory


def _all_sources() -> set[str]:
    """Of the whole table."""
    found = set()
    for (_, _, gated), tiles in TABLE.items():
        least = 0
        for most, tile in tiles.items():
            if isinstance(tile, WideTile):
                sizes = range(padded(least + 1), most + 1, MULTIPLE)
                found |= {
                    kernel_source(size, tile.groups, "silu" if gated else "") for size in sizes
                }
            least = most
    return found


def kernel_source(tokens: int, groups: int, activation: str) -> str:
    """What is compiled for so many activation rows."""
    pieces = 2 if _is_tight(tokens, groups) else 1
    instructions = [_instruction(tokens // pieces, piece) for piece in range(pieces)]
    values = {
        "TOKENS": tokens,
        "GROUPS": groups,
        "STAGES": _num_stages(tokens, groups),
        "GATED": int(activation != ""),
        "GELU": int(activation == "gelu_tanh"),
        "MULTIPLY(d, a, b, add)": f"{{ {' '.join(instructions)} }}",
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
    return defines + Path(__file__).with_suffix(".cu").read_text()


def _stage_bytes(tokens: int, groups: int) -> int:
    return (groups * 64 + tokens) * STEP * 2


def _num_stages(tokens: int, groups: int) -> int:
    return MEMORY // _stage_bytes(tokens, groups)


def _is_tight(tokens: int, groups: int) -> bool:
    """Whether sums fill the registers, so that four warpgroups have to share them unevenly. To the
    compiler each has a fourth, and one instruction can't have so many results."""
    return groups == 3 and tokens > 192


def _instruction(tokens: int, piece: int) -> str:
    """64 weight rows by ``tokens`` activation rows, those of a piece, by 16 columns."""
    count = tokens // 2  # of a thread's results
    results = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{piece * count + i}])' for i in range(count))
    return (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;\\n"'
        f' "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{results}}}, %{count},'
        f' %{count + 1}, p, 1, 1, 0, 0; }}" : {operands} : "l"(a),'
        f' "l"((b) + {piece * tokens * STEP * 2 // 16}), "r"((int)(add)));'
    )


def _place(source: str) -> Path:
    name = hashlib.sha256(source.encode()).hexdigest()
    return Path(knobs.cache.dir) / f"octavo-{name}.cubin"


def _compile(source: str) -> None:
    place = _place(source)
    if place.exists():
        return
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90a", b"--std=c++17")
    text = source.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"wide.cu", 0, None, None))
    if nvrtc.nvrtcCompileProgram(program, len(options), options):
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"wide.cu does not compile: {log.value.decode()}")
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(code.raw)
    unfinished.replace(place)


@cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA's driver or NVRTC says {result}")
