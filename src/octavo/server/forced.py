"""A call that ``tool_choice`` asks for: a JSON Schema that leaves the model no other answer.

As in vLLM: a named function's answer is its arguments, a required call's a list of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from octavo.errors import InvalidRequestError
from octavo.sampling_params import StructuredOutputs
from octavo.server.parsers import Parser
from octavo.server.parsers.tools import CallListParser, NamedCallParser
from octavo.server.protocol import ChatRequest, NamedTool, Tool


class ForcedCall(Protocol):
    """How the answer is kept to calls, and how they are read."""

    def structure(self) -> StructuredOutputs: ...

    def parser(self) -> Parser: ...


class _Named:
    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def structure(self) -> StructuredOutputs:
        return StructuredOutputs(json=_parameters(self._tool))

    def parser(self) -> Parser:
        return NamedCallParser(self._tool.function.name)


class _Required:
    def __init__(self, tools: Sequence[Tool], several: bool) -> None:
        self._tools = tools
        self._several = several

    def structure(self) -> StructuredOutputs:
        calls: list[dict[str, Any]] = []
        definitions: dict[str, Any] = {}
        for tool in self._tools:
            parameters = dict(_parameters(tool))
            for name in ("$defs", "definitions"):
                # References are to the root of a schema.
                definitions.setdefault(name, {}).update(parameters.pop(name, {}))
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
        return StructuredOutputs(json=schema if self._several else {**schema, "maxItems": 1})

    def parser(self) -> Parser:
        return CallListParser([tool.function.name for tool in self._tools])


def forced_call(request: ChatRequest, tools: Sequence[Tool]) -> ForcedCall | None:
    """What ``tool_choice`` forces, if anything. Raises :class:`InvalidRequestError`."""
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if request.response_format is not None or request.structured_outputs is not None:
        raise InvalidRequestError(
            "tool_choice asks for a call and a format for its text is given; give one of them",
            "tool_choice",
        )
    if not isinstance(choice, NamedTool):
        return _Required(tools, several=request.parallel_tool_calls is not False)
    for tool in tools:
        if tool.function.name == choice.function.name:
            return _Named(tool)
    raise InvalidRequestError(
        f"tool_choice names {choice.function.name!r}, which is not among the tools", "tool_choice"
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.function.parameters or {})}
