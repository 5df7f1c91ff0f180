"""The OpenAPI document, made from the models that requests are read with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema

from octavo import __version__
from octavo.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.server.responses import ResponsesRequest

_REF = "#/components/schemas/{model}"
_POSTS = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation.", True),
    "/v1/responses": (ResponsesRequest, "Answer a conversation.", True),
    "/v1/completions": (CompletionRequest, "Complete prompts.", True),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or a conversation.", False),
    "/detokenize": (DetokenizeRequest, "The text of token ids.", False),
}
_GETS = {
    "/v1/models": "The model, under each of its names.",
    "/v1/models/{name}": "One model by its name.",
    "/health": "200 while calls are answered.",
    "/version": "The server's version.",
    "/load": "How many answers run or wait.",
    "/metrics": "Prometheus metrics.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1 of all routes."""
    models = [(model, "validation") for model, _, _ in _POSTS.values()]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (model, summary, streams) in _POSTS.items():
        schema = {"$ref": _REF.format(model=model.__name__)}
        answer: dict[str, Any] = {"application/json": {}}
        if streams:
            answer["text/event-stream"] = {}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": _responses({"description": "The answer.", "content": answer}),
            }
        }
    for path, summary in _GETS.items():
        get: dict[str, Any] = {
            "summary": summary,
            "responses": _responses({"description": summary}),
        }
        if "{name}" in path:
            get["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths[path] = {"get": get}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**definitions["$defs"], "Error": _ERROR}},
    }


def _responses(answer: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {"200": answer, "default": {"description": "An error.", "content": error}}
