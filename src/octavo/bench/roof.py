"""The roof over decoding: a step reads all weights and each row's keys and values once, so memory's
bandwidth bounds its speed."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.build import choose_device, choose_dtype, open_model
from octavo.models.families import spec_from_config
from octavo.models.spec import DecoderSpec
from octavo.runtime.memory import DTYPE_BYTES, weight_bytes


@dataclass(frozen=True)
class ReadCost:
    """What a decode step of a model must read, on its device."""

    spec: DecoderSpec
    device: str
    weight_bytes: int
    kv_bytes: int  # of one token in one layer

    def of_history(self, first: int, last: int) -> int:
        """Bytes of keys and values that one row reads in its steps from ``first`` to ``last`` keys,
        both included."""
        return self.kv_bytes * sum(
            _sum_of_windows(first, last, layer.window) for layer in self.spec.layers
        )


def read_cost(config: EngineConfig) -> ReadCost:
    """The cost for the model and the precision of ``config``; no weights are read."""
    spec = spec_from_config(open_model(config).config)
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    # Embedding a token takes one row of its table, unless that is the head too, which reads all.
    lookup = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size * DTYPE_BYTES[dtype]
    return ReadCost(
        spec=spec,
        device=device,
        weight_bytes=weight_bytes(spec, dtype) - lookup,
        kv_bytes=2 * spec.kv_size * DTYPE_BYTES[kv_dtype],
    )


def _sum_of_windows(first: int, last: int, window: int | None) -> int:
    """``sum(min(n, window) for n in range(first, last + 1))``."""
    if last < first:
        return 0
    full = last if window is None else max(first - 1, min(last, window))
    return (first + full) * (full - first + 1) // 2 + (last - full) * (window or 0)
