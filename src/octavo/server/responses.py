"""``POST /v1/responses``: what a request may say, and the chat that it comes to.

Nothing is stored: a conversation is sent whole, ``previous_response_id`` is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.errors import InvalidRequestError
from octavo.server.protocol import (
    ChatRequest,
    Function,
    FunctionCall,
    FunctionName,
    Int64,
    JsonSchema,
    Message,
    NamedTool,
    ResponseFormat,
    Shaped,
    Strict,
    Tool,
    ToolCall,
    Unsupported,
)


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None
    phase: Annotated[
        Literal["commentary", "final_answer"] | None,
        Field(description="Without effect: no chat template knows of it."),
    ] = None


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: Unsupported = None
    id: str | None = None
    status: str | None = None


class InputCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Strict):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: Unsupported = None
    id: str | None = None
    status: str | None = None


InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning


class FlatTool(Function):
    type: Literal["function"]


class FlatNamedTool(FunctionName):
    type: Literal["function"]


class FlatSchema(JsonSchema):
    type: Literal["json_schema"]


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class TextOptions(Strict):
    format: PlainFormat | FlatSchema | None = None
    verbosity: Unsupported = None


class ResponsesRequest(Shaped):
    """The body of ``POST /v1/responses``."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    seed: int | None = None
    text: TextOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    stream: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    reasoning: Unsupported = None
    max_tool_calls: Unsupported = None
    top_logprobs: Unsupported = None
    stream_options: Unsupported = None

    @property
    def shapes_the_answer(self) -> bool:
        wanted = self.text is not None and self.text.format is not None
        return wanted or self.tool_choice not in (None, "none", "auto")

    def as_chat(self) -> ChatRequest:
        """The same conversation as a chat."""
        choice = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice_of_chat: Any = NamedTool(
                type="function", function=FunctionName(name=choice.name)
            )
        else:
            choice_of_chat = choice
        tools = [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))
            for tool in self.tools or ()
        ]
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            tools=tools,
            tool_choice=choice_of_chat,
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            response_format=self._response_format(),
            chat_template_kwargs=self.chat_template_kwargs,
            priority=self.priority,
            cache_salt=self.cache_salt,
            stream=self.stream,
        )

    def _response_format(self) -> ResponseFormat | None:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, FlatSchema):
            schema = JsonSchema.model_validate(wanted.model_dump(exclude={"type"}, by_alias=True))
            return ResponseFormat(type="json_schema", json_schema=schema)
        return None if wanted is None else ResponseFormat(type=wanted.type)

    def _messages(self) -> list[Message]:
        """Turns. Reasoning and calls that follow each other are one turn of the assistant's."""
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        items = self.input
        if isinstance(items, str):
            items = [InputMessage(role="user", content=items)]
        if not items:
            raise InvalidRequestError("input is an empty list", "input")
        open_turn: dict[str, Any] | None = None  # the assistant's, to which more may belong
        for item in items:
            match item:
                case InputMessage() if item.role != "assistant":
                    turns.append({"role": item.role, "content": _text(item.content)})
                    open_turn = None
                    continue
                case InputCallOutput():
                    turns.append(
                        {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                    )
                    open_turn = None
                    continue
            if open_turn is None or (isinstance(item, InputMessage) and "content" in open_turn):
                open_turn = {"role": "assistant"}
                turns.append(open_turn)
            if isinstance(item, InputMessage):
                open_turn["content"] = _text(item.content)
            elif isinstance(item, InputCall):
                function = FunctionCall(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=function)
                open_turn.setdefault("tool_calls", []).append(call)
            elif isinstance(item, InputReasoning):
                open_turn["reasoning"] = "".join(part.text for part in item.content or ())
        return [Message(**turn) for turn in turns]


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
