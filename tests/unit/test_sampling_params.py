"""What SamplingParams accepts and refuses: reported cases O08 to O13."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams, StructuredOutputs

# (field, value, words of the message): the value and the limit or the way out.
REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("n", 0, ("0", "from 1 to 128")),
    ("n", 129, ("129", "from 1 to 128")),
    ("n", 1.5, ("1.5", "whole number")),
    ("n", True, ("True", "whole number")),
    ("temperature", -1, ("-1", "at least 0")),
    ("temperature", math.nan, ("nan", "finite")),
    ("temperature", math.inf, ("inf", "finite")),
    ("temperature", "0.5", ("'0.5'", "number")),
    ("temperature", None, ("None", "number")),
    ("temperature", 10**400, ("at least 0", "finite")),
    ("top_p", 0, ("0", "above 0", "1 switches it off")),
    ("top_p", 1.1, ("1.1", "from 0 to 1")),
    ("top_p", -0.1, ("-0.1", "from 0 to 1")),
    ("top_k", -2, ("-2", "at least -1")),
    ("top_k", 1.0, ("1.0", "whole number")),
    ("min_p", -0.1, ("-0.1", "from 0 to 1")),
    ("min_p", 1.01, ("1.01", "from 0 to 1")),
    ("presence_penalty", 2.1, ("2.1", "from -2 to 2")),
    ("frequency_penalty", -2.1, ("-2.1", "from -2 to 2")),
    ("repetition_penalty", 0, ("0", "above 0")),
    ("repetition_penalty", -1.0, ("-1.0", "at least 0")),
    ("repetition_penalty", math.inf, ("inf", "finite")),
    ("seed", -1, ("-1", str(MAX_SEED))),
    ("seed", 2**63, (str(2**63), str(MAX_SEED))),
    ("seed", 1.0, ("1.0", "whole number")),
    ("max_tokens", -1, ("-1", "at least 0")),
    ("max_tokens", "16", ("'16'", "whole number")),
    ("min_tokens", -1, ("-1", "at least 0")),
    ("min_tokens", 17, ("17", "max_tokens 16")),
    ("logprobs", -1, ("-1", "from 0 to 20")),
    ("logprobs", MAX_LOGPROBS + 1, ("21", "from 0 to 20")),
    ("logprobs", True, ("True", "whole number")),
    ("prompt_logprobs", 21, ("21", "from 0 to 20")),
    ("stop", "", ("''", "non-empty")),
    ("stop", ["a", ""], ("''", "non-empty")),
    ("stop", [5], ("5", "string")),
    ("stop", 5, ("5", "list")),
    ("stop_token_ids", 5, ("5", "list")),
    ("stop_token_ids", "5", ("'5'", "list")),
    ("stop_token_ids", ["5"], ("'5'", "whole number")),
    ("stop_token_ids", [-1], ("-1", "at least 0")),
    ("logit_bias", [(5, 1.0)], ("map token ids",)),
    ("logit_bias", {-1: 5}, ("token id", "-1", "at least 0")),
    ("logit_bias", {"abc": 1}, ("token id", "'abc'", "whole number")),
    ("logit_bias", {67: 1000}, ("token 67", "1000", "from -100 to 100")),
    ("logit_bias", {67: "x"}, ("token 67", "'x'", "number")),
    ("logit_bias", {67: math.nan}, ("token 67", "nan")),
    ("ignore_eos", "yes", ("'yes'", "true or false")),
    ("skip_special_tokens", None, ("None", "true or false")),
    ("include_stop_str_in_output", 1, ("1", "true or false")),
    ("detokenize", 0, ("0", "true or false")),
    ("structured_outputs", {"regex": "a"}, ("'regex'", "StructuredOutputs")),
]


@pytest.mark.parametrize(("field", "value", "words"), REFUSED)
def test_refused_with_a_message_that_names_value_and_limit(
    field: str, value: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(field)
    for word in words:
        assert word in message
    assert error.value.param == field
    assert error.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-10},
        {"temperature": 1e9},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**6},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"seed": None},
        {"max_tokens": 0},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {66: -100, 67: 100}},
        {"logit_bias": None},
        {"stop": None, "stop_token_ids": None},
        {"n": 128},
        {"repetition_penalty": 0.5, "presence_penalty": -2, "frequency_penalty": 2},
    ],
    ids=str,
)
def test_accepted_as_given(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        expected = () if name in ("stop", "stop_token_ids") else value
        assert getattr(params, name) == expected


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.min_p) == (1, 1.0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.logprobs, params.prompt_logprobs, params.detokenize) == (None, None, True)


def test_stop_in_every_form() -> None:
    assert SamplingParams(stop="D").stop_strings == ("D",)
    assert SamplingParams(stop=["CDE", "D"]).stop_strings == ("CDE", "D")
    assert SamplingParams().stop_strings == ()
    ids = [66]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(67)
    assert params.stop_token_ids == (66,)


def test_stop_strings_need_text() -> None:
    assert SamplingParams(detokenize=False, stop_token_ids=[1]).stop_token_ids == (1,)
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(detokenize=False, stop="x")


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {261: 1.0}}, {"stop_token_ids": [5, 99999]}], ids=str
)
def test_token_ids_outside_the_vocabulary(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.check_vocabulary(100_000)
    [name] = fields
    with pytest.raises(InvalidRequestError, match=r"(261|99999), ids go from 0 to 260") as error:
        params.check_vocabulary(261)
    assert error.value.param == name


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers() | st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers() | st.text(max_size=2), st.floats() | st.integers(), max_size=2),
)


@given(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), anything)
def test_any_value_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    refused = None
    try:
        SamplingParams(**{field: value})
    except InvalidRequestError as error:
        refused = error
    assert refused is None or refused.param == field


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ("exactly one of json, regex, choice, grammar, json_object", "none")),
        ({"json_object": False}, ("none",)),
        ({"regex": "a", "choice": ["b"]}, ("regex and choice",)),
        ({"json": "{", "regex": "a"}, ("json and regex",)),
        ({"json": "{"}, ("'{'", "no JSON")),
        ({"json": "[1]"}, ("[1]", "an object")),
        ({"json": [1]}, ("[1]", "an object")),
        ({"json": '{"type": "null", "type": "string"}'}, ("'type'", "twice")),
        ({"json": '{"minimum": NaN}'}, ("NaN",)),
        ({"json": {"minimum": math.inf}}, ("no JSON",)),
        ({"json": {"const": {1, 2}}}, ("{1, 2}",)),
        ({"json": "[" * 100_000}, ("recursion",)),
        ({"regex": ""}, ("regex", "non-empty")),
        ({"regex": 5}, ("5", "string")),
        ({"grammar": ""}, ("grammar", "non-empty")),
        ({"choice": []}, ("choice", "[]")),
        ({"choice": "ab"}, ("'ab'", "list")),
        ({"choice": ["a", ""]}, ("choice", "non-empty")),
        ({"json_object": 1}, ("json_object", "true or false")),
    ],
)
def test_structured_outputs_refused(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"
    for word in words:
        assert word in str(caught.value)


def test_structured_outputs_are_values() -> None:
    """A schema is kept as text, in its order of keys, so that requests with equal ones share."""
    schema = {"type": "object", "properties": {"b": {}, "ä": {"enum": (1, 2)}}}
    text = '{"type":"object", "properties": {"b": {}, "ä": {"enum": [1, 2]}}}'
    assert StructuredOutputs(json=schema) == StructuredOutputs(json=text)
    assert len({StructuredOutputs(json=schema), StructuredOutputs(json=text)}) == 1
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutputs(json_object=True).json is None
