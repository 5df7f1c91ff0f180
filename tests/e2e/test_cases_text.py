"""Reported faults O01 to O07: streamed characters, stop strings, prompts and their special tokens.

The cases, with what other engines did wrong, are in shared/cases/engine.md. The model is a table
(see ``markov``), so every right answer is known. All run in both step loops.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import BOS, BYTE_VOCAB, CHATML, EOS, IM_END, IM_START, chain, markov
from helpers.gguf_convert import gguf_from_folder
from helpers.llm import answer, both_ways, greedy, ids, is_idle, load_llm

from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequestError

A, B, C, D, F = b"ABCDF"
HI = list(b"hi")

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def llm_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeLLM:
    """Makes the model that follows a chain of tokens, each one once."""

    @lru_cache
    def make(*tokens: int | str, **settings: Any) -> LLM:
        folder = markov(tmp_path_factory.mktemp("markov"), chain(*tokens), **settings)
        return load_llm(folder, async_scheduling=request.param)

    return make


# ---- O01: a character split over several tokens


@pytest.mark.parametrize("text", ["🌶!", "ď", "龜"])
def test_o01_a_character_in_several_tokens(llm_of: MakeLLM, text: str) -> None:
    llm = llm_of("A", *text.encode(), EOS)
    params = greedy(max_tokens=16)
    output = both_ways(llm, "A", params)
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == [*text.encode(), EOS]  # the end counts
    assert output.outputs[0].finish_reason == "stop"
    for partial in llm.stream("A", params):
        assert text.startswith(partial.outputs[0].text)  # never U+FFFD in between


# ---- O02: bytes that never become a character


@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "text", "finish_reason"),
    [
        (["A", 240, 159, "!", EOS], 16, "\ufffd!", "stop"),
        (["A", 240, 159], 2, "\ufffd", "length"),
        (["A", 255, "B", EOS], 16, "\ufffdB", "stop"),
    ],
)
def test_o02_bytes_that_are_no_character(
    llm_of: MakeLLM,
    tokens: list[Any],
    max_tokens: int,
    text: str,
    finish_reason: str,
    logprobs: int | None,
) -> None:
    llm = llm_of(*tokens)
    output = both_ways(llm, "A", greedy(max_tokens=max_tokens, logprobs=logprobs))
    assert output.outputs[0].text == text
    assert output.outputs[0].finish_reason == finish_reason
    if logprobs is not None:
        table = llm.get_tokenizer()
        entries = output.outputs[0].logprobs or []
        for token, entry in zip(output.outputs[0].token_ids, entries, strict=True):
            if token < 256:
                assert table.token_bytes(token) == bytes([token])
            named = entry[token].decoded_token
            assert named == ("\ufffd" if 127 < token < 256 else table.token_bytes(token).decode())
    assert answer(llm, "A", greedy(max_tokens=max_tokens)).outputs[0].text == text  # still alive


# ---- O03: stop strings across tokens


@pytest.mark.parametrize(
    ("stop", "include", "text", "stop_reason"),
    [
        (["DEF"], False, "BC", "DEF"),
        (["DEF"], True, "BCDEF", "DEF"),
        (["EFX", "CD"], False, "B", "CD"),
        (["BCDEFGHX"], False, "BCDEFGH", None),  # never completes: the model ends
        ("D", False, "BC", "D"),
        (["CDE", "D"], False, "BC", "D"),  # the one that completes first
    ],
)
def test_o03_stop_strings(
    llm_of: MakeLLM, stop: str | list[str], include: bool, text: str, stop_reason: str | None
) -> None:
    params = greedy(max_tokens=16, stop=stop, include_stop_str_in_output=include)
    [output] = both_ways(llm_of(*"ABCDEFGH", EOS), "A", params).outputs
    assert output.text == text
    assert output.finish_reason == "stop"
    assert output.stop_reason == stop_reason
    seen = text if include or stop_reason is None else text + stop_reason
    assert bytes(output.token_ids[: len(seen)]) == seen.encode()
    assert len(output.token_ids) == len(seen) + (stop_reason is None)  # nothing later is billed


def test_o03_a_stop_inside_a_token(llm_of: MakeLLM) -> None:
    llm = llm_of("A", "B", 261, "F", EOS, extra=("CDE",))
    assert answer(llm, "A", greedy()).outputs[0].text == "BCDEF"
    for include, text in ((False, "BC"), (True, "BCD")):
        params = greedy(stop=["D"], include_stop_str_in_output=include)
        [output] = both_ways(llm, "A", params).outputs
        assert output.text == text
        assert output.token_ids == [B, 261]
        assert (output.finish_reason, output.stop_reason) == ("stop", "D")


def test_o03_a_stop_string_may_be_cut_by_the_length(llm_of: MakeLLM) -> None:
    [output] = both_ways(llm_of(*"ABCDEFGH", EOS), "A", greedy(max_tokens=4, stop="DEF")).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("BCDE", "length", None)


@pytest.mark.parametrize(("min_tokens", "text"), [(2, "BC"), (3, "BCDEFG"), (4, "BCDEFG")])
def test_o03_stop_strings_count_after_min_tokens(
    llm_of: MakeLLM, min_tokens: int, text: str
) -> None:
    params = greedy(stop=["D", "H"], min_tokens=min_tokens)
    [output] = both_ways(llm_of(*"ABCDEFGH", EOS), "A", params).outputs
    assert output.text == text


# ---- O04: an empty prompt


@pytest.mark.parametrize(
    "prompts",
    ["", {"prompt": ""}, [""], [{"prompt_token_ids": []}], {"prompt_token_ids": []}, ["hi", ""]],
    ids=str,
)
def test_o04_an_empty_prompt_is_refused(llm_of: MakeLLM, prompts: Any) -> None:
    llm = llm_of(*"ABC", EOS, add_bos=False)
    with pytest.raises(InvalidRequestError, match="the prompt is empty") as refusal:
        llm.generate(prompts, greedy(max_tokens=4))
    assert refusal.value.param == "prompt"
    assert is_idle(llm)
    assert answer(llm, "A", greedy()).outputs[0].text == "BC"


def test_o04_no_messages(llm_of: MakeLLM) -> None:
    llm = llm_of(*"ABC", EOS, add_bos=False)
    for conversations in ([], [[]]):
        with pytest.raises(InvalidRequestError, match="messages is empty"):
            llm.chat(conversations)
    assert answer(llm, "A", greedy()).outputs[0].text == "BC"


def test_o04_bos_alone_is_a_prompt(llm_of: MakeLLM) -> None:
    llm = llm_of(BOS, "A", "B", EOS)
    output = answer(llm, "", greedy(max_tokens=4))
    assert output.prompt_token_ids == [BOS]
    assert output.outputs[0].text == "AB"


# ---- O05: BOS twice

RENDERED = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
CHAT_IDS = [
    *(BOS, IM_START, *b"user\n", *HI, IM_END, *b"\n"),
    *(IM_START, *b"assistant\n"),
]
HI_MESSAGE = [{"role": "user", "content": "hi"}]


def test_o05_the_template_alone_writes_bos(llm_of: MakeLLM) -> None:
    llm = llm_of(*"AB", EOS)
    [output] = llm.chat(HI_MESSAGE, greedy(max_tokens=1))
    assert output.prompt_token_ids == CHAT_IDS
    assert output.prompt == RENDERED
    without = CHATML.removeprefix("{{ bos_token }}")
    [output] = llm.chat(HI_MESSAGE, greedy(max_tokens=1), chat_template=without)
    assert output.prompt_token_ids == CHAT_IDS[1:]


def test_o05_a_raw_prompt_gets_one_bos(llm_of: MakeLLM) -> None:
    llm = llm_of(*"AB", EOS)
    for prompt, expected in (
        ("hi", [BOS, *HI]),
        ("<s>hi", [BOS, *HI]),
        (RENDERED, CHAT_IDS),
        (ids(BOS, BOS, *HI), [BOS, BOS, *HI]),  # ids are taken as they are
    ):
        assert answer(llm, prompt, greedy(max_tokens=1)).prompt_token_ids == expected


def test_o05_gguf_that_adds_bos(tmp_path: Path) -> None:
    folder = markov(tmp_path / "folder", chain(*"AB", EOS), vocab=BYTE_VOCAB + 1)
    file = gguf_from_folder(
        folder, tmp_path / "model.gguf", keys={"tokenizer.ggml.add_bos_token": True}
    )
    llm = load_llm(file)
    assert answer(llm, "hi", greedy(max_tokens=1)).prompt_token_ids == [BOS, *HI]
    assert answer(llm, "<s>hi", greedy(max_tokens=1)).prompt_token_ids == [BOS, *HI]
    [output] = llm.chat(HI_MESSAGE, greedy(max_tokens=1))
    assert output.prompt_token_ids == CHAT_IDS


# ---- O06: a template that refuses, a turn that is continued

STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
)


def conversation(*roles_and_texts: str) -> list[dict[str, str]]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return [{"role": role, "content": text} for role, text in pairs]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (conversation("system", "s", "user", "A"), "no system role here"),
        (conversation("user", "q", "user", "A"), "roles must alternate"),
        (conversation("system", "s"), "no system role here"),
    ],
)
def test_o06_the_template_s_own_refusal(
    llm_of: MakeLLM, messages: list[dict[str, str]], message: str
) -> None:
    llm = llm_of(*"ABC", EOS)
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages, greedy(), chat_template=STRICT)
    with pytest.raises(InvalidRequestError, match=message):
        llm.stream_chat(messages, greedy(), chat_template=STRICT)
    [output] = llm.chat(conversation("user", "A"), greedy(), chat_template=STRICT)
    assert output.outputs[0].text == "BC"


def test_o06_continuing_the_last_message(llm_of: MakeLLM) -> None:
    llm = llm_of("k", "!", EOS)
    messages = conversation("user", "q", "assistant", "ok", "user", "q2", "assistant", "ok ")
    open_turn = {"add_generation_prompt": False, "continue_final_message": True}
    [output] = llm.chat(messages, greedy(), chat_template=TRIMMING, **open_turn)
    assert output.prompt == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\nok"
    )
    assert llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False) == (
        output.prompt
    )
    assert output.outputs[0].text == "!"
    [output] = llm.chat(messages[:3], greedy(), chat_template=TRIMMING, **open_turn)
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>user\nq2")  # the last message, whatever its role
    with pytest.raises(InvalidRequestError, match="both true"):
        llm.chat(messages, chat_template=TRIMMING, continue_final_message=True)


# ---- O07: several ids that end an answer


def ends_of_folder(folder: Path) -> Path:
    return markov(
        folder,
        chain("A", "B", IM_END, "C", EOS, "D"),
        generation_config={"eos_token_id": [EOS, IM_END]},
    )


def ends_of_gguf(folder: Path) -> Path:
    keys = {"tokenizer.ggml.eos_token_id": EOS, "tokenizer.ggml.eot_token_id": IM_END}
    rows = chain("A", "B", IM_END, "C", EOS, "D")
    source = markov(folder / "source", rows, vocab=BYTE_VOCAB + 1, chat_template=None)
    return gguf_from_folder(source, folder / "model.gguf", keys=keys)


@pytest.mark.parametrize("make", [ends_of_folder, ends_of_gguf])
@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_o07_every_end_of_sequence_id_counts(
    tmp_path: Path, make: Callable[[Path], Path], skip_tokenizer_init: bool
) -> None:
    llm = load_llm(make(tmp_path), skip_tokenizer_init=skip_tokenizer_init)

    def run(**options: Any) -> tuple[str, list[int], str | None, int | str | None]:
        [output] = both_ways(llm, ids(A), greedy(max_tokens=5, **options)).outputs
        text = "" if skip_tokenizer_init else output.text
        return text, output.token_ids, output.finish_reason, output.stop_reason

    def shown(text: str) -> str:
        return "" if skip_tokenizer_init else text

    whole = [B, IM_END, C, EOS, D]
    assert run() == (shown("B"), [B, IM_END], "stop", None)
    assert run(include_stop_str_in_output=True) == (shown("B"), [B, IM_END], "stop", None)
    assert run(skip_special_tokens=False) == (shown("B"), [B, IM_END], "stop", None)
    assert run(include_stop_str_in_output=True, skip_special_tokens=False) == (
        *(shown("B<|im_end|>"), [B, IM_END], "stop", None),
    )
    assert run(ignore_eos=True) == (shown("BCD"), whole, "length", None)
    assert run(ignore_eos=True, skip_special_tokens=False) == (
        *(shown("B<|im_end|>C</s>D"), whole, "length", None),
    )
    assert run(stop_token_ids=[B]) == ("", [B], "stop", B)
    assert run(ignore_eos=True, stop_token_ids=[EOS]) == (shown("BC"), whole[:4], "stop", EOS)


def test_o07_a_config_of_one_id_and_no_generation_config(tmp_path: Path) -> None:
    folder = ends_of_folder(tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == EOS
    [output] = load_llm(folder).generate("A", SamplingParams(temperature=0.0))
    assert output.outputs[0].token_ids == [B, IM_END, C, EOS]
