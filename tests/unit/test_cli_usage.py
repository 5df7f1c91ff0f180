"""The command's frame: help, version, exit codes, and what stays unimported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli import main
from octavo.errors import ModelNotFoundError


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("run", "chat", "backends", "verify", "bench", "--version"):
        assert word in text


@pytest.mark.parametrize("command", ["run", "chat", "backends", "verify"])
def test_help_of_a_command_describes_every_flag(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if line.startswith("│ --")]
    assert len(flags) >= 5
    for i, line in enumerate(lines):
        if line.startswith("│ --") and "--help" not in line:
            # A description stands beside the flag, or on the next line where the flag is long.
            assert len(line.split()) > 3 or len(lines[i + 1].split()) > 3, line


def test_run_has_the_flags_that_vllm_users_know(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    text = capsys.readouterr().out
    for flag in (
        "--prompt",
        "--chat",
        "--max-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
        "--min-p",
        "--seed",
        "--stop",
        "--ignore-eos",
        "--exact",
        "--json",
        "--dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--block-size",
        "--no-enable-prefix-caching",
        "--attention-backend",
        "--disable-attention-backend",
        "--split-kv",
        "--split-kv-tokens",
        "--load-format",
        "--device",
        "--enforce-eager",
        "--no-async-scheduling",
        "--revision",
        "--generation-config",
    ):
        assert flag in text
    assert text.count("--seed ") == 1  # the request's, not the engine's


def test_defaults_are_shown_as_they_are_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in (["serve"], ["run"], ["verify"], ["bench", "attention"]):
        assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "[default: 512 2048 8192 32768]" in text
    assert "[default: 16/8x128]" in text
    assert "[default: *]" in text
    assert "[default: False]" in text
    for unwanted in ("[default: ()]", "[default: (", "[default: None]", "[default: ]"):
        assert unwanted not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "--prompt", "x", "--no-such-flag"], "--no-such-flag"),
        (["run", "--prompt", "x", "--max-tok", "3"], "--max-tok"),  # no abbreviations
        (["run", "--prompt", "x", "--max-tokens", "many"], "--max-tokens"),
        (["run", "--prompt", "x", "--device", "tpu"], "tpu"),
        (["run"], "--prompt"),
        (["run", "one", "two", "--prompt", "x"], "two"),
        (["walk"], "walk"),
    ],
)
def test_wrong_usage_is_named_and_exits_with_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelNotFoundError("no model nowhere"), 1, "octavo: no model nowhere\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_of_the_user_are_one_sentence(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("octavo.cli.run.load", fail)
    assert main(["run", "nowhere", "--prompt", "x"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-k", "-2"], "top_k is -2"),
        (["--exact", "--dtype", "float16"], "dtype is float16"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_loads(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--prompt", "x", *flags]) == 1
    assert named in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_error() -> None:
    script = (
        "import sys; from helpers.fake_llm import FakeLLM; import octavo.cli.run as run\n"
        "run.load = lambda *_: FakeLLM()\n"
        "from octavo.cli import main; sys.exit(main(['run', '--prompt', 'x']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.read() == b""
    assert child.wait() == 128 + signal.SIGPIPE


CALL = "import sys; from octavo.cli import main; sys.exit(main(sys.argv[1:]))"
ANSWER = """
import sys
from unittest.mock import patch
from helpers.fake_llm import FakeLLM
from octavo.cli import main
llm = FakeLLM()
llm.pieces = ("K\u00f6che \u2713",)
with patch("octavo.cli.run.load", lambda model, engine: llm):
    sys.exit(main(["run", "--prompt", "-"]))
"""


def _answer(redirect: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """A scripted answer of the command, its standard streams as the shell says."""
    return subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "$0" {redirect}', ANSWER],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_stdout_can_t_spell_is_a_question_mark() -> None:
    done = _answer("</dev/null", encoding="ascii:strict")
    assert (done.returncode, done.stdout) == (0, "K?che ?\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_sentence() -> None:
    done = _answer("</dev/null >/dev/full")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "octavo: the output can't be written: No space left on device\n"


@pytest.mark.parametrize("redirect", ["<&-", "<&- >&-"])
def test_streams_that_the_caller_closed(redirect: str) -> None:
    done = _answer(redirect)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_the_command_is_imported() -> None:
    interrupt = "import sys; sys.modules['cyclopts'] = type('M', (), {'__getattr__': stop})()"
    stop = "def stop(*_): raise KeyboardInterrupt"
    done = subprocess.run(
        [sys.executable, "-c", f"{stop}\n{interrupt}\n{CALL}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "\n")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from octavo.cli import main; main(['run', '--help'])\n"
        "print(sorted({'torch', 'numba', 'jinja2', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
