"""Chat templates: Jinja in a sandbox, with the helpers that Hugging Face's templates expect."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequestError
from octavo.text.special_texts import SpecialTexts


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which is not what models were trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception


_SEARCHING_METHODS = {
    *("count", "find", "index", "rfind", "rindex", "startswith", "endswith", "replace"),
    *("split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"),
    *("strip", "lstrip", "rstrip"),
}


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template. ``iterates_content`` says that it walks over the parts of a message's
    content; other templates expect one string."""

    compiled: jinja2.Template
    iterates_content: bool

    def render(self, variables: dict[str, Any]) -> str:
        """Raises :class:`InvalidRequestError` with the message of whatever the template raises."""
        try:
            return self.compiled.render(variables)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error


@lru_cache(maxsize=64)
def compile_template(source: str, broken: SpecialTexts | None = None) -> ChatTemplate:
    """Compile a template, once for each source.

    With ``broken`` it expects messages in which those texts are broken: texts that it searches
    messages for are broken alike, so that it still finds them. Raises
    :class:`InvalidRequestError` for a template with a fault.
    """
    try:
        syntax = _ENVIRONMENT.parse(source)
        iterates_content = any(_is_content(loop.iter) for loop in syntax.find_all(nodes.For))
        if broken is not None:
            for needle in _searched_texts(syntax):
                needle.value = broken.broken(needle.value)
        code = _ENVIRONMENT.compile(syntax)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"the chat template has a fault in line {error.lineno}: {error.message}",
            "chat_template",
        ) from error
    compiled = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
    return ChatTemplate(compiled, iterates_content)


def _is_content(node: nodes.Node | None) -> bool:
    """Whether an expression is a message's content: ``m.content``, ``m["content"]``, filtered."""
    match node:
        case nodes.Filter():
            return _is_content(node.node)
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _searched_texts(syntax: nodes.Template) -> list[nodes.Const]:
    """The constants that are compared (``in``, ``==``) or that a string method searches for."""
    searched: list[nodes.Node] = []
    for comparison in syntax.find_all(nodes.Compare):
        searched += [comparison.expr, *(operand.expr for operand in comparison.ops)]
    for call in syntax.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHING_METHODS:
            searched += call.args[:1]
    for filtered in syntax.find_all(nodes.Filter):
        if filtered.name == "replace":
            searched += filtered.args[:1]
    return [
        node for node in searched if isinstance(node, nodes.Const) and isinstance(node.value, str)
    ]
