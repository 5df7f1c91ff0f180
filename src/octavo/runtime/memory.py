"""How many KV blocks a model gets, and whether it fits at all: decided before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from octavo.attention.spec import KVLayout
from octavo.cache.groups import KVGroup
from octavo.checkpoint import Checkpoint, weights_nbytes
from octavo.errors import InsufficientMemoryError
from octavo.models.spec import DecoderSpec
from octavo.models.weights import num_parameters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_MAX_SLOTS = 2**31 - 1  # slots are int32
_GB = 1e9


def weight_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Bytes of all weights, widened or rounded to ``dtype``."""
    return num_parameters(spec) * DTYPE_BYTES[dtype]


def widening_note(spec: DecoderSpec, checkpoint: Checkpoint, dtype: str) -> str | None:
    """A sentence for the user where weights take more memory than their file, None elsewhere."""
    stored, loaded = weights_nbytes(checkpoint), weight_bytes(spec, dtype)
    if loaded <= stored:
        return None
    matrices = (tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
    formats = ", ".join(sorted({tensor.format for tensor in matrices}))
    return (
        f"weights are widened from {formats} to {dtype}: {stored / _GB:.2f} GB in the file, "
        f"{loaded / _GB:.2f} GB in memory"
    )


def activation_bytes(
    spec: DecoderSpec, dtype: str, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Bytes that a full step holds at its worst, beside weights and KV: the FFN's inputs and
    outputs of every token and two copies of each running request's logits."""
    width = 4 * spec.hidden_size + 3 * spec.intermediate_size + 2 * spec.q_size + 2 * spec.kv_size
    logits = 2 * max_num_seqs * spec.vocab_size * DTYPE_BYTES["float32"]
    return max_num_batched_tokens * width * DTYPE_BYTES[dtype] + logits


def plan_kv(
    spec: DecoderSpec,
    groups: Sequence[KVGroup],
    layouts: Sequence[KVLayout],
    *,
    block_size: int,
    weights: int,
    dtype: str,
    free_bytes: int,
    utilization: float,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    fill: bool,
    activations: int | None = None,
) -> tuple[int, ...]:
    """Blocks for each KV group, from the memory that weights and activations leave.

    ``weights`` are their bytes once loaded, ``dtype`` is that of activations. ``layouts`` are those
    of one block of one layer in each group. The model may use the share ``utilization`` of
    ``free_bytes``. With ``fill`` the pools take all that is left, as on a GPU; without, no more
    than ``max_num_seqs`` requests of ``max_model_len`` tokens can use. A request takes its whole
    length from a full-attention group and its window from a sliding one, where prefix caching
    doubles it to let prefixes outlive their requests; a step's new tokens
    (``max_num_batched_tokens``) come on top there. ``activations`` are a full step's bytes, where
    they have been measured.

    Raises :class:`InsufficientMemoryError` where not even one request of ``max_model_len`` fits.
    """
    if activations is None:
        activations = activation_bytes(spec, dtype, max_num_batched_tokens, max_num_seqs)
    usable = int(free_bytes * utilization)
    budget = usable - weights - activations

    def blocks_per_request(group: KVGroup, length: int) -> int:
        whole = _blocks(length, block_size)
        if group.window is None:
            return whole
        window = min(whole, _blocks(group.window, block_size) + 1)  # it may start in mid-block
        return 2 * window if prefix_caching else window

    def blocks_per_step(group: KVGroup, length: int) -> int:
        if group.window is None:
            return 0
        return _blocks(min(length, max_num_batched_tokens), block_size)

    def cost(length: int, requests: int) -> int:
        return sum(
            _block_bytes(group, layout)
            * (requests * blocks_per_request(group, length) + blocks_per_step(group, length))
            for group, layout in zip(groups, layouts, strict=True)
        )

    if cost(max_model_len, 1) > budget:
        fitting = _largest(max_model_len, lambda length: cost(length, 1) <= budget)
        way_out = (
            f"set max_model_len to at most {fitting}"
            if fitting
            else "use a smaller model, a narrower dtype or a machine with more memory"
        )
        raise InsufficientMemoryError(
            f"the weights take {weights / _GB:.2f} GB, a step up to {activations / _GB:.2f} GB and "
            f"the KV cache of one request of {max_model_len} tokens "
            f"{cost(max_model_len, 1) / _GB:.2f} GB, but only {usable / _GB:.2f} GB can be used "
            f"({utilization:g} of {free_bytes / _GB:.2f} GB free); {way_out}",
            fitting,
        )
    per_step = cost(max_model_len, 0)
    requests = (budget - per_step) / (cost(max_model_len, 1) - per_step)
    if not fill:
        requests = min(requests, max_num_seqs)
    return tuple(
        min(
            int(requests * blocks_per_request(group, max_model_len))
            + blocks_per_step(group, max_model_len),
            _MAX_SLOTS // block_size,
        )
        for group in groups
    )


def layout_bytes(layout: KVLayout) -> int:
    """Bytes of one layer's pool."""
    return (prod(layout.k_shape) + prod(layout.v_shape)) * DTYPE_BYTES[layout.dtype]


def _block_bytes(group: KVGroup, layout: KVLayout) -> int:
    return len(group.layers) * layout_bytes(layout)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, 0 if none does; what fits, fits smaller too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
