"""The roofs over a step: it reads all weights and each row's keys and values once, so memory's
bandwidth bounds it, and it multiplies every token by all weights, so the matrix rate does."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.build import describe_model, open_model
from octavo.models.spec import DecoderSpec
from octavo.runtime.candidates import choose_runtime
from octavo.runtime.memory import layout_bytes


@dataclass(frozen=True)
class ReadCost:
    """What a decode step of a model must read, on its device. Products are in ``matmul_dtype``:
    "int8" where activations are quantised."""

    spec: DecoderSpec
    device: str
    weight_bytes: int
    kv_bytes: int  # of one token in one layer
    matmul_dtype: str

    def of_history(self, first: int, last: int) -> int:
        """Bytes of keys and values that one row reads in its steps from ``first`` to ``last`` keys,
        both included."""
        return self.kv_bytes * sum(
            _sum_of_windows(first, last, layer.window) for layer in self.spec.layers
        )


@dataclass(frozen=True)
class Roofs:
    """What the device can do: GB/s of reading alone, and 10**12 operations a second of products in
    ``matmul_dtype`` alone."""

    read_gb_s: float
    matmul_dtype: str
    matrix_tflops: float


def measure_roofs(cost: ReadCost) -> Roofs:
    """Both, now; with the model loaded, as threads and precision are set by then."""
    from octavo.bench.matrix_rate import matrix_rate
    from octavo.verify.timing import read_bandwidth

    dtype = cost.matmul_dtype
    return Roofs(read_bandwidth(cost.device), dtype, matrix_rate(cost.device, dtype))


def read_cost(config: EngineConfig) -> ReadCost:
    """The cost for the model and the precision of ``config``; no weights are read."""
    model = describe_model(config, open_model(config))
    spec, choice = model.spec, choose_runtime(model)
    # Embedding a token takes one row of its table, unless that is the head too, which reads all.
    lookup = 0 if spec.tied_embeddings else choice.runtime.embed_bytes(model)
    return ReadCost(
        spec=spec,
        device=model.device,
        weight_bytes=choice.runtime.weight_bytes(model) - lookup,
        kv_bytes=layout_bytes(choice.selections[0].kv_layout(1)) // config.block_size,
        matmul_dtype=choice.runtime.matmul_dtype(model),
    )


def row_flops(spec: DecoderSpec, first: int, last: int, num_logits: int) -> int:
    """Operations of one row's tokens that see from ``first`` to ``last`` keys, of which
    ``num_logits`` have logits: two for each weight, and four for each number of a seen key."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    weights = 2 * hidden * (spec.q_size + spec.kv_size) + 3 * hidden * inner
    pairs = sum(_sum_of_windows(first, last, layer.window) for layer in spec.layers)
    return (
        2 * weights * spec.num_layers * max(0, last - first + 1)
        + 4 * spec.q_size * pairs
        + 2 * spec.vocab_size * hidden * num_logits
    )


def _sum_of_windows(first: int, last: int, window: int | None) -> int:
    """``sum(min(n, window) for n in range(first, last + 1))``."""
    if last < first:
        return 0
    full = last if window is None else max(first - 1, min(last, window))
    return (first + full) * (full - first + 1) // 2 + (last - full) * (window or 0)
