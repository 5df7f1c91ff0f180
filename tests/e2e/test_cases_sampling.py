"""Reported faults O08 to O16: limits, the sampler's edges, seeds, penalties, log probabilities.

The cases, with what other engines did wrong, are in shared/cases/engine.md. MARKOV models are
tables, so every distribution is known; TINY's numbers are held against transformers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import (
    BYTE_VOCAB,
    EOS,
    REST,
    chain,
    markov,
    reference_logits,
    smollm2_path,
    tiny,
    uniform26,
)
from helpers.llm import answer, both_ways, greedy, ids, is_idle, load_llm, stats

from octavo import LLM, Logprob, RequestOutput, SamplingParams
from octavo.errors import ContextLengthError, InvalidRequestError

TmpFactory = pytest.TempPathFactory


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


# ---- O08: max_tokens 0, left out, too large; a prompt too long


@pytest.fixture(scope="module")
def limited(tmp_path_factory: TmpFactory) -> tuple[LLM, Path]:
    folder = tiny(tmp_path_factory.mktemp("tiny"), add_bos=False)
    return load_llm(folder, max_model_len=64), folder


def test_o08_scoring_a_prompt(limited: tuple[LLM, Path]) -> None:
    llm, folder = limited
    output = answer(llm, "Yes", greedy(max_tokens=0, prompt_logprobs=1, logprobs=1))
    [completion] = output.outputs
    assert (completion.text, completion.token_ids, completion.logprobs) == ("", [], [])
    assert completion.finish_reason == "length"
    expected = log_softmax(reference_logits(folder, list(b"Yes")))
    first, *scores = output.prompt_logprobs or []
    assert first is None
    assert len(scores) == 2
    for position, entry in enumerate(scores):
        token = b"Yes"[position + 1]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(expected[position, token], abs=1e-4)
        assert entry[token].decoded_token == chr(token)
        assert any(one.rank == 1 for one in entry.values())


def test_o08_nothing_asked_for_is_refused(limited: tuple[LLM, Path]) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens 0"):
        limited[0].generate("Yes", greedy(max_tokens=0))


def test_o08_scoring_for_several_answers(limited: tuple[LLM, Path]) -> None:
    params = SamplingParams(n=2, max_tokens=0, prompt_logprobs=0)
    output = answer(limited[0], "Yes", params)
    assert len(output.prompt_logprobs or []) == 3
    assert [one.finish_reason for one in output.outputs] == ["length", "length"]


@pytest.mark.parametrize("max_tokens", [None, 4, 5, 10**6])
def test_o08_what_has_no_room_is_cut(limited: tuple[LLM, Path], max_tokens: int | None) -> None:
    params = greedy(max_tokens=max_tokens, ignore_eos=True)
    output = answer(limited[0], "x" * 60, params)
    assert len(output.prompt_token_ids) == 60  # never cut
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [64, 65])
def test_o08_a_prompt_without_room_is_refused(limited: tuple[LLM, Path], length: int) -> None:
    with pytest.raises(ContextLengthError, match=f"{length}.* max_model_len is 64") as refusal:
        limited[0].generate("x" * length, greedy(max_tokens=1))
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "prompt"
    assert is_idle(limited[0])


def test_o08_a_prompt_may_fill_the_context_to_be_scored(limited: tuple[LLM, Path]) -> None:
    params = greedy(max_tokens=0, prompt_logprobs=0)
    assert len(answer(limited[0], "x" * 64, params).prompt_logprobs or []) == 64
    with pytest.raises(ContextLengthError):
        limited[0].generate("x" * 65, params)


def test_o08_chat_by_the_same_rules(limited: tuple[LLM, Path]) -> None:
    llm, _ = limited
    template = "{{ messages[0].content }}"
    message = [{"role": "user", "content": "x" * 60}]
    params = greedy(max_tokens=None, ignore_eos=True)
    [output] = llm.chat(message, params, chat_template=template)
    assert len(output.outputs[0].token_ids) == 4
    message[0]["content"] = "x" * 64
    with pytest.raises(ContextLengthError):
        llm.chat(message, params, chat_template=template)


# ---- O09: a temperature that is tiny, but not zero

Q_ROW = {ord("q"): {ord("a"): 12.0, ord("b"): 11.0}}


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def close_pair(request: pytest.FixtureRequest, tmp_path_factory: TmpFactory) -> LLM:
    folder = markov(tmp_path_factory.mktemp("pair"), {**Q_ROW, **chain("a", "q")})
    return load_llm(folder, dtype=request.param)


@pytest.mark.parametrize("temperature", [0, 1e-10, 1e-6, 1e-4, 0.01, 5e-324])
def test_o09_a_tiny_temperature_takes_the_likeliest(close_pair: LLM, temperature: float) -> None:
    cold = SamplingParams(temperature=temperature, max_tokens=1, logprobs=2)
    warm = SamplingParams(temperature=1.0, max_tokens=20, seed=5, logit_bias={ord("b"): -100.0})
    alone = answer(close_pair, "q", warm).outputs[0]
    together = close_pair.generate(["q"] * 9, [*[cold] * 4, warm, *[cold] * 4])
    assert together[4].outputs[0] == alone  # its neighbours don't touch it
    for output in together[:4] + together[5:]:
        assert output.outputs[0].text == "a"
        [entry] = output.outputs[0].logprobs or []
        assert all(math.isfinite(one.logprob) for one in entry.values())
        assert entry[ord("a")].logprob - entry[ord("b")].logprob == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf, "0.5", None, True])
def test_o09_what_is_no_temperature(temperature: Any) -> None:
    with pytest.raises(InvalidRequestError, match="temperature is") as refusal:
        SamplingParams(temperature=temperature)
    assert refusal.value.param == "temperature"


def test_o09_a_huge_temperature_draws_from_all(close_pair: LLM) -> None:
    outputs = close_pair.generate(
        ["q"] * 300,
        [SamplingParams(temperature=1e9, max_tokens=1, seed=seed) for seed in range(300)],
    )
    drawn = {output.outputs[0].token_ids[0] for output in outputs}
    assert len(drawn) > 130  # of 261 equally likely ones 300 draws find 178 +- 7


# ---- O10: the edges of top_k, top_p, min_p

ABCD = {ord("q"): {ord("a"): 3.0, ord("b"): 2.0, ord("c"): 1.0, ord("d"): 0.0}}
PROBABILITIES = {"a": 0.6439, "b": 0.2369, "c": 0.0871, "d": 0.0321}
ALL = "abcd"


@pytest.fixture(scope="module")
def four_letters(tmp_path_factory: TmpFactory) -> LLM:
    folder = markov(
        tmp_path_factory.mktemp("abcd"), ABCD, rest=-100.0, generation_config={"top_k": 0}
    )
    return load_llm(folder, max_num_seqs=200)


def draws(llm: LLM, **options: Any) -> str:
    """One letter for each of the seeds 0 to 399."""
    params = [SamplingParams(max_tokens=1, seed=seed, **options) for seed in range(400)]
    return "".join(output.outputs[0].text for output in llm.generate(["q"] * 400, params))


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"top_k": 1}, "a"),
        ({"top_k": 2}, "ab"),
        ({"top_k": 0}, ALL),
        ({"top_k": -1}, ALL),
        ({"top_k": 10**6}, ALL),
        ({"top_p": 1.0}, ALL),
        ({"top_p": 0.8}, "ab"),
        ({"top_p": 0.64}, "a"),
        ({"top_p": 1e-9}, "a"),
        ({"min_p": 0.0}, ALL),
        ({"min_p": 0.2}, "ab"),
        ({"min_p": 1.0}, "a"),
    ],
    ids=str,
)
def test_o10_supports(four_letters: LLM, options: dict[str, Any], support: str) -> None:
    letters = draws(four_letters, **options)
    assert set(letters) == set(support)
    if support == ALL:
        for letter, count in Counter(letters).items():
            assert count / 400 == pytest.approx(PROBABILITIES[letter], abs=0.08)


@pytest.mark.parametrize(
    "options", [{"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}, {"top_k": -2}]
)
def test_o10_out_of_range(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(InvalidRequestError, match=f"{name} is {value}") as refusal:
        SamplingParams(**options)
    assert refusal.value.param == name


def test_o10_zero_in_the_generation_config_is_off_too(four_letters: LLM) -> None:
    assert four_letters.get_default_sampling_params().top_k == 0
    letters = [output.outputs[0].text[0] for output in four_letters.generate(["q"] * 200)]
    assert set(letters) == set(ALL)


# ---- O11: a seed that depends on the neighbours


@pytest.fixture(scope="module")
def letters_folder(tmp_path_factory: TmpFactory) -> Path:
    return markov(tmp_path_factory.mktemp("uniform"), uniform26())


@pytest.fixture(scope="module")
def letters(letters_folder: Path) -> LLM:
    return load_llm(letters_folder)


def seeded(seed: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=24, **options)


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def of_seed_42(letters: LLM) -> str:
    """What seed 42 writes alone."""
    text = both_ways(letters, "a", seeded(42)).outputs[0].text
    assert len(text) == 24
    assert text.isalpha()
    return text


def test_o11_among_unseeded_ones(letters: LLM, of_seed_42: str) -> None:
    for place in (0, 3, 7):
        params = [seeded(None)] * 8
        params[place] = seeded(42)
        first, second = (texts(letters.generate(["a"] * 8, params)) for _ in range(2))
        assert first[place] == second[place] == of_seed_42
        others = [text for run in (first, second) for text in run if text != of_seed_42]
        assert len(set(others)) == 14  # each draws its own


def test_o11_among_equal_and_other_seeds(letters: LLM, of_seed_42: str) -> None:
    assert texts(letters.generate(["a"] * 8, seeded(42))) == [of_seed_42] * 8
    seeds = [0, 1, 41, 42, 43, 2**31, 2**63 - 1]
    by_seed = texts(letters.generate(["a"] * 7, [seeded(seed) for seed in seeds]))
    assert len(set(by_seed)) == 7
    assert by_seed[3] == of_seed_42
    assert texts(letters.generate(["a"] * 2, [seeded(0), seeded(2**63 - 1)])) == [
        by_seed[0],
        by_seed[-1],
    ]


def test_o11_with_a_warm_prefix_cache(letters: LLM, of_seed_42: str) -> None:
    prompt = "warm" * 12 + "a"
    assert answer(letters, prompt, seeded(42)).num_cached_tokens == 0
    warm = answer(letters, prompt, seeded(42))
    assert warm.num_cached_tokens == 48
    assert warm.outputs[0].text == of_seed_42


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"seed": 9},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_o11_in_another_engine(
    letters_folder: Path, of_seed_42: str, options: dict[str, Any]
) -> None:
    llm = load_llm(letters_folder, **options)
    params = [seeded(42), seeded(None), seeded(42), seeded(7)]
    found = texts(llm.generate(["a"] * 4, params))
    assert found[0] == found[2] == of_seed_42


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_o11_with_preemption(letters_folder: Path, of_seed_42: str, async_scheduling: bool) -> None:
    llm = load_llm(letters_folder, num_gpu_blocks_override=5, async_scheduling=async_scheduling)
    params = [seeded(42) if i % 2 else seeded(None) for i in range(8)]
    found = texts(llm.generate(["a"] * 8, params))
    assert found[1::2] == [of_seed_42] * 4
    assert stats(llm).num_preemptions > 0


def test_o11_the_engine_s_own_seed(letters_folder: Path) -> None:
    """``LLM(seed=...)`` makes what has no seed of its own repeatable, each request its own way."""
    runs = [
        texts(load_llm(letters_folder, seed=seed).generate(["a"] * 3, seeded(None)))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 6


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1"])
def test_o11_what_is_no_seed(seed: Any) -> None:
    with pytest.raises(InvalidRequestError, match="seed is") as refusal:
        SamplingParams(seed=seed)
    assert refusal.value.param == "seed"


# ---- O12: penalties

PENALTY_ROWS = {
    ord("c"): {ord("b"): 50.0},
    ord("b"): {ord("a"): 4.0, ord("b"): 3.0, ord("c"): -2.0, ord("d"): 3.5},
    ord("q"): {ord("a"): -2.0, ord("d"): -2.5},
}
PENALISED = [
    # a falls to 4 / 1.5, since it is in the prompt
    ("ac", {"repetition_penalty": 1.5, "max_tokens": 2}, "bd"),
    # generated tokens only: a of the prompt stays at 4
    ("ac", {"presence_penalty": 2.0, "max_tokens": 2}, "ba"),
    ("ac", {"frequency_penalty": 2.0, "max_tokens": 2}, "ba"),
    # a negative logit is multiplied: -2 becomes -3
    ("aq", {"repetition_penalty": 1.5, "max_tokens": 1}, "d"),
]


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: TmpFactory) -> LLM:
    return load_llm(markov(tmp_path_factory.mktemp("penalties"), PENALTY_ROWS, rest=-100.0))


@pytest.mark.parametrize(("prompt", "options", "text"), PENALISED)
def test_o12_penalties(penalised: LLM, prompt: str, options: dict[str, Any], text: str) -> None:
    params = greedy(**options)
    assert both_ways(penalised, prompt, params).outputs[0].text == text
    plain, early = greedy(max_tokens=3), greedy(max_tokens=1)
    for neighbours in ([plain], [early], [early, plain]):
        for place in range(len(neighbours) + 1):
            batch = [*neighbours[:place], params, *neighbours[place:]]
            found = texts(penalised.generate([prompt] * len(batch), batch))
            assert found.pop(place) == text
            alone = [answer(penalised, prompt, one).outputs[0].text for one in neighbours]
            assert found == alone


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
    ],
    ids=str,
)
def test_o12_out_of_range(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(InvalidRequestError, match=f"{name} is {value}"):
        SamplingParams(**options)


# ---- O13: logit_bias with bad ids


@pytest.fixture(scope="module")
def ab(tmp_path_factory: TmpFactory) -> LLM:
    return load_llm(markov(tmp_path_factory.mktemp("ab"), chain("A", "B", EOS)))


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({99999: 5.0}, "99999"),
        ({-1: 5.0}, "-1"),
        ({BYTE_VOCAB: 1.0}, str(BYTE_VOCAB)),
        ({"abc": 1.0}, "abc"),
        ({67: 1000.0}, "67 is 1000"),
        ({67: "x"}, "67 is 'x'"),
        ({67: math.nan}, "67 is nan"),
        ([67], "67"),
    ],
    ids=str,
)
def test_o13_bad_bias_hurts_nobody(ab: LLM, bias: Any, named: str) -> None:
    healthy = ab.stream("A", greedy())
    seen = [next(healthy).outputs[0].text]
    with pytest.raises(InvalidRequestError, match=named) as refusal:
        ab.generate("A", greedy(logit_bias=bias))
    assert refusal.value.param == "logit_bias"
    seen += [output.outputs[0].text for output in healthy]
    assert seen == ["B", "B"]
    assert is_idle(ab)


def test_o13_bias_forbids_and_forces(ab: LLM) -> None:
    forbidden = answer(ab, "A", greedy(max_tokens=1, logit_bias={66: -100.0}))
    assert forbidden.outputs[0].token_ids != [66]
    forced = answer(ab, "A", greedy(max_tokens=1, logit_bias={67: 100.0}))
    assert forced.outputs[0].text == "C"


# ---- O14: temperature 0 differs with the batch


def test_o14_greedy_is_the_same_in_any_company() -> None:
    """SmolLM2-135M in float32, 24 tokens: alone, among 7 and 31 others, chunked or whole, with a
    cold or warm prefix cache, with log probabilities."""
    prompt = "Rome is in Italy and Madrid is in Spain. " * 3 + "The capital of France is"
    others = [f"{'word ' * (i % 7)}{i} and" for i in range(31)]

    def found(llm: LLM, neighbours: int, place: int, **options: Any) -> RequestOutput:
        prompts = [*others[:place], prompt, *others[place:neighbours]]
        params = [greedy(max_tokens=2 + i % 3) for i in range(neighbours)]
        params.insert(place, greedy(max_tokens=24, ignore_eos=True, **options))
        return llm.generate(prompts, params)[place]

    def load(**options: Any) -> LLM:
        return load_llm(smollm2_path(), max_model_len=256, **options)

    whole = load()
    cold, warm = found(whole, 0, 0), found(whole, 0, 0, logprobs=5)
    assert " Paris" in cold.outputs[0].text
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    expected = cold.outputs[0].token_ids
    assert len(expected) == 24
    assert warm.outputs[0].token_ids == expected
    assert found(whole, 7, 3).outputs[0].token_ids == expected
    assert found(whole, 31, 20).outputs[0].token_ids == expected
    for chunk in (16, 64):
        chunked = load(max_num_batched_tokens=chunk, max_num_seqs=8, enable_prefix_caching=False)
        assert found(chunked, 7, 6).outputs[0].token_ids == expected


# ---- O15: prompt log probabilities and the prefix cache

BLOCK = 16
P = list(range(1, 34))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: TmpFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny15"))


def check_prompt_logprobs(output: RequestOutput, folder: Path) -> None:
    prompt = output.prompt_token_ids
    expected = log_softmax(reference_logits(folder, prompt))
    first, *scores = output.prompt_logprobs or []
    assert first is None
    assert len(scores) == len(prompt) - 1
    for position, entry in enumerate(scores):
        assert entry is not None
        assert prompt[position + 1] in entry  # the token that is there
        assert int(expected[position].argmax()) in entry
        for token, one in entry.items():
            assert one.logprob == pytest.approx(expected[position, token], abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"chunk": 8}], ids=str)
def test_o15_prompt_logprobs_never_come_from_the_cache(
    tiny_folder: Path, options: dict[str, Any]
) -> None:
    if chunk := options.pop("chunk", None):
        options = {"max_num_batched_tokens": chunk, "max_num_seqs": chunk}
    llm = load_llm(tiny_folder, block_size=BLOCK, **options)
    scored = greedy(max_tokens=1, prompt_logprobs=1)
    for _ in range(2):
        check_prompt_logprobs(answer(llm, ids(*P), scored), tiny_folder)
    changed = answer(llm, ids(*P[:16], *range(100, 117)), scored)
    check_prompt_logprobs(changed, tiny_folder)
    plain = [7, *P]
    first, second = (answer(llm, ids(*plain), greedy(max_tokens=1)) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    after_plain = answer(llm, ids(*plain), scored)
    check_prompt_logprobs(after_plain, tiny_folder)
    assert after_plain.outputs[0].token_ids == first.outputs[0].token_ids
    for length in (1, 15, 16, 17, 32):
        check_prompt_logprobs(answer(llm, ids(*P[:length]), scored), tiny_folder)
    # Several at once, those that score and those that don't, with a common prefix.
    mixed = llm.generate(
        [ids(*P), ids(*P, 5), ids(*P, 6), ids(*P[:20])],
        [scored, greedy(max_tokens=1), scored, scored],
    )
    for output in (mixed[0], mixed[2], mixed[3]):
        check_prompt_logprobs(output, tiny_folder)
    assert mixed[1].prompt_logprobs is None


# ---- O16: log probabilities that are no numbers


def strict_json(output: RequestOutput) -> str:
    """Every number of an output's log probabilities, as JSON that allows no NaN or Infinity."""

    def plain(entries: Any) -> Any:
        return entries and [
            entry and {str(token): one.logprob for token, one in entry.items()} for entry in entries
        ]

    [completion] = output.outputs
    lists = plain(output.prompt_logprobs), plain(completion.logprobs)
    return json.dumps([*lists, completion.cumulative_logprob], allow_nan=False)


def test_o16_filters_leave_the_reported_numbers_alone(ab: LLM, tiny_folder: Path) -> None:
    params = SamplingParams(
        temperature=1.0, top_k=1, max_tokens=2, logprobs=5, prompt_logprobs=5, seed=1
    )
    llm = load_llm(tiny_folder)
    output = answer(llm, "correct horse", params)
    assert json.loads(strict_json(output))
    check_prompt_logprobs(output, tiny_folder)
    [completion] = output.outputs
    known = output.prompt_token_ids + completion.token_ids
    expected = log_softmax(reference_logits(tiny_folder, known))
    total = 0.0
    for step, entry in enumerate(completion.logprobs or []):
        row = expected[len(output.prompt_token_ids) + step - 1]
        assert len(entry) in (5, 6)
        for token, one in entry.items():
            assert one.logprob == pytest.approx(row[token], abs=1e-4)
            assert one.rank == 1 + int((row > row[token] + 1e-6).sum())
        total += entry[completion.token_ids[step]].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def test_o16_forbidden_tokens_keep_their_model_s_number(ab: LLM) -> None:
    """``min_tokens`` bans the end and a bias the next best; what is reported is the model's own."""
    params = greedy(min_tokens=3, max_tokens=3, logprobs=20, logit_bias={0: -100.0, 67: 50.0})
    output = answer(ab, "B", params)
    assert EOS not in output.outputs[0].token_ids
    assert json.loads(strict_json(output))
    first = (output.outputs[0].logprobs or [])[0]
    likeliest = first[EOS]
    assert likeliest == Logprob(pytest.approx(0.0, abs=1e-5), 1, "</s>")
    assert first[67].logprob == pytest.approx(-20.0, abs=1e-4)


def test_o16_extreme_logits_stay_numbers(tmp_path: Path) -> None:
    rows = {ord("A"): {REST: -1e30, ord("B"): 1e4}, ord("B"): {REST: -1e30, EOS: 0.0}}
    llm = load_llm(markov(tmp_path, rows))
    params = SamplingParams(max_tokens=4, logprobs=20, prompt_logprobs=20, seed=3)
    output = both_ways(llm, "AA", params)
    assert output.outputs[0].text == "B"
    assert json.loads(strict_json(output))
