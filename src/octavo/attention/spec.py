"""The contract between the engine and whatever computes attention.

Between candidates a partial is ``(out, lse)``: ``out`` fp32, already divided by its weight sum,
and ``lse = m + ln(l)``, natural log, ``-inf`` (with ``out`` 0) for an empty segment. Foreign
conventions are converted at the adapter's edge, never inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.config import DEFAULT_SPLIT_TOKENS, SplitMode

Phase = Literal["prefill", "decode"]
Tensor = Any  # a torch tensor (or a numpy array in the cpu runtime); this package imports neither


@dataclass(frozen=True)
class AttentionSpec:
    """What one kind of attention layer needs, on one device. Dtypes are torch's names as strings.

    ``decode`` rows have one query token each, ``prefill`` rows any number (causal, aligned to the
    end of the history). ``window`` counts the keys a query sees, its own included. ``soft_cap``
    replaces a score ``s`` by ``cap * tanh(s / cap)``. ``split_tokens`` is the segment length of
    ``fixed`` mode; in long rows ``triton`` makes them longer, by the row's length alone. ``graph``
    says that the call is captured in a CUDA graph.
    """

    phase: Phase
    device: str  # "cpu", "cuda", "npu"
    dtype: str  # of queries, new keys and values, and the output
    kv_dtype: str
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    split_mode: SplitMode = "auto"
    split_tokens: int = DEFAULT_SPLIT_TOKENS
    graph: bool = False


@dataclass(frozen=True)
class Support:
    """Whether a candidate can serve a spec, and if not, why (a phrase for people)."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class KVLayout:
    """How a candidate stores one layer's keys and values: full shapes for ``num_blocks`` blocks.

    Two candidates share a pool if their layouts are equal; ``order`` tells layouts of equal shape
    apart (``"NHD"``: block, token, head, dim; ``"HND"``: block, head, token, dim; ``"HDN"`` ...).
    """

    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    k_order: str
    v_order: str
    dtype: str


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of one phase in one step (numpy, on the host). ``query_start_loc`` starts at 0 and
    counts within this phase's tokens; ``block_table`` is that of the layer's KV group."""

    query_start_loc: NDArray[np.int32]  # [R + 1]
    seq_lens: NDArray[np.int32]  # [R], the new tokens included
    block_table: NDArray[np.int32]  # [R, blocks]


class Backend(Protocol):
    """One candidate opened for one spec. ``plan`` runs once per step, the rest once per layer."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Decide splits and upload what the kernels need."""

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store new keys ``[T, Hkv, D]`` and values ``[T, Hkv, Dv]`` at ``slot_mapping`` [T]; a
        token whose slot is negative is padding and isn't stored."""

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Any,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``q [T, H, D]`` -> ``out [T, H, Dv]`` in q's dtype and ``lse [T, H]``, fp32. ``out``,
        contiguous, is made where it isn't given."""

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Keys ``[length, Hkv, D]`` and values of one sequence, whatever the layout."""


def placed(result: Tensor, out: Tensor | None) -> Tensor:
    """What a backend whose kernels can't write into ``out`` returns as it."""
    if out is None:
        return result
    out[:] = result
    return out


class Candidate(Protocol):
    """An implementation that may serve. Importing it is cheap; ``open`` imports what it needs."""

    name: str

    def supports(self, spec: AttentionSpec) -> Support:
        """Whether ``open(spec)`` works here, decided without importing torch."""

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        """The layout in which this candidate reads and writes the pool."""

    def open(self, spec: AttentionSpec) -> Backend:
        """Make it ready for one spec: the heavy imports happen here."""
