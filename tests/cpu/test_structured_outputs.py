"""Structured outputs from prompt to text: both loops, batches, ends, refusals, a real model."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.checkpoints import BOS, EOS, REST, Row, markov, smollm2_path, tiny
from helpers.llm import answer, both_ways, greedy, ids, is_idle, load_async, load_llm, stats
from helpers.schemas import LINKED_LIST, SCHEMAS

from octavo import LLM, SamplingParams, StructuredOutputs
from octavo.errors import InvalidRequestError

A = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
SPACE = ord(" ")
LOOPS = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])


def likes_spaces() -> dict[int, Row]:
    """O19's model: a space after everything, and "}" comes next after a digit."""
    digits = {ord(digit): {SPACE: 20.0, ord("}"): 10.0} for digit in "0123456789"}
    return {REST: {SPACE: 20.0}, **digits}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structured")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def spaces(request: pytest.FixtureRequest, folder: Path) -> LLM:
    path = folder / "spaces"
    if not path.exists():
        markov(path, likes_spaces())
    return load_llm(path, async_scheduling=request.param)


@pytest.fixture(scope="module")
def uniform(folder: Path) -> LLM:
    """Every token is equally likely: nothing but the mask gives an answer its shape."""
    return load_llm(markov(folder / "uniform", {}), async_scheduling=True)


@pytest.fixture(scope="module")
def random_model(folder: Path) -> Path:
    """More ids than the tokenizer has: the others may never be taken."""
    return tiny(folder / "tiny", vocab_size=290)


def structured(**options: Any) -> SamplingParams:
    names = ("json", "regex", "choice", "grammar", "json_object")
    structure = StructuredOutputs(**{n: options.pop(n) for n in names if n in options})
    return SamplingParams(**{"max_tokens": 300, **options}, structured_outputs=structure)


def test_white_space_ends_and_so_does_the_answer(spaces: LLM) -> None:
    """O19."""
    [output] = both_ways(spaces, "x", structured(json=A, max_tokens=64, temperature=0.0)).outputs
    assert re.fullmatch(r'\{ ?"a" ?: ?-?0 ?\}', output.text)
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == EOS
    assert bytes(output.token_ids[:-1]).decode() == output.text


def test_cut_json_is_told_by_length(spaces: LLM) -> None:
    """O19, with room for 3 tokens."""
    [output] = both_ways(spaces, "x", structured(json=A, max_tokens=3, temperature=0.0)).outputs
    assert output.text == '{ "'
    assert output.finish_reason == "length"


def test_json_object_has_no_runs_of_white_space(spaces: LLM) -> None:
    """O19. What is inside a string is the model's: this one fills it with spaces."""
    [output] = answer(spaces, "x", structured(json_object=True, max_tokens=64)).outputs
    assert output.text.startswith('{ "') or re.fullmatch(r"\{ ?\}", output.text)
    assert not output.text.startswith("{  ")


def test_logprobs_of_a_forced_answer_are_finite(folder: Path) -> None:
    """O16: they are the model's own, however unlikely the grammar's one way is to it."""
    llm = load_llm(markov(folder / "e", {REST: {REST: -100.0, **dict.fromkeys(b'"on', 0.0)}}))
    params = structured(json={"enum": ["one"]}, logprobs=20, temperature=0.0)
    [output] = both_ways(llm, "x", params).outputs
    assert output.text == '"one"'
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for entry in output.logprobs:
        assert json.dumps([one.logprob for one in entry.values()], allow_nan=False)
    assert output.logprobs[1][ord("o")].logprob == pytest.approx(-1.0986, abs=1e-3)
    assert output.logprobs[3][ord("e")].logprob == pytest.approx(-101.0986, abs=1e-2)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_a_uniform_model_are_valid(uniform: LLM, name: str) -> None:
    params = structured(json=SCHEMAS[name], n=4, seed=len(name), max_tokens=120)
    for output in answer(uniform, "x", params).outputs:
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), SCHEMAS[name])
    assert is_idle(uniform)


def test_recursion_is_valid_or_cut(uniform: LLM) -> None:
    """O18 c."""
    outputs = answer(
        uniform, "x", structured(json=LINKED_LIST, n=6, seed=1, max_tokens=200)
    ).outputs
    whole = [output.text for output in outputs if output.finish_reason == "stop"]
    assert len(whole) + sum(output.finish_reason == "length" for output in outputs) == 6
    for text in whole:
        jsonschema.validate(json.loads(text), LINKED_LIST)


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[a-c]{2,4}-\\d"}, "[a-c]{2,4}-\\d"),
        ({"choice": ["yes", "no", "néant"]}, "yes|no|néant"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,4}/'}, "<[a-z]{1,4}>"),
    ],
)
def test_regex_choice_and_grammar(uniform: LLM, structure: dict[str, Any], pattern: str) -> None:
    outputs = answer(uniform, "x", structured(**structure, n=5, seed=3)).outputs
    assert all(re.fullmatch(pattern, output.text) for output in outputs)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert len({output.text for output in outputs}) > 1  # each choice has a matcher of its own


@LOOPS
def test_a_batch_with_and_without_grammars_equals_each_alone(
    random_model: Path, overlapped: bool
) -> None:
    llm = load_llm(random_model, async_scheduling=overlapped, max_num_batched_tokens=64)
    prompts = [ids(BOS, *range(65, 65 + 3 * n)) for n in range(1, 7)]
    plain = SamplingParams(max_tokens=30, seed=5, repetition_penalty=1.2)
    shaped = [
        structured(json=SCHEMAS["nested arrays"], seed=1, max_tokens=40),
        plain,
        structured(regex="[a-f]+", max_tokens=25, seed=2, presence_penalty=1.0),
        plain,
        structured(choice=["one", "two"], seed=3, logprobs=2),
        structured(json=A, temperature=0.0, max_tokens=20),
    ]
    alone = [answer(llm, p, q).outputs[0] for p, q in zip(prompts, shaped, strict=True)]
    together = [output.outputs[0] for output in llm.generate(prompts, shaped, use_tqdm=False)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.finish_reason for one in together] == [one.finish_reason for one in alone]
    assert re.fullmatch("[a-f]*", alone[2].text)
    assert is_idle(llm)


def test_both_loops_give_the_same_ids_under_preemption(random_model: Path) -> None:
    """Rows that are computed again don't go through their grammar again."""
    prompts = [ids(BOS, *range(70, 70 + n)) for n in (8, 20, 30, 12)]
    params = [
        structured(regex="[a-z ]*", max_tokens=50, seed=seed, ignore_eos=True) for seed in range(4)
    ]
    runs = []
    for blocks, overlapped in ((200, False), (9, False), (9, True)):
        llm = load_llm(
            random_model,
            async_scheduling=overlapped,
            num_gpu_blocks_override=blocks,
            max_model_len=128,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runs.append([output.outputs for output in outputs])
        assert (stats(llm).num_preemptions > 0) == (blocks == 9)
        assert is_idle(llm)
    assert runs[0] == runs[1] == runs[2]
    assert all(re.fullmatch("[a-z ]{50}", one.text) for [one] in runs[0])


def test_ends(uniform: LLM) -> None:
    """min_tokens and ignore_eos put the end off for as long as the grammar can go on."""
    short = structured(regex="a{0,5}", min_tokens=4, seed=1)
    assert all(
        4 <= len(answer(uniform, "x", replace(short, seed=seed)).outputs[0].text) <= 5
        for seed in range(6)
    )
    [output] = answer(uniform, "x", structured(regex="ab", min_tokens=9, max_tokens=20)).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
    [output] = answer(uniform, "x", structured(regex="a{0,5}", ignore_eos=True)).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaaaa", "stop", None)
    assert output.token_ids[-1] == EOS
    [output] = answer(uniform, "x", structured(regex="abcd", stop="c")).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "c")
    [output] = answer(uniform, "x", structured(regex="abcd", stop_token_ids=[98])).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", 98)
    assert is_idle(uniform)


def test_bias_and_penalties_work_within_the_mask(uniform: LLM) -> None:
    params = structured(regex="[abc]{3}", temperature=0.0, logit_bias={98: 5.0, 120: 100.0})
    assert answer(uniform, "x", params).outputs[0].text == "bbb"
    params = structured(regex="[abc]{3}", temperature=0.0, presence_penalty=1.0)
    assert sorted(answer(uniform, "x", params).outputs[0].text) == ["a", "b", "c"]
    params = structured(regex="[abc]{3}", top_k=1, top_p=0.1, min_p=0.9, seed=1)
    assert answer(uniform, "x", params).outputs[0].text == "aaa"


def test_refusals(uniform: LLM, random_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="'not'"):
        answer(uniform, "x", structured(json={"not": {}}))
    assert is_idle(uniform)
    no_tokenizer = load_llm(random_model, skip_tokenizer_init=True)
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        answer(no_tokenizer, ids(1, 2), structured(json=A))
    assert answer(no_tokenizer, ids(1, 2), greedy(max_tokens=2)).finished


def test_a_grammar_that_turns_out_too_large_ends_its_request_only(uniform: LLM) -> None:
    huge = structured(regex="(a{1000}){1000}", max_tokens=20)
    fine = structured(choice=["ok"])
    first, second = uniform.generate(["x", "y"], [huge, fine], use_tqdm=False)
    assert first.outputs[0].finish_reason == "abort"
    assert first.error is not None
    assert "grammar" in first.error
    assert second.outputs[0].text == "ok"
    assert is_idle(uniform)


@pytest.mark.alone
def test_streams_side_by_side(random_model: Path) -> None:
    """Many grammars and none at once; leaving some of them early leaves nothing behind."""

    async def run() -> None:
        async with load_async(random_model, max_num_seqs=4) as llm:

            async def ask(index: int) -> str:
                params = structured(json={"enum": [f"{index} {i}" for i in range(50)]}, seed=index)
                if index % 3 == 0:
                    params = greedy(max_tokens=5)
                text = ""
                async for output in llm.generate(ids(1, 2, index), params):
                    text = output.outputs[0].text
                    if index % 3 == 2:
                        break
                return text

            texts = await asyncio.gather(*map(ask, range(12)))
            for index in (1, 4, 7, 10):
                assert re.fullmatch(rf'"{index} \d+"', texts[index])
            await asyncio.sleep(0.05)
            assert is_idle(llm)

    asyncio.run(run())


def test_smollm2_fills_in_a_schema() -> None:
    llm = load_llm(smollm2_path(), max_model_len=512)
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "inhabitants": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
            "is_capital": {"type": "boolean"},
        },
        "required": ["city", "inhabitants", "is_capital"],
        "additionalProperties": False,
    }
    question = "Describe Paris as JSON with the keys city, inhabitants and is_capital."
    [output] = llm.chat(
        [{"role": "user", "content": question}],
        structured(json=schema, temperature=0.0, max_tokens=80),
        use_tqdm=False,
    )
    reply = json.loads(output.outputs[0].text)
    jsonschema.validate(reply, schema)
    assert "Paris" in reply["city"]
    assert output.outputs[0].finish_reason == "stop"
