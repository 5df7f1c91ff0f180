"""The text side of requests: prompts to engine requests, updates to outputs; no model, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import BOS, BYTE_VOCAB, EOS
from helpers.tokenizers import byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.delivery import RequestUpdate
from octavo.errors import InvalidRequestError
from octavo.frontend import Frontend, Submission
from octavo.outputs import Logprob, RequestMetrics
from octavo.sampling_params import MAX_SEED, SamplingParams
from octavo.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def frontend(tokenizer: Tokenizer) -> Frontend:
    return make_frontend(tokenizer)


def make_frontend(tokenizer: Tokenizer | None, **options: Any) -> Frontend:
    given: dict[str, Any] = {"vocab_size": BYTE_VOCAB, "eos_token_ids": frozenset({EOS}), **options}
    return Frontend(tokenizer, **given)


def submit(frontend: Frontend, prompt: Any = "hi", **options: Any) -> Submission:
    submission = frontend.prepare("r", prompt, SamplingParams(**options))
    frontend.register(submission)
    return submission


def update(request_id: str = "r", text: str | bytes = "", **changes: Any) -> RequestUpdate:
    """What a step brought: one id for each byte of ``text``."""
    new = list(text.encode() if isinstance(text, str) else text)
    values: dict[str, Any] = {
        "request_id": request_id,
        "new_token_ids": new,
        "logprobs": None,
        "prompt_logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "num_cached_tokens": 0,
        "metrics": RequestMetrics(1.0, 2.0),
        **changes,
    }
    return RequestUpdate(**values)


# ---- prompts


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("hi", "hi", [BOS, 104, 105]),
        ({"prompt": "hi"}, "hi", [BOS, 104, 105]),
        ({"prompt_token_ids": [1, 2]}, None, [1, 2]),
        ({"prompt_token_ids": (1, 2), "prompt": "shown"}, "shown", [1, 2]),
        ({"prompt_token_ids": np.array([1, 2], np.int32)}, None, [1, 2]),
    ],
)
def test_forms_of_a_prompt(
    frontend: Frontend, prompt: Any, text: str | None, token_ids: list[int]
) -> None:
    submission = submit(frontend, prompt)
    assert submission.output.prompt == text
    assert submission.output.prompt_token_ids == token_ids
    assert [type(token) for token in submission.output.prompt_token_ids] == [int] * len(token_ids)
    [request] = submission.requests
    assert request.prompt_token_ids == token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt is None"),
        (5, "prompt is 5"),
        ([1, 2], "prompt is"),
        (b"hi", "prompt is b'hi'"),
        ({}, "prompt is {}"),
        ({"prompt": None}, "prompt is"),
        ({"prompt": 5}, "prompt is"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompt is"),
        ({"prompt_token_ids": None}, "prompt is"),
        ({"prompt": "hi", "images": []}, "prompt is"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is 5, not a list"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids is '12', not a list"),
        ({"prompt_token_ids": [1, 1.5]}, "token id 1.5 is not an integer"),
        ({"prompt_token_ids": [True]}, "token id True is not an integer"),
        ({"prompt_token_ids": [-1]}, "token id -1, ids go from 0 to 260"),
        ({"prompt_token_ids": [261]}, "token id 261, ids go from 0 to 260"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ("\ud83d", "lone surrogate"),
    ],
    ids=str,
)
def test_bad_prompts_are_named(frontend: Frontend, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        frontend.prepare("r", prompt, SamplingParams())
    assert message in str(refusal.value)
    assert frontend.is_idle


def test_a_long_bad_prompt_makes_a_short_message(frontend: Frontend) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        frontend.prepare("r", ["x" * 10_000], SamplingParams())
    assert len(str(refusal.value)) < 200


def test_a_tokenizer_larger_than_the_model(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="token id 256, ids go from 0 to 255"):
        make_frontend(tokenizer, vocab_size=256).prepare("r", "hi", SamplingParams())


@pytest.mark.parametrize("params", [{"stop_token_ids": [261]}, {"logit_bias": {261: 1.0}}])
def test_ids_in_params_are_checked(frontend: Frontend, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="261"):
        submit(frontend, **params)


def test_without_a_tokenizer() -> None:
    frontend = make_frontend(None)
    for prompt, params in (("hi", {}), ({"prompt_token_ids": [1]}, {"stop": "x"})):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            submit(frontend, prompt, **params)
    submission = submit(frontend, {"prompt_token_ids": [1]}, logprobs=0)
    entry = {65: Logprob(-0.5, 1)}
    frontend.process([update(text="A", logprobs=[entry])])
    [output] = submission.output.outputs
    assert (output.text, output.token_ids, output.logprobs) == ("", [65], [entry])


# ---- answers and their seeds


def test_one_engine_request_for_each_answer(frontend: Frontend) -> None:
    submission = frontend.prepare(
        "r",
        "hi",
        SamplingParams(n=3, seed=7, prompt_logprobs=2),
        priority=4,
        cache_salt="salt",
    )
    assert [request.request_id for request in submission.requests] == ["r#0", "r#1", "r#2"]
    assert [request.choice for request in submission.requests] == [0, 1, 2]
    assert {request.seed for request in submission.requests} == {7}
    assert {request.priority for request in submission.requests} == {4}
    assert {request.cache_salt for request in submission.requests} == {"salt"}
    # The prompt's log probabilities are asked for once.
    assert [request.params.prompt_logprobs for request in submission.requests] == [2, None, None]
    assert [output.index for output in submission.output.outputs] == [0, 1, 2]


def test_seeds_that_are_drawn(tokenizer: Tokenizer) -> None:
    def seeds(frontend: Frontend) -> list[int]:
        drawn = [frontend.prepare(str(i), "hi", SamplingParams(n=2)) for i in range(3)]
        return [request.seed for submission in drawn for request in submission.requests]

    first, again, other = (seeds(make_frontend(tokenizer, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 12
    assert all(0 <= seed <= MAX_SEED for seed in first)
    assert seeds(make_frontend(tokenizer)) != seeds(make_frontend(tokenizer))


def test_an_id_in_use(frontend: Frontend) -> None:
    submit(frontend)
    second = frontend.prepare("r", "hi", SamplingParams())
    with pytest.raises(InvalidRequestError, match="'r' is in use"):
        frontend.register(second)


# ---- updates


def test_text_grows_by_whole_characters(frontend: Frontend) -> None:
    submission = submit(frontend)
    texts = []
    for piece in (b"\xf0", b"\x9f\x8c", b"\xb6!", b"\xc4"):
        [output] = frontend.process([update(text=piece)]).outputs
        assert output is submission.output
        assert not output.finished
        texts.append(output.outputs[0].text)
    assert texts == ["", "", "🌶!", "🌶!"]
    frontend.process([update(text="", finish_reason="length")])
    assert submission.output.outputs[0].text == "🌶!\ufffd"
    assert submission.output.outputs[0].finish_reason == "length"
    assert submission.output.finished
    assert frontend.is_idle


def test_an_answer_stops_within_an_update(frontend: Frontend) -> None:
    """Ids after the stop string are dropped, with their log probabilities."""
    submission = submit(frontend, stop=["DE"], logprobs=0)
    entries = [{token: Logprob(-1.0, 1)} for token in b"BCDEFG"]
    step = frontend.process([update(text="BCDEFG", logprobs=entries)])
    [output] = submission.output.outputs
    assert step.stopped == ["r"]
    assert (output.text, output.token_ids) == ("BC", list(b"BCDE"))
    assert len(output.logprobs or []) == 4
    assert output.cumulative_logprob == pytest.approx(-4.0)
    assert (output.finish_reason, output.stop_reason) == ("stop", "DE")
    assert submission.output.finished
    late = frontend.process([update(text="late")])  # what was in flight
    assert (late.outputs, late.stopped) == ([], [])
    assert output.text == "BC"


def test_the_engine_need_not_be_told_what_it_ended(frontend: Frontend) -> None:
    submission = submit(frontend, stop=["B"])
    step = frontend.process([update(text="AB", finish_reason="length")])
    assert step.stopped == []
    [output] = submission.output.outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", "B")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "A"),
        ({"include_stop_str_in_output": True}, "AB"),
        ({"include_stop_str_in_output": True, "detokenize": False}, ""),
    ],
)
def test_the_id_that_ended_an_answer(frontend: Frontend, params: dict[str, Any], text: str) -> None:
    submission = submit(frontend, stop_token_ids=[66], **params)
    frontend.process([update(text="AB", finish_reason="stop", stop_reason=66)])
    [output] = submission.output.outputs
    assert output.text == text
    assert output.token_ids == [65, 66]
    assert (output.finish_reason, output.stop_reason) == ("stop", 66)


def test_answers_end_one_by_one(frontend: Frontend) -> None:
    submission = submit(frontend, n=2, stop=["!"])
    frontend.process([update("r#1", "b!"), update("r#0", "a")])
    one, two = submission.output.outputs
    assert (one.text, two.text) == ("a", "b")
    assert (one.finish_reason, two.finish_reason) == (None, "stop")
    assert not submission.output.finished
    [output] = frontend.process([update("r#0", "a", finish_reason="length")]).outputs
    assert output.finished
    assert (one.text, one.finish_reason) == ("aa", "length")


def test_one_output_for_several_updates_of_a_step(frontend: Frontend) -> None:
    submission = submit(frontend, n=2)
    step = frontend.process([update("r#0", "a"), update("r#1", "b")])
    assert step.outputs == [submission.output]


def test_log_probabilities_are_named(frontend: Frontend) -> None:
    submission = submit(frontend, logprobs=1, prompt_logprobs=1)
    prompt_entry = {104: Logprob(-1.0, 1), EOS: Logprob(-2.0, 2)}
    frontend.process(
        [
            update(
                text=b"\xf0",
                logprobs=[{0xF0: Logprob(-0.5, 1), 65: Logprob(-3.0, 2)}],
                prompt_logprobs=[None, prompt_entry, prompt_entry],
            )
        ]
    )
    assert submission.output.prompt_logprobs == [
        None,
        *[{104: Logprob(-1.0, 1, "h"), EOS: Logprob(-2.0, 2, "</s>")}] * 2,
    ]
    assert submission.output.outputs[0].logprobs == [
        {0xF0: Logprob(-0.5, 1, "\ufffd"), 65: Logprob(-3.0, 2, "A")}
    ]
    assert submission.output.outputs[0].cumulative_logprob == -0.5


def test_what_was_not_asked_for_is_none(frontend: Frontend) -> None:
    submission = submit(frontend)
    frontend.process([update(text="A", finish_reason="length")])
    assert submission.output.prompt_logprobs is None
    assert submission.output.outputs[0].logprobs is None
    assert submission.output.outputs[0].cumulative_logprob is None


def test_an_error_of_the_engine(frontend: Frontend) -> None:
    submission = submit(frontend, n=2)
    frontend.process([update("r#0", finish_reason="abort", error="not finite")])
    frontend.process([update("r#1", "x", finish_reason="length")])
    assert submission.output.error == "not finite"
    assert [one.finish_reason for one in submission.output.outputs] == ["abort", "length"]
    assert submission.output.finished


def test_metrics_and_cached_tokens(frontend: Frontend) -> None:
    submission = submit(frontend, n=2)
    metrics = submission.output.metrics
    assert metrics.first_token_time is None
    frontend.process([update("r#0", "a", num_cached_tokens=16)])
    frontend.process([update("r#1", "b", num_cached_tokens=0)])
    assert submission.output.num_cached_tokens == 16
    assert metrics.first_scheduled_time == 2.0
    first = metrics.first_token_time
    assert first is not None
    assert metrics.arrival_time <= first
    frontend.process([update(f"r#{i}", finish_reason="length") for i in range(2)])
    assert metrics.first_token_time == first
    assert metrics.finished_time is not None
    assert metrics.finished_time >= first


def test_dropping_a_request(frontend: Frontend) -> None:
    submission = submit(frontend, n=2, stop=["xyz"])
    frontend.process([update("r#0", "ax", finish_reason="length"), update("r#1", b"bxy\xf0")])
    assert frontend.drop(submission) == ["r#1"]
    assert frontend.is_idle
    assert submission.output.finished
    one, two = submission.output.outputs
    assert (one.text, one.finish_reason) == ("ax", "length")
    assert (two.text, two.finish_reason) == ("bxy\ufffd", "abort")
    assert frontend.process([update("r#1", "crossed")]).outputs == []
    assert frontend.drop(submission) == []


@settings(deadline=None, max_examples=60)
@given(
    data=st.binary(min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 5), min_size=24, max_size=24),
    stop=st.lists(st.sampled_from(["é", "ab", "\ufffd", "🌶", "b"]), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_however_ids_come_the_answer_is_the_same(
    tokenizer: Tokenizer,
    data: bytes,
    cuts: list[int],
    stop: list[str],
    include: bool,
    min_tokens: int,
) -> None:
    """In one update or in many: equal text, ids and end; and what was shown is never taken back."""

    def run(sizes: list[int]) -> tuple[str, list[int], str | None, int | str | None]:
        frontend = make_frontend(tokenizer)
        submission = submit(
            frontend, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
        )
        [output] = submission.output.outputs
        rest, shown = data, ""
        while rest and not submission.output.finished:
            size = sizes.pop(0)
            frontend.process([update(text=rest[:size])])
            rest = rest[size:]
            assert output.text.startswith(shown)
            shown = output.text
        if not submission.output.finished:
            frontend.process([update(finish_reason="length")])
        return output.text, output.token_ids, output.finish_reason, output.stop_reason

    assert run([1] * len(data)) == run([len(data)]) == run([*cuts, *([1] * len(data))])
