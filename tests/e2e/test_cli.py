"""The installed command with the real default model, each call a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OCTAVO = str(Path(sys.executable).parent / "octavo")
FRANCE = ("--prompt", "The capital of France is", "--max-tokens", "12")

# Loaded by every Python below that starts with it on its path: whatever looks up a name or connects
# over the internet is written down and refused.
NO_NETWORK = """
import os, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            print(event, arguments[1:], file=log)
        raise OSError("no network in this test")

sys.addaudithook(refuse)
"""


def octavo(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([OCTAVO, *arguments], input=stdin, capture_output=True, text=True)


@pytest.fixture(scope="module")
def answer() -> tuple[dict[str, object], str]:
    """The JSON and the stderr of one short completion."""
    result = octavo("run", "--json", *FRANCE)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_json_says_what_was_asked_answered_and_chosen(
    answer: tuple[dict[str, object], str],
) -> None:
    found, _ = answer
    assert set(found) == {
        "model",
        "attention_backend",
        "runtime",
        "prompt_token_ids",
        "token_ids",
        "text",
        "finish_reason",
        "ttft_s",
        "tpot_s",
        "tokens_per_s",
    }
    assert "SmolLM2-135M" in str(found["model"])
    assert str(found["text"]).startswith(" Paris")
    assert isinstance(found["token_ids"], list)
    assert len(found["token_ids"]) == 12
    assert found["finish_reason"] == "length"
    assert isinstance(found["ttft_s"], float)
    assert found["ttft_s"] > 0


def test_streamed_text_is_the_same_and_the_figures_are_one_line(
    answer: tuple[dict[str, object], str],
) -> None:
    found, _ = answer
    result = octavo("run", *FRANCE)
    assert result.stdout == f"{found['text']}\n"
    line = result.stderr.splitlines()[-1]
    for part in ("prompt tokens", "12 generated", "TTFT", "tok/s", "attention", "runtime"):
        assert part in line


def test_stop_string_from_the_command_line(answer: tuple[dict[str, object], str]) -> None:
    result = octavo("run", *FRANCE, "--stop", "aris")
    assert result.stdout == " P\n"


def test_chat_keeps_the_conversation() -> None:
    lines = "My name is Ada.\n/stats\nWhat is my name?\n/stats\n/quit\n"
    result = octavo("chat", "--temperature", "0", "--max-tokens", "8", stdin=lines)
    assert result.returncode == 0, result.stderr
    first, second = re.findall(r"(\d+) prompt tokens", result.stderr)
    assert int(second) > int(first) + 8
    assert " cached)" in result.stderr


def test_a_missing_model_is_one_sentence() -> None:
    result = octavo("run", "no/such/folder/anywhere", "--prompt", "x")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "no/such/folder/anywhere" in result.stderr


def test_backends_reads_no_weights_and_names_who_is_chosen() -> None:
    script = (
        "import sys; from octavo.cli import main; main(['backends', '--json'])\n"
        "print('torch' in sys.modules)"
    )
    lines = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = json.loads(lines[-2])
    assert lines[-1] == "False"
    states = {(one["phase"], one["state"]) for one in found["candidates"]}
    assert {("prefill", "chosen"), ("decode", "chosen")} <= states
    assert all(one["reason"] for one in found["candidates"])


def first_token_seconds(command: list[str], environment: dict[str, str]) -> float:
    """Seconds until the command's answer begins on stdout; it has to end well."""
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        waited = time.monotonic() - started
        _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert first
    return waited


@pytest.mark.alone
def test_a_second_make_run_needs_no_network_and_answers_within_4_seconds(tmp_path: Path) -> None:
    """Where the kernel lets us, in a network namespace with nothing in it (this stops Rust and C
    too); everywhere with an audit hook in each Python, which sees attempts that are swallowed."""
    if subprocess.run(["make", "--question", ".venv/.stamp-run"], cwd=ROOT).returncode != 0:
        pytest.skip("this environment was not set up by make")
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    log = tmp_path / "network.log"
    namespace = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"]).returncode != 0:
        namespace = []
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NETWORK_LOG": str(log)}
    # Three tries, as others may use the machine: one quiet moment shows what the command needs.
    waits: list[float] = []
    while len(waits) < 3 and min(waits, default=4) >= 4:
        waits.append(first_token_seconds([*namespace, "make", "run"], environment))
    assert not log.exists(), log.read_text()
    assert min(waits) < 4
