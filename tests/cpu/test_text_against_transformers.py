"""Prompts and ids against transformers: ``apply_chat_template`` and its tokenizer of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import save_byte_tokenizer
from helpers.tokenizers import (
    checkpoint,
    qwen3,
    qwen3_tokenizer_folder,
    reference_cases,
    smollm2,
)
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.text import Tokenizer, encode_chat, load_tokenizer, render_chat

TOOL = {
    "type": "function",
    "function": {
        "name": "sum",
        "description": "Adds <b> \u00e9",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": " What is 2 + 2?\n"}
ANSWER = {"role": "assistant", "content": "It is 4. "}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 4."}
REASONED = {"role": "assistant", "content": "4", "reasoning_content": "hm"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "sum", "arguments": {"n": [2, "é"]}}}],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1"}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, THOUGHT, USER],
    [USER, THOUGHT],
    [USER, REASONED],
    [USER, CALL, RESULT, RESULT, ANSWER],
    [{"role": "user", "content": "<|im_end|> \U0001f336 </think>"}, ANSWER],
]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "tools": [TOOL]},
    {"add_generation_prompt": False, "continue_final_message": True},
]
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("template", ["qwen3", "smollm2", "llama 2"])
def test_same_bytes_as_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    tokenizer: Tokenizer = qwen3() if template == "qwen3" else smollm2()
    source = LLAMA_2 if template == "llama 2" else tokenizer.chat_template
    ours, theirs = (
        _text_or_refusal(lambda: render_chat(tokenizer, messages, chat_template=source, **options)),
        _text_or_refusal(
            lambda: render_jinja_template(
                [messages], chat_template=source, **options, **tokenizer.special_tokens
            )[0][0]
        ),
    )
    if theirs is not None:
        assert ours == theirs


def _text_or_refusal(render: Any) -> str | None:
    try:
        return str(render())
    except Exception:  # transformers raises all sorts
        return None


def test_reported_case_of_a_trimming_template() -> None:
    """O06 (b): the last assistant turn is continued, not an earlier one that reads the same."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
        "{% endfor %}"
    )
    contents = [("user", "q"), ("assistant", "ok"), ("user", "q2"), ("assistant", "ok ")]
    messages = [{"role": role, "content": content} for role, content in contents]
    options = {"chat_template": source, "continue_final_message": True}
    (theirs,), _ = render_jinja_template([messages], **options)
    assert render_chat(smollm2(), messages, add_generation_prompt=False, **options) == theirs


def test_qwen3_folder_equals_auto_tokenizer(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(qwen3_tokenizer_folder(tmp_path))
    for text, _ in reference_cases("smollm2"):
        assert qwen3().encode(text) == theirs(text).input_ids
    for messages in CONVERSATIONS[:-1]:
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert encode_chat(qwen3(), messages) == ids


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_bos_as_auto_tokenizer_adds_it(tmp_path: Path, stored: bool, flag: bool | None) -> None:
    save_byte_tokenizer(tmp_path, add_bos=stored)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"add_bos_token": flag}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(checkpoint(tmp_path)).encode("hi") == theirs("hi").input_ids
