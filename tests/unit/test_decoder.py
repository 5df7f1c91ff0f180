"""A spec lowered to stages, and stages covered by ops."""

from __future__ import annotations

import pytest

from octavo.models.decoder import LAYER_STAGES, Stage, StageName, cover, lower
from octavo.models.spec import DecoderSpec, LayerSpec, RopeSpec

SPEC = DecoderSpec(
    family="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerSpec(RopeSpec(1e4, 8)),) * 2,
    max_position=8,
    norm_eps=1e-5,
    attention_scale=1.0,
)
SINGLE: dict[tuple[StageName, ...], str] = {(stage.name,): stage.name for stage in lower(SPEC)}


def test_stages_in_order() -> None:
    stages = lower(SPEC)
    assert stages[0] == Stage("embed")
    assert stages[1:10] == tuple(Stage(name, 0) for name in LAYER_STAGES)
    assert stages[10:19] == tuple(Stage(name, 1) for name in LAYER_STAGES)
    assert stages[19:] == (Stage("norm_head"), Stage("sample"))


def test_one_op_a_stage() -> None:
    assert cover(lower(SPEC), SINGLE) == tuple((s.name, s.layer) for s in lower(SPEC))


def test_a_fused_op_replaces_its_stages() -> None:
    ops = {**SINGLE, ("attend_split", "attend_merge", "out_proj"): "fused"}
    program = cover(lower(SPEC), ops)
    assert program.count(("fused", 0)) == program.count(("fused", 1)) == 1
    assert not {op for op, _ in program} & {"attend_split", "attend_merge", "out_proj"}
    assert len(program) == len(lower(SPEC)) - 4


def test_ops_dont_reach_across_layers() -> None:
    ops = {**SINGLE, ("reduce_add", "norm_qkv"): "across"}
    assert "across" not in {op for op, _ in cover(lower(SPEC), ops)}


def test_a_stage_that_nothing_covers() -> None:
    ops = {names: op for names, op in SINGLE.items() if names != ("ffn_down",)}
    with pytest.raises(LookupError, match="ffn_down"):
        cover(lower(SPEC), ops)
