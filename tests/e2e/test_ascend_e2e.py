"""Whole models in the eager runtime over the Ascend adapter and the operator's stand-in.

Candidates are chosen for an NPU and opened where the stand-in's tensors are. Both sides compute in
bfloat16 with a bfloat16 KV cache; the other side attends with ``reference``. Pools begin as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import fia_standin
from helpers.checkpoints import smollm2_path, tiny
from helpers.driver import Driver, relative_error
from helpers.fia_standin import FiaStandIn

from octavo.attention.candidates import Selection
from octavo.cache.groups import KVGroup, kv_groups
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.engine.request import Request
from octavo.models.families import spec_from_config
from octavo.models.spec import DecoderSpec
from octavo.models.weights import check_weights
from octavo.runtime.candidates import choose_attention
from octavo.runtime.eager import EagerRuntime
from octavo.runtime.torch_weights import DecoderTensors, load_weights
from octavo.sampling_params import SamplingParams
from octavo.text import load_tokenizer

# An id is settled where the reference's best logit leads by this much (logits go to about 25). By
# rounding to bfloat16 in another order, two right sides were seen to choose otherwise up to 0.13.
GAP = 0.5

TEXT = (
    "The lighthouse at the northern end of the island was built in 1852 by a company of sailors "
    "who had lost two ships on the reef. For a century a keeper lived there with his family. "
    "Every evening he climbed the ninety-four steps with a can of oil, trimmed the wick and wound"
    " the clock that turned the lens. The log books are kept in the library of the town: they "
    "tell of storms, of birds that flew against the glass, of a whale that lay in the bay for "
    "three days, and of the winter when the sea froze and a doctor came over the ice on foot. In "
    "1961 the lamp became electric and the last keeper moved to the mainland, where he opened a "
    "small shop for clocks. His daughter, who was born in the tower, still winds the old clock on"
    " every first of May, and visitors may climb the steps with her. From the gallery one sees "
    "the whole island, the reef with the two wrecks, and on a clear day the white cliffs on the "
    "other side of the strait. There is no road to it: one walks for an hour from the harbour, "
    "past the school and two farms, or asks a fisherman for a boat, who will come back in the "
    "evening. "
)
QUESTIONS = (
    "Question: Who built the lighthouse? Answer: The lighthouse was built by",
    "Question: What did the last keeper do on the mainland? Answer: He opened a",
)


@dataclass(frozen=True)
class Model:
    spec: DecoderSpec
    weights: DecoderTensors
    groups: tuple[KVGroup, ...]


def load(path: Path) -> Model:
    checkpoint = open_checkpoint(path)
    spec = check_weights(spec_from_config(checkpoint.config), checkpoint)
    weights = load_weights(spec, checkpoint, device="cpu", dtype=torch.bfloat16, num_threads=1)
    return Model(spec, weights, kv_groups(spec))


def runtime(model: Model, backend: str, num_blocks: int, **settings) -> EagerRuntime:
    config = EngineConfig(dtype="bfloat16", attention_backend=backend, **settings)

    def opened_here(chosen: Selection) -> Selection:
        assert (chosen.prefill, chosen.decode) == (backend, backend)
        prefill, decode = (
            replace(spec, device="cpu") for spec in (chosen.prefill_spec, chosen.decode_spec)
        )
        return replace(chosen, prefill_spec=prefill, decode_spec=decode)

    chosen = choose_attention(config, model.spec, model.groups, "npu", "bfloat16", "bfloat16")
    selections = [opened_here(one) for one in chosen]
    made = EagerRuntime(
        model.spec, model.weights, model.groups, selections, [num_blocks] * len(selections)
    )
    for layer in made.layers:
        layer.k_cache.fill_(float("nan"))
        layer.v_cache.fill_(float("nan"))
    return made


def driver(model: Model, backend: str, *, num_blocks: int = 8, **settings) -> Driver:
    made = runtime(model, backend, num_blocks, **settings)
    return Driver(made, model.groups, settings["block_size"], num_blocks)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> FiaStandIn:
    torch.set_num_threads(1)
    return fia_standin.install(monkeypatch)


@pytest.fixture
def in_layout(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda layout: monkeypatch.setenv("OCTAVO_ASCEND_FIA_LAYOUT", layout)


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load(smollm2_path())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two that begin with the same block of 128 tokens and end shortly before 256."""
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path()), None)
    text = tokenizer.encode(TEXT)
    questions = [tokenizer.encode(question) for question in QUESTIONS]
    return [text[: 253 - len(question)] + question for question in questions]


def check_choices(chosen: list[int], logits: np.ndarray) -> None:
    """``chosen[i]`` is the best id by the reference's ``logits[i]`` wherever that is clear."""
    best = np.sort(logits, -1)
    clear = best[:, -1] - best[:, -2] > GAP
    assert clear.mean() >= 0.5
    np.testing.assert_array_equal(np.array(chosen)[clear], logits.argmax(-1)[clear])


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_smollm2_teacher_forced(operator, in_layout, smollm2, prompts, layout) -> None:
    """A prompt in chunks, then decode across the end of a block."""
    in_layout(layout)
    ids = prompts[0][:134]
    got = driver(smollm2, "ascend_fia", block_size=128).run(ids, chunk=100, decode_from=125)
    assert len(operator.calls) == smollm2.spec.num_layers * (2 + 9)
    wanted = driver(smollm2, "reference", block_size=128).run(ids)
    assert relative_error(got, wanted) < 0.05
    check_choices(got.argmax(-1).tolist(), wanted)


def test_smollm2_with_prefix_hits_and_preemption(operator, in_layout, smollm2, prompts) -> None:
    """Two requests share their first block, and both reach for a third where only one is left."""
    in_layout("BNSD")
    num_blocks, new_tokens = 4, 6
    limits = EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=200,
        max_model_len=300,
        block_size=128,
        num_blocks=(num_blocks,),
    )
    engine = Engine(
        runtime(smollm2, "ascend_fia", num_blocks, block_size=128), smollm2.groups, limits
    )
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    requests = [Request(str(i), ids, params, frozenset(), seed=0) for i, ids in enumerate(prompts)]
    engine.add(requests[0])
    engine.step()
    engine.add(requests[1])
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
    assert requests[1].num_cached_tokens == 128
    assert engine.stats().num_preemptions == 1
    assert {call["input_layout"] for call in operator.calls} == {"BNSD"}

    judge = driver(smollm2, "reference", block_size=128)
    for request in requests:
        assert len(request.output_token_ids) == new_tokens
        logits = judge.run(request.token_ids)
        first = len(request.prompt_token_ids) - 1
        check_choices(request.output_token_ids, logits[first:-1])


@pytest.mark.parametrize(
    ("config", "settings", "kv_lens"),
    [
        ({}, {}, [70]),
        ({}, {"split_kv": "fixed", "split_kv_tokens": 16}, [16, 16, 16, 16, 6]),
        ({"model_type": "mistral", "sliding_window": 24}, {"split_kv": "off"}, [70 - 32]),
    ],
    ids=["whole", "split", "window"],
)
def test_head_size_128_over_tnd(operator, in_layout, tmp_path, config, settings, kv_lens) -> None:
    in_layout("TND")
    model = load(tiny(tmp_path, head_dim=128, **config))
    ids = np.random.default_rng(2).integers(0, 261, 70).tolist()
    got = driver(model, "ascend_fia", block_size=16, **settings).run(ids, chunk=33, decode_from=50)
    assert operator.calls[-1]["actual_seq_kvlen"] == kv_lens
    assert operator.calls[-1]["sparse_mode"] == (4 if config else 3)
    wanted = driver(model, "reference", block_size=16, **settings).run(ids)
    assert relative_error(got, wanted) < 0.03
    check_choices(got.argmax(-1).tolist(), wanted)
