"""The roof over decoding: a step reads all weights and each row's keys and values once, so memory's
bandwidth bounds its speed."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.build import describe_model, open_model
from octavo.models.spec import DecoderSpec
from octavo.runtime.candidates import choose_runtime
from octavo.runtime.memory import layout_bytes


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
    model = describe_model(config, open_model(config))
    spec, choice = model.spec, choose_runtime(model)
    # Embedding a token takes one row of its table, unless that is the head too, which reads all.
    lookup = 0 if spec.tied_embeddings else choice.runtime.embed_bytes(model)
    return ReadCost(
        spec=spec,
        device=model.device,
        weight_bytes=choice.runtime.weight_bytes(model) - lookup,
        kv_bytes=layout_bytes(choice.selections[0].kv_layout(1)) // config.block_size,
    )


def _sum_of_windows(first: int, last: int, window: int | None) -> int:
    """``sum(min(n, window) for n in range(first, last + 1))``."""
    if last < first:
        return 0
    full = last if window is None else max(first - 1, min(last, window))
    return (first + full) * (full - first + 1) // 2 + (last - full) * (window or 0)
