"""The routes: JSON in, strictly read; JSON or a stream of events out; errors as OpenAI's JSON."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import __version__
from octavo.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OctavoError,
    OverloadedError,
    RequestTooLargeError,
)
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.errors import error_body, from_validation, http_error_body
from octavo.server.gateway import Gateway, request_id
from octavo.server.openapi import openapi_document
from octavo.server.prepare import (
    Serving,
    chat_call,
    chat_token_ids,
    completion_call,
    responses_call,
)
from octavo.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Shaped,
    TokenizeRequest,
)
from octavo.server.respond import BODY_SEND
from octavo.server.responses import ResponsesRequest
from octavo.text import Tokenizer

logger = logging.getLogger(__name__)

_JSON = "application/json"
_LINGER_SECONDS = 5
_INLINE_BYTES = 16_384  # a larger body is read and encoded in a thread

Body = TypeVar("Body", bound=BaseModel)
Call = TypeVar("Call", bound=Shaped)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass
class Api:
    """What the routes share. ``names`` are what the model is called, the first in answers."""

    config: ServerConfig
    serving: Serving
    names: Sequence[str]
    started: int

    @property
    def engine(self) -> EngineClient:
        return self.serving.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.serving.tokenizer

    # ---- answers

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        return await self._call(request, ChatRequest, chat_call)

    async def responses(self, request: Request) -> ASGIApp:
        """Answer a conversation, by OpenAI's newer interface."""
        return await self._call(request, ResponsesRequest, responses_call)

    async def completions(self, request: Request) -> ASGIApp:
        """Complete prompts."""
        return await self._call(request, CompletionRequest, completion_call)

    async def _call(
        self, request: Request, model: type[Call], prepare: Callable[[Serving, Call], ASGIApp]
    ) -> ASGIApp:
        raw = await self._read(request)
        self.engine.check_open()
        body = await _run(len(raw) > _INLINE_BYTES, self._parse, raw, model)
        slow = len(raw) > _INLINE_BYTES or body.shapes_the_answer
        return await _run(slow, prepare, self.serving, body)

    # ---- token ids

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt, or of a conversation."""
        raw = await self._read(request)

        def make() -> dict[str, Any]:
            body = self._parse(raw, TokenizeRequest)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequestError("give prompt or messages, one of them", "prompt")
            if body.prompt is not None:
                add = body.add_special_tokens is not False
                tokens = self.tokenizer.encode(body.prompt, add_special_tokens=add)
            else:
                tokens = chat_token_ids(self.tokenizer, body)
            answer: dict[str, Any] = {
                "count": len(tokens),
                "max_model_len": self.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
            if body.return_token_strs:
                answer["token_strs"] = [
                    self.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens
                ]
            return answer

        return _json(await _run(len(raw) > _INLINE_BYTES, make))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens shown."""
        raw = await self._read(request)

        def make() -> dict[str, Any]:
            body = self._parse(raw, DetokenizeRequest)
            limit = self.serving.vocab_size
            if wrong := [token for token in body.tokens if token >= limit]:
                raise InvalidRequestError(
                    f"tokens has the id {wrong[0]}, ids go from 0 to {limit - 1}", "tokens"
                )
            return {"prompt": self.tokenizer.decode(body.tokens, skip_special_tokens=False)}

        return _json(await _run(len(raw) > _INLINE_BYTES, make))

    # ---- the server itself

    async def models(self, request: Request) -> Response:
        """The model, under each of its names."""
        return _json({"object": "list", "data": [self._model(name) for name in self.names]})

    async def model(self, request: Request) -> Response:
        """One model by its name."""
        name = request.path_params["name"]
        self._check_model(name)
        return _json(self._model(name))

    async def health(self, request: Request) -> Response:
        """200 and nothing while calls are answered, else 503, which is no call that failed."""
        try:
            self.engine.check_open(0)
        except OverloadedError as error:
            return _refusal(error)
        return Response()

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return _json({"version": __version__})

    async def load(self, request: Request) -> Response:
        """How many answers run or wait."""
        return _json({"server_load": self.engine.metrics.load()})

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self.engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """This document."""
        return _json(openapi_document())

    # ---- what they share

    @property
    def max_model_len(self) -> int | None:
        """The longest that a request may become; None while the model is loading."""
        ready = self.engine.ready
        return None if ready is None else ready.max_total_tokens

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "octavo",
            "root": self.names[0],
            "parent": None,
            "max_model_len": self.max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"the model {name!r} is not served here, {' or '.join(self.names)} is"
            )

    def _parse(self, raw: bytes, model: type[Body]) -> Body:
        try:
            body = model.model_validate_json(raw)
        except ValidationError as error:
            raise from_validation(error) from None
        self._check_model(getattr(body, "model", None))
        return body

    async def _read(self, request: Request) -> bytes:
        """The body, within the limit; it must say that it is JSON, which a form of a foreign web
        page can't."""
        limit = self.config.max_body_bytes
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise InvalidRequestError(
                f"Content-Type is {kind!r}, the body must be sent as application/json"
            )
        body = bytearray()
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) <= limit:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        raise RequestTooLargeError(f"the body is larger than {limit} bytes (max_body_bytes)")


def make_app(api: Api) -> ASGIApp:
    """The application: the gate, the routes, and errors as JSON."""
    routes = _routes(api)
    app = Starlette(
        routes=routes,
        middleware=_middleware(api, [route.path for route in routes]),
        exception_handlers=_error_handlers(api),
    )
    app.router.redirect_slashes = False
    return _lingering(app)


def _routes(api: Api) -> list[Route]:
    return [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/version", api.version),
        Route("/load", api.load),
        Route("/metrics", api.metrics),
        Route("/openapi.json", api.openapi),
    ]


def _middleware(api: Api, paths: Sequence[str]) -> list[Middleware]:
    config = api.config
    gateway = Middleware(
        Gateway,
        keys=config.api_key,
        metrics=api.engine.metrics,
        paths=paths,
        tells_request_id=config.enable_request_id_headers,
    )
    if not config.allowed_origins:
        return [gateway]
    # In front of the gate: a browser asks without a key whether it may call.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
    )
    return [cors, gateway]


def _error_handlers(api: Api) -> dict[Any, Any]:
    metrics = api.engine.metrics

    async def octavo_error(request: Request, error: Exception) -> Response:
        metrics.failed(error)
        response = _refusal(error)
        if api.config.enable_log_requests:
            name = request_id(request.scope)
            called = "" if name is None else f" ({name})"
            path, status = request.url.path, response.status_code
            logger.info("%s%s refused with %d: %s", path, called, status, error)
        return response

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.failed(error)
        message = {
            404: f"there is no {request.url.path} here; /openapi.json lists what there is",
            405: f"{request.url.path} doesn't take {request.method}",
        }.get(error.status_code, error.detail)
        headers = dict(error.headers or {})
        return _json(http_error_body(error.status_code, message), error.status_code, headers)

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    return {
        OctavoError: octavo_error,
        HTTPException: http_error,
        ClientDisconnect: client_gone,
        Exception: octavo_error,
    }


def _lingering(app: ASGIApp) -> ASGIApp:
    """A client may still be sending when it is refused, and many read nothing before they have sent
    all: so the rest of a body is taken, for a while, and thrown away, before the response ends and
    with it, perhaps, the connection."""

    async def linger(scope: Scope, receive: Receive, send: Send) -> None:
        more = True  # of the body is to come

        async def take() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def tell(message: Message) -> None:
            if more and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LINGER_SECONDS):
                        while more:
                            await take()
                message = {"type": "http.response.body"}
            await send(message)

        scope[BODY_SEND] = send
        await app(scope, take, tell)

    return linger


async def _run(
    slow: bool, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Do it here, or in a thread where it may take milliseconds that streams would wait for."""
    if slow:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def _refusal(error: Exception) -> Response:
    status, body = error_body(error)
    headers = {413: {"Connection": "close"}, 503: {"Retry-After": "1"}}
    return _json(body, status, headers.get(status))


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, _JSON)
