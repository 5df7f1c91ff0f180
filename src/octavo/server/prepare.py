"""From a request's JSON to checked submissions and the answer they will become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.frontend import Prompt, Submission
from octavo.sampling_params import SamplingParams
from octavo.server.answers import Answer, AnswerOptions, ChoiceReader
from octavo.server.chat_answer import ChatAnswer
from octavo.server.completion_answer import CompletionAnswer
from octavo.server.engine_client import EngineClient
from octavo.server.forced import forced_call
from octavo.server.parsers import AnswerParser, ParserChoice, call_parser
from octavo.server.parsers.think import OPEN
from octavo.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    Sampling,
    TokenizeRequest,
    Tool,
)
from octavo.server.respond import Respond
from octavo.server.responses import ResponsesRequest
from octavo.server.responses_answer import ResponsesAnswer
from octavo.text import ChatPrompt, Tokenizer, encode_prompt, render_chat

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
_TEMPLATE_OPTIONS = frozenset(
    ("tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


@dataclass(frozen=True)
class Serving:
    """What answering needs. ``defaults`` are generation_config.json's sampling parameters; ``name``
    is what answers call the model."""

    engine: EngineClient
    tokenizer: Tokenizer
    name: str
    vocab_size: int
    defaults: Mapping[str, Any]
    parsers: ParserChoice
    force_usage: bool = False
    log_requests: bool = False


def chat_call(serving: Serving, request: ChatRequest) -> Respond:
    """A conversation, checked. Raises :class:`InvalidRequestError`."""
    options = _options(serving, request)
    named = isinstance(request.tool_choice, NamedTool)

    def answer(params: SamplingParams, readers: Sequence[ChoiceReader]) -> Answer:
        return ChatAnswer(options, serving.tokenizer, params, readers, named=named)

    return _converse(serving, request, answer)


def responses_call(serving: Serving, request: ResponsesRequest) -> Respond:
    """The same by way of OpenAI's newer interface."""
    chat = request.as_chat()

    def answer(params: SamplingParams, readers: Sequence[ChoiceReader]) -> Answer:
        name = request.model or serving.name
        return ResponsesAnswer(request, name, serving.tokenizer, params, readers[0])

    return _converse(serving, chat, answer)


def _converse(
    serving: Serving,
    request: ChatRequest,
    make_answer: Callable[[SamplingParams, Sequence[ChoiceReader]], Answer],
) -> Respond:
    tools = _tools(serving, request)
    forced = forced_call(request, tools)
    params = request.sampling_params(
        {"max_tokens": None, **serving.defaults},
        max_tokens=request.token_limit,
        logprobs=_chat_logprobs(request),
        **({} if forced is None else {"structured_outputs": forced.structure()}),
        **({"skip_special_tokens": False} if tools and serving.parsers.shows_markers else {}),
    )
    prompt = _render(serving.tokenizer, request, tools)
    # A grammar leaves no room for reasoning.
    reasons = serving.parsers.reasoning is not None and params.structured_outputs is None

    def reader() -> ChoiceReader:
        calls = None
        if forced is not None:
            calls = forced.parser()
        elif tools and serving.parsers.tools is not None:
            calls = call_parser(serving.parsers.tools, [tool.function.name for tool in tools])
        begun = prompt.rstrip().endswith(OPEN)
        parser = AnswerParser(reasoning=reasons, begun=begun, calls=calls)
        one_call = request.parallel_tool_calls is False
        return ChoiceReader(parser if reasons or tools else None, one_call)

    answer = make_answer(params, [reader() for _ in range(params.n)])
    ids = encode_prompt(serving.tokenizer, prompt)
    given = {"prompt": str(prompt), "prompt_token_ids": ids}
    submission = _submit(serving, request, answer.id, given, params)
    return _respond(serving, request, [submission], answer)


def completion_call(serving: Serving, request: CompletionRequest) -> Respond:
    """Prompts to complete, checked: one bad prompt refuses the call."""
    echo = bool(request.echo)
    prompt_logprobs = request.logprobs if echo else None
    if echo and request.max_tokens == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # nothing but the prompt: the engine has to do something with it
    params = request.sampling_params(
        {**serving.defaults, "max_tokens": COMPLETION_MAX_TOKENS},
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    answer = CompletionAnswer(_options(serving, request), serving.tokenizer, params, echo=echo)
    prompts = _prompts(request.prompt)
    submissions = [
        _submit(serving, request, f"{answer.id}-{i}", prompt, params)
        for i, prompt in enumerate(prompts)
    ]
    return _respond(serving, request, submissions, answer)


def chat_token_ids(tokenizer: Tokenizer, request: TokenizeRequest) -> list[int]:
    """The token ids of the messages in a request to tokenize."""
    return encode_prompt(tokenizer, _render(tokenizer, request, request.tools or []))


def _options(serving: Serving, request: Sampling) -> AnswerOptions:
    wanted = request.stream_options
    continuous = wanted is not None and bool(wanted.continuous_usage_stats)
    asked = wanted is not None and bool(wanted.include_usage)
    return AnswerOptions(
        model=request.model or serving.name,
        return_token_ids=bool(request.return_token_ids),
        include_usage=asked or continuous or serving.force_usage,
        continuous_usage=continuous,
    )


def _respond(
    serving: Serving, request: Sampling, submissions: Sequence[Submission], answer: Answer
) -> Respond:
    return Respond(
        serving.engine,
        submissions,
        answer,
        stream=bool(request.stream),
        log=serving.log_requests,
    )


def _submit(
    serving: Serving,
    request: Sampling,
    submission_id: str,
    prompt: Prompt,
    params: SamplingParams,
) -> Submission:
    if serving.engine.frontend.content_rules.patterns:
        _check_shows_no_tokens(request, params)
    submission = serving.engine.frontend.prepare(
        submission_id,
        prompt,
        params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    limit = serving.engine.check_open().max_total_tokens
    length = len(submission.output.prompt_token_ids)
    asked = _tokens_asked(request)
    if length + asked > limit:
        raise ContextLengthError(
            f"the prompt has {length} tokens and the answer needs room for {asked}: together "
            f"{length + asked}, but the limit is {limit}; shorten the prompt, ask for fewer "
            "tokens, or serve with a larger max_model_len",
            "messages" if isinstance(request, ChatRequest) else "prompt",
        )
    return submission


def _check_shows_no_tokens(request: Sampling, params: SamplingParams) -> None:
    """Content rules withhold text; tokens beside it would show what they withhold."""
    for name, shows in (
        ("logprobs", params.logprobs is not None),
        ("return_token_ids", request.return_token_ids),
    ):
        if shows:
            raise InvalidRequestError(
                f"{name} can't be given: this server has content rules, and tokens would show the "
                "text that they withhold",
                name,
            )


def _tokens_asked(request: Sampling) -> int:
    """The length of the answer that must fit: what the request says itself, or else one token."""
    limit = request.token_limit if isinstance(request, ChatRequest) else request.max_tokens
    return 1 if limit is None else limit


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is an empty list", "prompt")
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


def _render(
    tokenizer: Tokenizer, request: ChatRequest | TokenizeRequest, tools: Sequence[Tool]
) -> ChatPrompt:
    variables = dict(request.chat_template_kwargs or {})
    if reserved := _TEMPLATE_OPTIONS & variables.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs can't set {', '.join(sorted(reserved))}", "chat_template_kwargs"
        )
    continued = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    messages: list[Message] = request.messages or []
    return render_chat(
        tokenizer,
        [message.for_template() for message in messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
        add_generation_prompt=not continued if begins is None else begins,
        continue_final_message=continued,
        **variables,
    )


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequestError("top_logprobs is given, but logprobs is not true", "top_logprobs")
    return None


def _tools(serving: Serving, request: ChatRequest) -> list[Tool]:
    """The tools that the answer may call."""
    tools, choice = request.tools or [], request.tool_choice
    if choice == "none":
        return []
    if not tools and choice not in (None, "auto"):
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools", "tools")
    if tools and serving.parsers.tools is None and choice in (None, "auto"):
        raise InvalidRequestError(
            "tools are given, but the model's chat template shows no known way to write calls; "
            "the server can be told one with --tool-call-parser",
            "tools",
        )
    return tools
