"""``octavo bench serve`` over real sockets: a stub whose times are known, and octavo's server."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.server import Server
from helpers.stub_openai import DONE, Stub, Timed, case_39, event, stub_server, usage

from octavo.cli import main

LATE_MS = 60  # what a busy machine may add


def completion(tokens: int, step_ms: float = 1.0) -> Timed:
    script = [(step_ms * i, event([{"index": 0, "text": "x"}])) for i in range(tokens)]
    return [*script, (step_ms * tokens, usage(7, tokens)), (step_ms * tokens, DONE)]


def bench(stub: Stub, *flags: str) -> int:
    few = () if "--num-prompts" in flags else ("--num-prompts", "4")
    return main(["bench", "serve", "--base-url", stub.url, "--input-len", "4", *few, *flags])


def saved(folder: Path) -> dict[str, Any]:
    [path] = folder.iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def figure(out: str, label: str) -> float:
    [line] = [line for line in out.splitlines() if line.startswith(label)]
    return float(line.removeprefix(label))


@pytest.mark.alone
@pytest.mark.parametrize("variant", [{}, {"texts": ["    "] * 7 + ["   "]}, {"empty_at": 50.0}])
def test_o39(variant: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda body: case_39(**variant)) as stub:
        assert bench(stub, "--backend", "openai-chat") == 0
    out = capsys.readouterr().out
    assert figure(out, "Total generated tokens:") == 4 * 32
    assert figure(out, "Total input tokens:") == 4 * 10
    assert 100 <= figure(out, "Median TTFT (ms):") < 100 + LATE_MS
    assert figure(out, "Median TPOT (ms):") == pytest.approx(280 / 31, abs=LATE_MS / 31)
    assert figure(out, "Median ITL (ms):") == pytest.approx(10, abs=5)
    peak = figure(out, "Peak output token throughput (tok/s):")
    assert peak >= figure(out, "Output token throughput (tok/s):")


def test_a_server_that_tells_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    # llama-cpp-python's: the first answer ends the run, not the last.
    with stub_server(lambda body: [*completion(2)[:2], (3.0, DONE)]) as stub:
        assert bench(stub, "--num-prompts", "50", "--max-concurrency", "1") == 1
        assert len(stub.calls) < 4
    assert "no usage; count tokens with --tokenizer" in capsys.readouterr().err


def test_failures_are_counted_and_measured_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A connection that is cut when it was kept from before is tried again, once.
    scripts: list[Timed | int | None] = [completion(5), 503, None, None, completion(5)[:3]]
    with stub_server(lambda body: scripts.pop()) as stub:
        save = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path))
        assert bench(stub, "--max-concurrency", "1", *save) == 0
    captured = capsys.readouterr()
    assert figure(captured.out, "Successful requests:") == 1
    assert figure(captured.out, "Failed requests:") == 3
    assert figure(captured.out, "Total generated tokens:") == 5
    for why in ("HTTP 503 from /v1/completions: no room", "broke off", "closed the connection"):
        assert why in captured.err
    found = saved(tmp_path)
    assert sorted(found["output_lens"]) == [0, 0, 0, 5]
    assert sum(1 for gaps in found["itls"] if gaps) == 1
    assert sum(1 for error in found["errors"] if error) == 3


def test_all_failing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda body: 400) as stub:
        assert bench(stub) == 1
    assert "every request failed" in capsys.readouterr().err


def test_concurrency_warm_ups_and_connections(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda body: completion(3, 5.0)) as stub:
        flags = ("--num-prompts", "9", "--max-concurrency", "3", "--num-warmups", "2")
        assert bench(stub, *flags, "--ready-check-timeout-sec", "5") == 0
    assert stub.most_open == 3
    assert stub.num_connections == 3  # kept from request to request
    posts = [call for call in stub.calls if call.method == "POST"]
    assert len(posts) == 1 + 2 + 9
    assert posts[0].body["max_tokens"] == 1
    assert len({call.body["prompt"] for call in posts}) == 12  # nothing measured was sent before
    assert figure(capsys.readouterr().out, "Successful requests:") == 9


def test_a_server_that_keeps_no_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda body: completion(3), keep_alive=False) as stub:
        assert bench(stub, "--max-concurrency", "1") == 0
    assert figure(capsys.readouterr().out, "Successful requests:") == 4


def test_rate_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda body: completion(2)) as stub:
        rate = ("--request-rate", "40", "--num-prompts", "12", "--burstiness", "0.5")
        file = ("--result-dir", str(tmp_path / "new"), "--metadata", "version=1.2", "tp=1")
        assert bench(stub, *rate, "--goodput", "ttft:5000", "e2el:1", "--save-result", *file) == 0
    out = capsys.readouterr().out
    assert figure(out, "Request rate configured (RPS):") == 40
    assert figure(out, "Benchmark duration (s):") >= 0.3
    [path] = (tmp_path / "new").iterdir()
    assert path.name.startswith("openai-40.0qps-stub-1b-")
    found = saved(tmp_path / "new")
    assert (found["version"], found["tp"], found["model_id"]) == ("1.2", "1", "stub-1b")
    assert (found["request_rate"], found["burstiness"]) == (40.0, 0.5)
    assert found["completed"] == 12
    assert found["request_goodput"] <= found["request_throughput"]
    assert "ttfts" not in found  # that's detail


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    with stub_server(lambda body: completion(1)) as stub:
        assert bench(stub, "--num-prompts", "1", "--model", "org/m", "--top-p", "0.5") == 0
        path = ("--endpoint", "/openai/completions", "--no-ignore-eos")
        assert bench(stub, "--num-prompts", "1", "--api-key", "sk-2", *path) == 0
    first, lookup, second = stub.calls
    assert first.headers["authorization"] == "Bearer sk-1"
    assert first.headers["host"] == f"127.0.0.1:{stub.port}"
    assert (first.body["model"], first.body["top_p"], first.body["ignore_eos"]) == (
        "org/m",
        0.5,
        True,
    )
    assert "temperature" not in first.body
    assert (lookup.path, lookup.headers["authorization"]) == ("/v1/models", "Bearer sk-2")
    assert second.path == "/openai/completions"
    assert "ignore_eos" not in second.body


def test_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    ask = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=x -addext"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*ask.split(), "subjectAltName=IP:127.0.0.1", *files], check=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with stub_server(lambda body: completion(3), tls=context) as stub:
        assert bench(stub) == 1
        assert "certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert bench(stub) == 0
    assert figure(capsys.readouterr().out, "Successful requests:") == 4


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1", "--num-prompts", "1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "why"), [(401, "HTTP 401: no room"), (200, "names no model (HTTP 200")]
)
def test_a_server_that_names_no_model(
    status: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server(lambda body: completion(1), models=status) as stub:
        assert bench(stub) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_octavos_own_server(
    server: Server, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    length = ("--input-len", "6", "--output-len", "8", "--num-prompts", "12")
    limits = ("--max-concurrency", "4", "--temperature", "0", "--goodput", "ttft:60000")
    flags = ("--backend", backend, *length, *limits)
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == 0
    out = capsys.readouterr().out
    assert figure(out, "Successful requests:") == 12
    assert figure(out, "Total generated tokens:") == 12 * 8
    assert figure(out, "Request goodput (req/s):") == figure(out, "Request throughput (req/s):")
    assert server.is_idle()
