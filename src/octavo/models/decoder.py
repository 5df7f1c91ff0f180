"""A spec lowered to one flat list of named stages, and what a runtime needs to carry it out.

A runtime carries the list out in order. What it has for it is a table: consecutive stage names ->
the op that does them, so a fused op says itself which stages it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from octavo.models.spec import DecoderSpec

StageName = Literal[
    "embed",  # ids -> x, the residual stream
    "norm_qkv",  # x -> q, k, v of the new tokens
    "rope_write",  # QK-norm, rotation; k and v go to the KV pool
    "attend_split",  # q against the segments of the history -> partials
    "attend_merge",  # partials -> attention's output
    "out_proj",
    "reduce_add",  # sum over ranks, post-norm where the spec has one, x += it
    "norm_ffn_up",  # x -> the activated intermediate
    "ffn_down",
    "norm_head",  # x of the wanted tokens -> logits
    "sample",  # logits -> ids
]

LAYER_STAGES: tuple[StageName, ...] = (
    "norm_qkv",
    "rope_write",
    "attend_split",
    "attend_merge",
    "out_proj",
    "reduce_add",
    "norm_ffn_up",
    "ffn_down",
    "reduce_add",
)


@dataclass(frozen=True)
class Stage:
    """One step of a model's forward pass; ``layer`` is None outside the layers."""

    name: StageName
    layer: int | None = None


Op = TypeVar("Op")


def lower(spec: DecoderSpec) -> tuple[Stage, ...]:
    """The stages of a whole step, in order."""
    layers = (Stage(name, i) for i in range(spec.num_layers) for name in LAYER_STAGES)
    return (Stage("embed"), *layers, Stage("norm_head"), Stage("sample"))


def cover(
    stages: Sequence[Stage], ops: Mapping[tuple[StageName, ...], Op]
) -> tuple[tuple[Op, int | None], ...]:
    """Replace stages by ops, the one that covers most stages first: ``((op, layer), ...)``.

    An op never reaches across layers. Raises LookupError for a stage that no op covers.
    """
    longest_first = sorted(ops, key=len, reverse=True)
    program: list[tuple[Op, int | None]] = []
    start = 0
    while start < len(stages):
        layer = stages[start].layer
        for names in longest_first:
            if tuple(stages[start : start + len(names)]) == tuple(Stage(n, layer) for n in names):
                program.append((ops[names], layer))
                start += len(names)
                break
        else:
            raise LookupError(f"no op covers {stages[start]}")
    return tuple(program)
