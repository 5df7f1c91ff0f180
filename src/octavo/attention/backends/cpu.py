"""The ``cpu`` candidate: our split-KV decode kernel and our prefill, shared over the cores.

Takes torch tensors or numpy arrays (of bfloat16 as uint16) and gives the same kind back; torch
isn't imported for the latter. All is computed in float32, but for prefill's products with bfloat16
queries (``cpu_step.prefill_call``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support, Tensor, placed
from octavo.attention.splits import SplitPlan

if TYPE_CHECKING:
    from octavo.attention.cpu_step import CpuPlan
    from octavo.kernels.program import Call, Program
    from octavo.kernels.team import Team

TILE = 16  # tokens, as in kernels/kv_store/cpu.py
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

# Below this many bytes of keys and values one thread works alone. Provisional: measured before the
# team of threads.
SHORT_BYTES = 1 << 20


class CpuCandidate:
    name = "cpu"

    def supports(self, spec: AttentionSpec) -> Support:
        refusals = (
            (spec.device != "cpu", f"runs on the CPU, not on {spec.device}"),
            (spec.graph, "can't be captured in a CUDA graph"),
            (spec.kv_dtype not in KV_BYTES, f"stores no {spec.kv_dtype} keys and values"),
            (spec.num_heads % spec.num_kv_heads != 0, "needs whole groups of query heads"),
            (
                spec.block_size % TILE != 0,
                f"block_size {spec.block_size} isn't a multiple of {TILE}",
            ),
            (spec.head_dim % 8 != 0, f"head_dim {spec.head_dim} isn't a multiple of 8"),
            (spec.v_head_dim % 8 != 0, f"v_head_dim {spec.v_head_dim} isn't a multiple of 8"),
        )
        reason = next((reason for refused, reason in refusals if refused), "")
        return Support(not reason, reason)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        tiles = (num_blocks, spec.num_kv_heads, spec.block_size // TILE)
        pack = 4 // KV_BYTES[spec.kv_dtype]
        k_shape: tuple[int, ...]
        v_shape: tuple[int, ...]
        if spec.kv_dtype == "int8":  # and the scales of a tile's tokens, 4 bytes each
            k_shape = (*tiles, spec.head_dim // pack + 1, TILE, pack)
            v_shape = (*tiles, TILE // pack * spec.v_head_dim + TILE, pack)
        else:
            k_shape = (*tiles, spec.head_dim // pack, TILE, pack)
            v_shape = (*tiles, TILE // pack, spec.v_head_dim, pack)
        return KVLayout(k_shape, v_shape, "HTDNP", "HTNDP", spec.kv_dtype)

    def open(self, spec: AttentionSpec) -> CpuBackend:
        return CpuBackend(spec)


@dataclass(frozen=True)
class BoundPlan:
    """A step's plan with the calls that carry it out; a run changes their records."""

    step: CpuPlan
    calls: tuple[Call, ...]
    program: Program
    team: Team

    @property
    def splits(self) -> SplitPlan:
        return self.step.splits


class CpuBackend:
    """See :class:`octavo.attention.spec.Backend`."""

    def __init__(self, spec: AttentionSpec) -> None:
        from octavo.attention import cpu_step
        from octavo.kernels import program
        from octavo.kernels.kv_store import cpu as kv_store
        from octavo.kernels.team import team

        self.spec = spec
        self._step = cpu_step
        self._program = program
        self._kv_store = kv_store
        self._alone, self._team = team(1), team()

    def plan(self, batch: AttentionBatch, splits: SplitPlan | None = None) -> BoundPlan:
        """``splits`` cuts a decode step elsewhere than its spec's mode would."""
        spec = self.spec
        lens = batch.seq_lens if spec.window is None else np.minimum(batch.seq_lens, spec.window)
        token_bytes = (
            spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * KV_BYTES[spec.kv_dtype]
        )
        short = int(lens.sum()) * token_bytes <= SHORT_BYTES
        team = self._alone if short else self._team
        step = self._step.CpuPlan(spec, team.num_threads)
        num_decodes = len(batch.seq_lens) if spec.phase == "decode" else 0
        step.fill(
            batch.query_start_loc, batch.seq_lens, num_decodes, batch.block_table, splits=splits
        )
        nowhere = np.empty(0, np.float32)
        places = dict.fromkeys(("q", "out", "lse", "k_cache", "v_cache"), nowhere)
        calls: tuple[Call, ...]
        if spec.phase == "decode":
            calls = self._step.decode_calls(spec, step, **places)
        else:
            calls = (self._step.prefill_call(spec, step, **places),)
        return BoundPlan(step, calls, self._program.Program(calls), team)

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self._kv_store.store(
            _float32(k),
            _float32(v),
            _address(k_cache),
            _address(v_cache),
            _numpy(slot_mapping),
            self.spec.block_size,
            KV_BYTES[self.spec.kv_dtype],
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: BoundPlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        result = np.empty((len(q), spec.num_heads, spec.v_head_dim), np.float32)
        lse = np.empty((len(q), spec.num_heads), np.float32)
        arrays = {"q": _float32(q), "out": result, "lse": lse}
        if sinks is not None:
            arrays["sinks"] = _float32(sinks)
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        addresses |= {"k_cache": _address(k_cache), "v_cache": _address(v_cache)}
        for call in plan.calls:
            for name in addresses.keys() & set(call.op.record.names or ()):
                call.record[name] = addresses[name]
        plan.team.run(plan.program)
        if isinstance(q, np.ndarray):
            return placed(result, out), lse
        import torch

        return placed(torch.from_numpy(result).to(q.dtype), out), torch.from_numpy(lse)

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """int8 is given back as float32."""
        spec = self.spec
        used = _numpy(block_table)[: -(-length // spec.block_size)]
        k, v = _numpy(k_cache)[used], _numpy(v_cache)[used]
        if spec.kv_dtype == "int8":
            k, k_scales = _split_scales(k, spec.head_dim)
            v, v_scales = _split_scales(v, spec.v_head_dim)
        pack = 4 // KV_BYTES[spec.kv_dtype]
        tiles = (len(used), spec.num_kv_heads, spec.block_size // TILE)
        k = k.reshape(*tiles, spec.head_dim // pack, TILE, pack).transpose(0, 2, 4, 1, 3, 5)
        v = v.reshape(*tiles, TILE // pack, spec.v_head_dim, pack).transpose(0, 2, 3, 5, 1, 4)
        k = k.reshape(-1, spec.num_kv_heads, spec.head_dim)[:length]
        v = v.reshape(-1, spec.num_kv_heads, spec.v_head_dim)[:length]
        if spec.kv_dtype == "int8":
            k, v = k * k_scales[:length], v * v_scales[:length]
        return _kind_of(k_cache, k), _kind_of(v_cache, v)


def _split_scales(
    tiles: NDArray[np.int8], width: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 tiles [blocks, Hkv, tiles, ...] without their scales, and these as [tokens, Hkv, 1]."""
    flat = tiles.reshape(*tiles.shape[:3], -1)
    numbers, scales = flat[..., : TILE * width], flat[..., TILE * width :]
    by_token = np.ascontiguousarray(scales).view(np.float32).transpose(0, 2, 3, 1)
    return numbers, by_token.reshape(-1, tiles.shape[1], 1)


def _numpy(x: Tensor) -> NDArray[Any]:
    """The same memory as a numpy array; bfloat16 as uint16."""
    if isinstance(x, np.ndarray):
        return x
    import torch

    if x.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = x.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[Any] = x.numpy()
    return array


def _kind_of(original: Tensor, array: NDArray[Any]) -> Tensor:
    """The array as what :func:`_numpy` was given."""
    if isinstance(original, np.ndarray):
        return array
    import torch

    if original.dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _float32(x: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(x if isinstance(x, np.ndarray) else x.float().numpy(), np.float32)


def _address(x: Tensor) -> int:
    """Of a contiguous array's first byte."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
