"""Parsers of tool calls and reasoning: any cut of the text gives the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.parsers import (
    AnswerParser,
    Arguments,
    CallStart,
    Content,
    Reasoning,
    call_parser,
)
from octavo.server.parsers.call import CallScanner

CALL = '<tool_call>\n{"name": "sum", "arguments": {"n1": 2, "s": "a}\\"\\u00e9"}}\n</tool_call>'
ARGUMENTS = '{"n1": 2, "s": "a}\\"\\u00e9"}'


def parsed(parser: AnswerParser, *pieces: str) -> dict[str, Any]:
    """What the pieces come to; every one is checked."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    answer = [piece for text in pieces for piece in parser.feed(text)]
    for piece in [*answer, *parser.finish()]:
        match piece:
            case Content(text):
                assert text
                result["content"] += text
            case Reasoning(text):
                assert text
                result["reasoning"] += text
            case CallStart(index, name):
                assert index == len(result["calls"])
                result["calls"].append([name, ""])
            case Arguments(index, text):
                assert index == len(result["calls"]) - 1
                assert text
                result["calls"][index][1] += text
    return result


def hermes(reasoning: bool = False, begun: bool = False) -> AnswerParser:
    return AnswerParser(reasoning=reasoning, begun=begun, calls=call_parser("hermes", ["sum"]))


def llama3() -> AnswerParser:
    return AnswerParser(calls=call_parser("llama3_json", ["sum", "mul"]))


HERMES = [
    ("plain text", "plain text", []),
    ("a <tool box", "a <tool box", []),
    ("ends in <tool_cal", "ends in <tool_cal", []),
    (" spaces kept ", " spaces kept ", []),
    (CALL, "", [["sum", ARGUMENTS]]),
    (f"Let me see.\n{CALL}\n", "Let me see.", [["sum", ARGUMENTS]]),
    (f"{CALL}\n{CALL}", "", [["sum", ARGUMENTS]] * 2),
    (f"{CALL} then text", "then text", [["sum", ARGUMENTS]]),
    (
        '<tool_call>{"arguments": {"a": [1, {"b": 2}]}, "name": "x"}</tool_call>',
        "",
        [["x", '{"a": [1, {"b": 2}]}']],
    ),
    ('<tool_call>{"name": "x"}</tool_call>', "", [["x", "{}"]]),
    ('<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["x", '{"a": 1}']]),
    ('<tool_call>{"name": "x", "id": 7, "arguments": {}}</tool_call>', "", [["x", "{}"]]),
    ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ('<tool_call>{"name": "x", "arguments": {"a": "cu', "", [["x", '{"a": "cu']]),
]
LLAMA3 = [
    ('{"name": "sum", "parameters": {"a": 1}}', "", [["sum", '{"a": 1}']]),
    (
        '{"name": "sum", "parameters": {}}; {"name": "mul", "parameters": {"b": 2}}',
        "",
        [["sum", "{}"], ["mul", '{"b": 2}']],
    ),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ('{"answer": 5}', '{"answer": 5}', []),
    ("text {", "text {", []),
    (' \n{"name": "sum", "parameters": {"a"', "", [["sum", '{"a"']]),
    ('{"name": "sum"}', '{"name": "sum"}', []),
]
THINK = [
    ("<think>\nhm, so\n</think>\n\nanswer", "hm, so", "answer"),
    ("answer", "", "answer"),
    ("a <think>b</think>", "", "a <think>b</think>"),
    ("<think>cut", "cut", ""),
    ("<think></think>x", "", "x"),
    ("<thin", "", "<thin"),
    ("<think>a < b </thi", "a < b </thi", ""),
    ("<think>a\n\nb</think>c", "a\n\nb", "c"),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text: str, content: str, calls: list[Any]) -> None:
    expected = {"content": content, "reasoning": "", "calls": calls}
    assert parsed(hermes(), text) == expected
    assert parsed(hermes(), *text) == expected


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA3)
def test_llama3(text: str, content: str, calls: list[Any]) -> None:
    expected = {"content": content, "reasoning": "", "calls": calls}
    assert parsed(llama3(), text) == expected
    assert parsed(llama3(), *text) == expected


@pytest.mark.parametrize(("text", "reasoning", "content"), THINK)
def test_think(text: str, reasoning: str, content: str) -> None:
    expected = {"content": content, "reasoning": reasoning, "calls": []}
    assert parsed(AnswerParser(reasoning=True), text) == expected
    assert parsed(AnswerParser(reasoning=True), *text) == expected


def test_reasoning_that_the_prompt_began() -> None:
    parser = AnswerParser(reasoning=True, begun=True)
    assert parsed(parser, "\nso", " it is</thi", "nk>\n\nyes") == {
        "content": "yes",
        "reasoning": "so it is",
        "calls": [],
    }


def test_a_call_behind_reasoning() -> None:
    result = parsed(hermes(reasoning=True), f"<think>call <tool_call>?</think>\n{CALL}")
    assert result == {
        "content": "",
        "reasoning": "call <tool_call>?",
        "calls": [["sum", ARGUMENTS]],
    }


@given(
    texts=st.lists(
        st.sampled_from(
            [
                CALL,
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                "text",
                "\n",
                '{"name": "sum", ',
                '"arguments": {',
                "}",
                "<",
                " ",
                "{",
                '"',
                "\\",
            ]
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    style=st.sampled_from(["hermes", "llama3_json", None]),
    begun=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_any_cut_gives_the_same(texts: list[str], cuts: list[int], style: Any, begun: bool) -> None:
    text = "".join(texts)

    def parser() -> AnswerParser:
        calls = None if style is None else call_parser(style, ["sum"])
        return AnswerParser(reasoning=True, begun=begun, calls=calls)

    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(parser(), *pieces) == parsed(parser(), text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    name=st.text(max_size=8),
    arguments=st.dictionaries(st.text(max_size=6), json_values, max_size=4),
    more=st.dictionaries(st.text("abc", min_size=1), json_values, max_size=2),
    first=st.booleans(),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_the_scanner_reads_any_call(
    name: str, arguments: Any, more: Any, first: bool, indent: int | None, ascii_only: bool
) -> None:
    pair = {"name": name, "arguments": arguments}
    call = {**more, **(pair if first else dict(reversed(pair.items())))}
    text = json.dumps(call, indent=indent, ensure_ascii=ascii_only)
    scanner = CallScanner()
    assert scanner.feed(text + " rest") == len(text)
    assert scanner.state == "done"
    assert scanner.name == name
    assert json.loads(scanner.arguments or "") == arguments
