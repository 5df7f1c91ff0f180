"""Reported fault O37: keys, preflights, probes; and TLS."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.server import Server, serving

KEY, OTHER_KEY = "sk-first-secret", "sk-second-secret"
ROUTES = [
    *(("GET", path) for path in ("/v1/models", "/metrics", "/load", "/version", "/openapi.json")),
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")),
    *(("POST", path) for path in ("/detokenize", "/nowhere", "//v1/completions", "/V1/models")),
]


@pytest.fixture(scope="module")
def locked(book: Path) -> Iterator[Server]:
    flags = ("--api-key", KEY, "--allowed-origins", "https://a.example", "--enable-log-requests")
    env = {"OCTAVO_API_KEY": OTHER_KEY}
    with serving(book, *flags, env=env) as server:
        yield server
    assert KEY not in server.log
    assert OTHER_KEY not in server.log
    assert "an API key is asked for" in server.log


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_key(locked: Server, method: str, path: str) -> None:
    wrong = [None, "Bearer", "Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"]
    for value in wrong:
        headers = {} if value is None else {"Authorization": value}
        reply = locked.call(method, path, b"{}" if method == "POST" else None, headers=headers)
        assert reply.status == 401
        assert reply.error["code"] == "invalid_api_key"
    assert locked.call(method, f"{path}?api_key={KEY}").status == 401


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "Bearer  {}"])
def test_each_key_opens(locked: Server, key: str, form: str) -> None:
    headers = {"Authorization": form.format(key)}
    assert locked.call("GET", "/v1/models", headers=headers).status == 200
    reply = locked.call("POST", "/v1/completions", {"prompt": "a"}, headers=headers)
    assert reply.status == 200
    assert locked.call("GET", "/nowhere", headers=headers).status == 404


@pytest.mark.parametrize("keeps", ["keep-alive", "close"])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {}, 401),
        ("/v1/completions", {"Authorization": f"Bearer {KEY}"}, 413),
        ("/v1/completions", {"Authorization": f"Bearer {KEY}", "Content-Type": "text/plain"}, 400),
        ("/nowhere", {"Authorization": f"Bearer {KEY}"}, 404),
        ("/health", {}, 405),
    ],
)
def test_a_refusal_arrives_though_the_body_is_large(
    locked: Server, path: str, headers: dict[str, str], status: int, keeps: str
) -> None:
    """Python's own client reads nothing before it has sent all."""
    connection, body = locked.connect(), b'"' + b"x" * 20_000_000
    headers = {**headers, "Connection": keeps}
    reply = locked.call("POST", path, body, headers=headers, connection=connection)
    assert reply.status == status
    assert reply.error["message"]
    if keeps == "keep-alive":
        assert locked.call("GET", "/health", connection=connection).status == 200
    connection.close()


def test_health_is_open(locked: Server) -> None:
    for method in ("GET", "HEAD"):
        reply = locked.call(method, "/health")
        assert (reply.status, reply.body) == (200, b"")


def test_a_preflight_needs_no_key(locked: Server) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization, content-type"
    reply = locked.call("OPTIONS", "/v1/chat/completions", headers=headers)
    assert reply.status == 200
    lower = {name.lower(): value for name, value in reply.headers.items()}
    assert lower["access-control-allow-origin"] == "https://a.example"
    foreign = locked.call("OPTIONS", "/v1/models", headers={**headers, "Origin": "https://b.test"})
    assert "access-control-allow-origin" not in {name.lower() for name in foreign.headers}


def test_one_connection_for_several_calls(server: Server) -> None:
    connection = server.connect()
    for body, status in (({"prompt": "a"}, 200), ({"prompt": 5}, 400), ({"prompt": "a"}, 200)):
        reply = server.call("POST", "/v1/completions", body, connection=connection)
        assert reply.status == status
    connection.close()


def test_an_open_server_says_so(server: Server) -> None:
    assert "open to this machine only, no API key is asked for" in server.log
    plain = server.call("OPTIONS", "/v1/models", headers={"Origin": "https://a.example"})
    assert plain.status == 405


def test_tls(book: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-keyout",
            key,
            "-out",
            certificate,
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    with serving(book, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context)
        body = json.dumps({"prompt": "a", "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["text"] == "bcdefgh"
        connection.close()
