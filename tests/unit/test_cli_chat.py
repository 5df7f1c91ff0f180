"""``octavo chat`` over a scripted model, its input a list of lines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from helpers.fake_llm import FakeLLM

from octavo.cli import main
from octavo.errors import ContextLengthError

Line = str | type[BaseException]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def talk(
    monkeypatch: pytest.MonkeyPatch,
    llm: FakeLLM,
    *lines: str | type[BaseException],
    flags: str = "",
) -> None:
    """Run the command with these lines typed; an exception class is raised in a line's place."""
    typed: Iterator[Line] = iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("octavo.cli.chat.load", lambda model, engine: llm)
    assert main(["chat", *flags.split()]) == 0


def test_history_is_kept_and_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    talk(monkeypatch, llm, "one", "", "two", "/reset", "three")
    assert llm.asked == [
        [user("one")],
        [user("one"), assistant("Hello."), user("two")],
        [user("three")],
    ]
    assert capsys.readouterr().out == "Hello.\n" * 3


def test_system_message_leads_survives_a_reset_and_can_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = FakeLLM()
    talk(monkeypatch, llm, "/system Be brief.", "a", "/reset", "b", "/system", "/reset", "c")
    assert [said[0] for said in llm.asked] == [system("Be brief.")] * 2 + [user("c")]
    assert len(llm.asked[1]) == 2


def test_sampling_is_the_checkpoints_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    talk(monkeypatch, llm, "a")
    talk(monkeypatch, llm, "a", flags="--temperature 0 --max-tokens 9")
    assert [(one.temperature, one.max_tokens) for one in llm.params] == [(0.6, None), (0.0, 9)]


def test_stats_quit_help_and_unknown_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    talk(monkeypatch, llm, "/stats", "/helpp", "hi", "/stats", "/help", "/quit", "unheard")
    assert llm.asked == [[user("hi")]]
    err = capsys.readouterr().err
    assert "no answer yet" in err
    assert "/helpp is no command" in err
    assert "3 generated · TTFT 0.250 s" in err
    assert "/system TEXT" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeLLM):
        def _stream(self):  # type: ignore[no-untyped-def]
            for i, output in enumerate(super()._stream()):
                if i == 1 and len(self.asked) == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                yield output

    llm, before = Interrupted(), signal.getsignal(signal.SIGINT)
    talk(monkeypatch, llm, "one", KeyboardInterrupt, "two")
    assert llm.aborted == 1
    assert llm.asked[1] == [user("one"), assistant("Hello"), user("two")]
    captured = capsys.readouterr()
    assert captured.out == "Hello\nHello.\n"
    assert "/quit" in captured.err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_that_cannot_be_answered_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(FakeLLM):
        def stream_chat(self, messages, params):  # type: ignore[no-untyped-def]
            self.error = ContextLengthError("9 is over 8") if len(self.asked) in (0, 2) else None
            return super().stream_chat(messages, params)

    llm = Full()
    talk(monkeypatch, llm, "too long", "short", "one more")
    assert llm.asked[1] == [user("short")]
    lines = capsys.readouterr().err.splitlines()
    assert "octavo: 9 is over 8" in lines  # there is nothing to forget yet
    assert "octavo: 9 is over 8; /reset forgets the conversation" in lines


def test_reset_and_system_say_that_they_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, FakeLLM(), "/system Be brief.", "/reset", "/system")
    said = capsys.readouterr().err
    for line in (
        "The system message is set.",
        "The conversation is forgotten.",
        "The system message is removed.",
    ):
        assert line in said


def test_a_model_without_chat_template_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.cli.chat.load", lambda model, engine: FakeLLM(chat_template=None))
    assert main(["chat"]) == 1
    assert "fake-1b has no chat template" in capsys.readouterr().err
