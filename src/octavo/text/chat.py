"""Conversations to prompts: the checkpoint's chat template, rendered and encoded.

A special token that a message spells out stays text: nobody ends a turn or speaks as the system by
writing ``<|im_end|>``. The template is rendered as it is, and once more with those texts broken by
a character that no text can have; where the breaks come out are the texts that came from messages.
Both renderings have to agree, so the prompt's text is always the template's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.text.special_texts import BREAK, SpecialTexts, check_unicode
from octavo.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

# Where the final message is cut to be continued. The space tells a template that trims from one
# that doesn't, as in transformers.
_END = "\udc01"
_END_OF_CONTENT = _END + " "

_MAX_DEPTH = 100

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatPrompt(str):
    """A rendered conversation. ``literals`` are the indices at which a message, not the template,
    spells a special token."""

    __slots__ = ("literals",)

    literals: tuple[int, ...]

    def __new__(cls, text: str, literals: tuple[int, ...] = ()) -> ChatPrompt:
        prompt = super().__new__(cls, text)
        prompt.literals = literals
        return prompt


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **chat_template_kwargs: Any,
) -> ChatPrompt:
    """The prompt text of a conversation, as ``apply_chat_template`` of transformers renders it.

    ``chat_template`` is a template or the name of one of the checkpoint's; left out, it is the
    one for tools, where tools are given and there is one, or else the default. Content is text,
    or a list of text parts, which are joined by line breaks unless the template walks over them.
    ``continue_final_message`` leaves the last message open, whatever its role, to be continued;
    where the template trims it, its trailing white space is gone. Further keyword arguments are
    variables of the template (``enable_thinking``).

    Raises :class:`InvalidRequestError` for messages that are malformed or that the template
    refuses, and where there is no template.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message are both true: one begins a new "
            "answer, the other continues the last message; set one of them to false",
            "continue_final_message",
        )
    if reserved := {"messages", "strftime_now"} & chat_template_kwargs.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs can't set {', '.join(sorted(reserved))}", "chat_template_kwargs"
        )
    from octavo.text.template import compile_template  # 20 ms: jinja

    source = _choose_template(tokenizer, chat_template, bool(tools))
    template = compile_template(source)
    conversation = _read_messages(messages, keep_parts=template.iterates_content)
    if continue_final_message:
        _mark_end(conversation[-1])
    given = {
        **_plain_data(chat_template_kwargs, "chat_template_kwargs"),
        "messages": conversation,
        "tools": _plain_data(tools, "tools"),
        "documents": _plain_data(documents, "documents"),
    }
    fixed = {
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": datetime.now().strftime,  # one moment for both renderings
    }

    def render(variables: dict[str, Any], broken: SpecialTexts | None = None) -> str:
        names = {**tokenizer.special_tokens, **variables, **fixed}
        text = compile_template(source, broken).render(names)
        return _cut_at_end(text) if continue_final_message else text

    text = render(given)
    specials = tokenizer.special_texts
    given_broken = _broken(given, specials)
    if given_broken == given:
        return ChatPrompt(text)
    text_broken = render(given_broken, specials)
    if text_broken.replace(BREAK, "") != text:
        sent = json.dumps(given, ensure_ascii=False)
        spelled = ", ".join(sorted(token for token in specials.texts if token in sent))
        raise InvalidRequestError(
            f"the messages spell a special token of the model ({spelled}), and its chat template "
            "depends on that in a way that can't be rendered safely; write it otherwise",
            "messages",
        )
    return ChatPrompt(text, _literals(text_broken))


def encode_prompt(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    """Token ids of a rendered conversation. Nothing is added: the template writes BOS itself."""
    return tokenizer.encode_with_literals(prompt, prompt.literals)


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], /, **options: Any) -> list[int]:
    """Token ids of a conversation; ``options`` are those of :func:`render_chat`."""
    return encode_prompt(tokenizer, render_chat(tokenizer, messages, **options))


def _choose_template(tokenizer: Tokenizer, given: str | None, with_tools: bool) -> str:
    templates = tokenizer.chat_templates
    if given is not None:
        return templates.get(given, given)
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise InvalidRequestError(
            f"the model has the chat templates {', '.join(sorted(templates))} and no default; "
            "name one of them as chat_template",
            "chat_template",
        )
    raise InvalidRequestError(
        "the model has no chat template (a base model, perhaps): send a plain prompt, or give a "
        "chat_template",
        "messages",
    )


def _read_messages(messages: Sequence[Message], keep_parts: bool) -> list[dict[str, Any]]:
    """Messages as a template expects them: plain data, no nulls, reasoning under its names."""
    if not messages:
        raise InvalidRequestError(
            "messages is empty, a conversation needs at least one", "messages"
        )
    conversation = []
    for index, given in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
            raise InvalidRequestError(f"{place} is no object with a role", "messages")
        message: dict[str, Any] = _plain_data(given, place)
        # Many templates print a null as "None"; they all know a missing key.
        message = {name: value for name, value in message.items() if value is not None}
        if "content" in message:
            message["content"] = _read_content(message["content"], place, keep_parts)
        if "tool_calls" in message:
            _parse_arguments(message["tool_calls"], place)
        for name in _REASONING_NAMES:
            if name in message:
                message = {"thinking": message[name], **message, "reasoning_content": message[name]}
                break
        conversation.append(message)
    return conversation


def _read_content(content: Any, place: str, keep_parts: bool) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{place}.content is {content!r}, it must be text or a list of text parts", "messages"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{place}.content has a part of type {kind!r}, only text parts "
                '({"type": "text", "text": ...}) are supported',
                "messages",
            )
    return content if keep_parts else "\n".join(part["text"] for part in content)


def _parse_arguments(tool_calls: Any, place: str) -> None:
    """OpenAI's protocol sends a call's arguments as JSON text, templates expect the object."""
    for call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequestError(f"{place}.tool_calls must be a list of objects", "messages")
        if not isinstance(text := function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{place}.tool_calls has arguments that are no JSON: {error}", "messages"
            ) from error
        if not isinstance(arguments, dict):
            raise InvalidRequestError(
                f"{place}.tool_calls has arguments {text!r}, they must be a JSON object", "messages"
            )
        function["arguments"] = _plain_data(arguments, f"{place}.tool_calls")


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_OF_CONTENT
    elif content:
        content[-1]["text"] += _END_OF_CONTENT
    else:
        raise InvalidRequestError(
            "continue_final_message is true, but the final message has no content to continue",
            "continue_final_message",
        )


def _cut_at_end(text: str) -> str:
    head, found, tail = text.rpartition(_END)
    if not found:
        raise InvalidRequestError(
            "continue_final_message is true, but the chat template doesn't show the final message",
            "continue_final_message",
        )
    return head if tail.startswith(" ") else head.rstrip()


def _literals(text_broken: str) -> tuple[int, ...]:
    """Where, in the text without breaks, the special tokens begin that were broken."""
    literals = []
    position = 0
    for piece in text_broken.split(BREAK)[:-1]:
        position += len(piece)
        literals.append(position - 1)  # a break follows the first character
    return tuple(literals)


def _plain_data(value: Any, place: str, depth: int = 0) -> Any:
    """A deep copy of JSON-like data. A template is foreign code: it sees no other objects."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_unicode(value, place)
        return str(value)
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{place} is nested deeper than {_MAX_DEPTH} levels", place)
    if isinstance(value, Mapping):
        return {
            _plain_data(name, place, depth + 1): _plain_data(entry, f"{place}.{name}", depth + 1)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _plain_data(entry, f"{place}[{index}]", depth + 1) for index, entry in enumerate(value)
        ]
    raise InvalidRequestError(
        f"{place} is of type {type(value).__name__}; it must be text, a number, a list or an "
        "object",
        place,
    )


def _broken(value: Any, specials: SpecialTexts) -> Any:
    """The same data, every special token that it spells broken."""
    if isinstance(value, str):
        return specials.broken(value)
    if isinstance(value, dict):
        return {_broken(name, specials): _broken(entry, specials) for name, entry in value.items()}
    if isinstance(value, list):
        return [_broken(entry, specials) for entry in value]
    return value
