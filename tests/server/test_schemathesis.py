"""schemathesis against the served OpenAPI document: nobody here chose these bodies.

Bodies that keep to the schema may still be refused for what a schema can't say, but never with a
500; of those that violate it none may be accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from helpers.server import Server, serving
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/version", "/load", "/metrics")

bounded = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def own_server(book: Path) -> Iterator[Server]:
    with serving(book, "--tool-call-parser", "hermes", "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="module")
def document(own_server: Server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{own_server.url}/openapi.json")


def statuses(document: BaseSchema, method: str, path: str, mode: GenerationMode) -> set[int]:
    """The statuses of generated calls, after schemathesis's checks of each response."""
    seen = set()

    @bounded
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def call(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = meaningful(case.body)
        response = case.call()
        seen.add(response.status_code)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    call()
    return seen


def meaningful(value: Any) -> Any:
    """A body that says what the schema can't ask for: most would be refused without it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)  # to JSON Schema 1.0 is an integer
    if isinstance(value, list):
        return [meaningful(one) for one in value]
    if not isinstance(value, dict):
        return value
    value = {name: meaningful(one) for name, one in value.items() if name != "stream_options"}
    if "role" in value and value.get("content") is None:
        value["content"] = "x"
    if "arguments" in value:
        value["arguments"] = "{}"
    return value


@pytest.mark.parametrize("path", GETS)
def test_what_is_read(document: BaseSchema, path: str) -> None:
    expected = {404} if "{" in path else {200}
    assert statuses(document, "GET", path, GenerationMode.POSITIVE) == expected


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_keep_to_the_schema(document: BaseSchema, path: str) -> None:
    seen = statuses(document, "POST", path, GenerationMode.POSITIVE)
    assert 200 in seen
    assert seen <= {200, 400, 404}


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_violate_the_schema(document: BaseSchema, path: str) -> None:
    assert statuses(document, "POST", path, GenerationMode.NEGATIVE) == {400}


def test_nothing_is_left_behind(own_server: Server) -> None:
    assert own_server.call("GET", "/load").json == {"server_load": 0}
