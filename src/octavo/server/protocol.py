"""What requests may say: OpenAI's fields and vLLM's, read strictly.

Nothing is coerced ("5" is no number), an unknown field is refused by name, and null means the
default. OpenAI's fields that don't change an answer are listed in ``WITHOUT_EFFECT``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams, StructuredOutputs

# What the engine process can be told: msgpack has no larger ones.
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Unsupported = Annotated[None, Field(description="Not supported; null only.")]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class WithoutEffect(Strict):
    """Fields that OpenAI's clients send and that don't change the answer."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[
        bool | None, Field(description="Without effect: nothing is added to hide lengths.")
    ] = None


class StructuredOutputsField(Strict):
    """Exactly one says what the answer must look like."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def checked(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=bool(self.json_object),
        )


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def checked(self) -> StructuredOutputs | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            fault = "has no" if self.json_schema is None else "can't have a"
            raise InvalidRequestError(
                f"response_format of type {self.type} {fault} json_schema", "response_format"
            )
        if self.json_schema is not None:
            if self.json_schema.schema_ is None:
                raise InvalidRequestError(
                    "response_format.json_schema has no schema", "response_format"
                )
            return StructuredOutputs(json=self.json_schema.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class Shaped(WithoutEffect):
    """A request whose answer may have to keep to a grammar."""

    @property
    def shapes_the_answer(self) -> bool:
        """Whether it does: that takes a while to check."""
        raise NotImplementedError


class Sampling(Shaped):
    """What both kinds of request may say about sampling; see :class:`SamplingParams`."""

    model: Annotated[str | None, Field(description="The only model, if left out.")] = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    return_token_ids: bool | None = None

    @property
    def shapes_the_answer(self) -> bool:
        return self.response_format is not None or self.structured_outputs is not None

    def sampling_params(self, defaults: dict[str, Any], **given: Any) -> SamplingParams:
        """The request's parameters over ``defaults``; ``given`` overrides both where not None.

        Raises :class:`InvalidRequestError` for a value out of range.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is given, but stream is not true", "stream_options"
            )
        said = {name: getattr(self, name) for name in _SAMPLING_NAMES}
        said |= {"logit_bias": self._bias_by_id(), "structured_outputs": self._structure()} | given
        said = {name: value for name, value in said.items() if value is not None}
        return SamplingParams(**{**defaults, **said})

    def _bias_by_id(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for token in self.logit_bias:
            if not (token.isascii() and token.isdigit()):
                raise InvalidRequestError(
                    f"logit_bias has the key {token!r}, keys must be token ids", "logit_bias"
                )
        return {int(token[:20]): bias for token, bias in self.logit_bias.items()}

    def _structure(self) -> StructuredOutputs | None:
        wanted = None if self.response_format is None else self.response_format.checked()
        if self.structured_outputs is None:
            return wanted
        if wanted is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both say what the answer must look like; "
                "give one",
                "structured_outputs",
            )
        return self.structured_outputs.checked()


_SAMPLING_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)


# ---- chat


class TextPart(Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        """Clients send images and sound too: that gets one sentence, not one for each field."""
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "no_text", "only text can be read, not {kind}", {"kind": kind}
            )
        return given


class FunctionCall(Strict):
    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class Message(Strict):
    """One turn. What OpenAI's clients send back of an answer (``refusal`` ...) may be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Unsupported = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template expects it. OpenAI's ``developer`` took the place of its
        ``system``, which is what templates know."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        if not self.tool_calls:
            message.pop("tool_calls", None)
            if self.content is None:
                raise InvalidRequestError(
                    f"a message of role {self.role} has no content", "messages"
                )
        return message


class Function(Strict):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatFields(Strict):
    """What renders a conversation; ``/tokenize`` takes the same."""

    messages: list[Message]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampling, ChatFields):
    """The body of ``POST /v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @property
    def shapes_the_answer(self) -> bool:
        return super().shapes_the_answer or self.tool_choice not in (None, "none", "auto")

    @property
    def token_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


# ---- completions

# By default pydantic would go on to the other kinds after a fit: 5 ms for 32K token ids.
Prompt = Annotated[str | list[int] | list[str] | list[list[int]], Field(union_mode="left_to_right")]


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Unsupported = None
    suffix: Unsupported = None


# ---- token ids


class TokenizeRequest(Strict):
    """The body of ``POST /tokenize``: a prompt, or messages as for a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
