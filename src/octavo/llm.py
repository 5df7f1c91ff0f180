"""The offline API: ``LLM`` answers prompts in the caller's process."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from octavo.config import engine_config
from octavo.engine.build import LoadReport, build_engine
from octavo.engine.loop import EngineStats
from octavo.errors import InvalidRequestError, OctavoError
from octavo.frontend import Frontend, Prompt, Submission
from octavo.outputs import RequestOutput
from octavo.progress import generation_progress
from octavo.sampling_params import SamplingParams
from octavo.text import Tokenizer, encode_prompt, render_chat

Message = Mapping[str, Any]


class LLM:
    """A loaded model. Options are those of :class:`octavo.config.EngineConfig`, vLLM's names.

    Several threads may ask at once: their requests run in one batch. A forked process can't use it,
    since only the forking thread is there; it can load its own.

    ``report`` tells what was loaded and chosen. Raises a subclass of :class:`OctavoError` where the
    model can't be found, read or run, TypeError for an unknown option.
    """

    report: LoadReport

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._loaded = build_engine(engine_config(model, options))
        self.report = self._loaded.report
        self._engine = self._loaded.engine
        self._frontend = self._loaded.frontend
        self._ids = itertools.count()
        self._process = os.getpid()
        self._turn = _Turns()  # in the engine, and among the frontend's updates
        self._awaited: dict[int, list[RequestOutput]] = {}  # by id: where it goes once finished

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; InvalidRequestError where it was skipped."""
        return _need_tokenizer(self._frontend)

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies where no parameters are given: generation_config.json's values."""
        return self._loaded.default_params

    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        with self._turn:
            return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; outputs come in the prompts' order.

        A prompt is text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}`` (where a
        ``"prompt"`` beside the ids is only shown in the output); parameters are one for all or one
        each. All prompts are checked before any is run: a bad one raises
        :class:`InvalidRequestError` and nothing is generated. ``use_tqdm`` shows progress.
        """
        batch = _as_batch(prompts)
        params = self._params_for(batch, sampling_params)
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise InvalidRequestError(
                f"{len(priorities)} priorities for {len(batch)} prompts", "priority"
            )
        submissions = [
            self._prepare(prompt, one, level, cache_salt)
            for prompt, one, level in zip(batch, params, priorities, strict=True)
        ]
        return self._run_all(submissions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several.

        ``template_options`` are those of :func:`octavo.text.render_chat`: tools, documents,
        add_generation_prompt, continue_final_message, chat_template. Further variables of the
        template go into ``chat_template_kwargs`` (``{"enable_thinking": False}``).
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequestError(
                f"messages are {messages!r:.60}; give a list of messages, such as "
                "[{'role': 'user', 'content': 'Hi'}]",
                "messages",
            )
        several = bool(messages) and not isinstance(messages[0], str | Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self._chat_prompt(one, **template_options) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Yield the output of one prompt as it grows (the same object, text cumulative). Closing
        the iterator aborts the request."""
        submission = self._prepare(prompt, sampling_params or self._loaded.default_params)
        return self._stream(submission)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Generator[RequestOutput]:
        """:meth:`stream` of one conversation."""
        return self.stream(self._chat_prompt(messages, **template_options), sampling_params)

    def _chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        tokenizer = self.get_tokenizer()
        text = render_chat(
            tokenizer,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **(chat_template_kwargs or {}),
        )
        return {"prompt": str(text), "prompt_token_ids": encode_prompt(tokenizer, text)}

    def _params_for(
        self,
        batch: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self._loaded.default_params] * len(batch)
        if isinstance(sampling_params, str | Mapping) or not isinstance(sampling_params, Sequence):
            raise _no_params(sampling_params)
        if len(sampling_params) != len(batch):
            raise InvalidRequestError(
                f"{len(sampling_params)} sampling parameters for {len(batch)} prompts; "
                "give one for all or one each",
                "sampling_params",
            )
        return list(sampling_params)

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Submission:
        if os.getpid() != self._process:
            raise OctavoError(
                f"this LLM was loaded in process {self._process}, and its threads are there; "
                f"load another in this one ({os.getpid()})"
            )
        if not isinstance(params, SamplingParams):
            raise _no_params(params)
        submission = self._frontend.prepare(
            str(next(self._ids)), prompt, params, priority=priority, cache_salt=cache_salt
        )
        for request in submission.requests:
            self._engine.check(request)
        return submission

    def _start(self, submission: Submission) -> None:
        with self._turn:
            self._frontend.register(submission)
            for request in submission.requests:
                self._engine.add(request)

    def _abort(self, submission: Submission) -> None:
        with self._turn:
            for request_id in self._frontend.drop(submission):
                self._engine.abort(request_id)
            while self._frontend.is_idle and self._engine.has_work:
                self._engine.step()  # a step in flight ends, and its blocks return

    def _step(self) -> list[RequestOutput]:
        """One step, whoever's requests are in it; what it changed."""
        with self._turn:
            step = self._frontend.process(self._engine.step())
            for request_id in step.stopped:
                self._engine.finish(request_id)
            for output in step.outputs:
                if output.finished and id(output) in self._awaited:
                    self._awaited.pop(id(output)).append(output)
            return step.outputs

    def _stream(self, submission: Submission) -> Generator[RequestOutput]:
        self._start(submission)
        output = submission.output
        told_of_end, told = False, 0
        try:
            while not told_of_end:
                # Meanwhile other steps of the caller's, or of other threads, may have brought more.
                if not output.finished:
                    self._step()
                told_of_end = output.finished
                tokens = sum(len(one.token_ids) for one in output.outputs)
                if tokens > told or told_of_end:
                    told = tokens
                    yield output
        finally:
            self._abort(submission)

    def _run_all(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        ended: list[RequestOutput] = []
        try:
            with generation_progress(len(submissions), enabled=use_tqdm) as advance:
                for submission in submissions:
                    self._awaited[id(submission.output)] = ended
                    self._start(submission)
                shown = 0
                while len(ended) < len(submissions):
                    self._step()
                    advance(ended[shown:])
                    shown = len(ended)
        finally:
            for submission in submissions:
                self._awaited.pop(id(submission.output), None)
                self._abort(submission)
        return [submission.output for submission in submissions]


class _Turns:
    """A lock that a thread in a loop can't take again before one that waits for it. Its owner may:
    a forgotten stream is closed whenever Python finds it, be it within a step."""

    def __init__(self) -> None:
        self._next, self._taken = threading.Lock(), threading.Lock()
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._next:
                self._taken.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
            self._taken.release()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts are {prompts!r:.60}; give one or a list", "prompt")
    return list(prompts)


def _no_params(given: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"sampling_params are {given!r:.60}; give SamplingParams(...), one for all or one each",
        "sampling_params",
    )


def _need_tokenizer(frontend: Frontend) -> Tokenizer:
    if frontend.tokenizer is None:
        raise InvalidRequestError(
            "this needs the tokenizer, which was skipped (skip_tokenizer_init); "
            "load the model with it, or give token ids"
        )
    return frontend.tokenizer
