"""Where the ``cuda`` runtime takes the fused candidate for small decode steps, and why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import tiny

from octavo.attention import candidates
from octavo.attention.backends import fused
from octavo.attention.candidates import Selection
from octavo.cache.groups import kv_groups
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.families import spec_from_config
from octavo.models.spec import DecoderSpec
from octavo.runtime.candidates import choose_attention

STEPS = "steps of few rows, 32 at most, all of them decoding"
UNCERTIFIED = "no certificate covers it; --attention-backend fused turns it on"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DecoderSpec:
    monkeypatch.setattr(fused, "hardware_of", lambda device: "sm_90")
    monkeypatch.setattr(candidates, "is_certified", lambda name, device: True)
    return spec_from_config(open_checkpoint(tiny(tmp_path)).config)


def choose(
    spec: DecoderSpec, dtype: str = "bfloat16", graph: bool = True, **config: Any
) -> Selection:
    pytest.importorskip("triton")
    [selection] = choose_attention(
        EngineConfig(**config), spec, kv_groups(spec), "cuda", dtype, dtype, graph=graph
    )
    return selection


def verdict(selection: Selection) -> tuple[str, str]:
    [found] = [v for v in selection.verdicts["decode"] if v.candidate == "fused"]
    return found.state, found.reason


@pytest.mark.parametrize("split_kv", ["auto", "off"])
def test_small_steps_are_fused_and_others_triton(spec: DecoderSpec, split_kv: str) -> None:
    selection = choose(spec, split_kv=split_kv)
    assert (selection.few_rows, selection.decode) == ("fused", "triton")
    assert verdict(selection) == ("chosen", STEPS)


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({"dtype": "float16"}, "refused", "products of a fused step are of bfloat16, not of float"),
        ({"dtype": "float32"}, "refused", "float32 isn't one of bfloat16, float16"),
        ({"graph": False}, "refused", "is for the cuda runtime's graphs"),
        ({"split_kv": "fixed"}, "refused", "fixed splits are the same in any batch"),
        ({"deterministic": True}, "off", "--attention-backend triton"),
        (
            {"disable_attention_backend": ("fused",)},
            "off",
            "--disable-attention-backend fused",
        ),
        ({"attention_backend": "triton"}, "off", "--attention-backend triton"),
    ],
)
def test_what_keeps_steps_from_being_fused(
    spec: DecoderSpec, changes: dict[str, Any], state: str, reason: str
) -> None:
    selection = choose(spec, **changes)
    assert (selection.few_rows, selection.decode) == (None, "triton")
    found = verdict(selection)
    assert found[0] == state
    assert reason in found[1]


def test_sides_and_norms_that_fused_products_lack(spec: DecoderSpec) -> None:
    wide = verdict(choose(replace(spec, intermediate_size=100)))
    assert wide == ("refused", "rows of 100 weights aren't a multiple of 16 bytes")
    normed = verdict(choose(replace(spec, post_norms=True)))
    assert normed[0] == "refused"
    assert "normed before" in normed[1]


def test_without_a_certificate_it_waits_to_be_asked_for(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "is_certified", lambda name, device: name != "fused")
    assert verdict(choose(spec)) == ("off", UNCERTIFIED)
    assert choose(spec, attention_backend="fused").few_rows == "fused"
    with pytest.raises(ConfigError, match="can't serve decode: fixed splits"):
        choose(spec, attention_backend="fused", split_kv="fixed")
