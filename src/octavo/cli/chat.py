"""``octavo chat``: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING

from octavo.cli.figures import figures_line
from octavo.cli.loading import load
from octavo.cli.options import EngineFlags, Model, SamplingFlags
from octavo.cli.streaming import print_as_it_comes
from octavo.config import EngineConfig
from octavo.errors import ContextLengthError, InvalidRequestError, OctavoError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

HELP = """\
/help          this list
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/stats         figures of the last answer
/quit          leave, as Ctrl-D does
Ctrl-C         stop the answer"""


@dataclass
class Conversation:
    """What has been said so far, and the figures of the last answer."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    stats: str = "no answer yet"

    def messages(self) -> list[dict[str, str]]:
        """All of it, as a chat template takes it."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return opening + self.turns


def chat(
    model: Model = None,
    /,
    *,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008 - frozen
    engine: EngineFlags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Talk with a model in the terminal.

    Tokens are sampled as the checkpoint's generation_config.json says, unless told otherwise.
    Ctrl-C stops an answer, Ctrl-D or /quit leaves, /help lists the commands.
    """
    sampling.params(SamplingParams())  # a value out of range is refused before the model loads
    llm = load(model, engine)
    params = sampling.params(replace(llm.get_default_sampling_params(), max_tokens=None))
    if llm.get_tokenizer().chat_template is None:
        raise InvalidRequestError(
            f"{llm.report.model} has no chat template, so it is no chat model; "
            "use octavo run, or give a template with --chat-template FILE"
        )
    print("Type a message. /help lists the commands.", file=sys.stderr)
    conversation = Conversation()
    for line in _lines():
        if line.startswith("/"):
            if not _obey(line, conversation):
                return
        elif line:
            _answer(line, conversation, llm, params)


def _lines() -> Iterator[str]:
    """What the user types, until the input ends. Ctrl-C drops the line being typed."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() its line editing and history
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit leaves.", file=sys.stderr)
        except EOFError:
            if interactive:
                print(file=sys.stderr)
            return


def _obey(line: str, conversation: Conversation) -> bool:
    """Carry out a slash command; False: leave."""
    command, _, argument = line.partition(" ")
    match command:
        case "/quit":
            return False
        case "/help":
            print(HELP, file=sys.stderr)
        case "/reset":
            conversation.turns.clear()
            print("The conversation is forgotten.", file=sys.stderr)
        case "/system":
            conversation.system = argument.strip()
            done = "set" if conversation.system else "removed"
            print(f"The system message is {done}.", file=sys.stderr)
        case "/stats":
            print(conversation.stats, file=sys.stderr)
        case _:
            print(f"{command} is no command; /help lists them", file=sys.stderr)
    return True


def _answer(line: str, conversation: Conversation, llm: LLM, params: SamplingParams) -> None:
    """Stream one answer. What was said stays said, a stopped answer as far as it came; a message
    that can't be answered is taken back."""
    conversation.turns.append({"role": "user", "content": line})
    try:
        with _interrupt_noted() as interrupted:
            outputs = llm.stream_chat(conversation.messages(), params)
            output = print_as_it_comes(outputs, stopped=interrupted)
    except OctavoError as error:
        conversation.turns.pop()
        too_long = isinstance(error, ContextLengthError) and conversation.turns
        way_out = "; /reset forgets the conversation" if too_long else ""
        print(f"octavo: {error}{way_out}", file=sys.stderr)
        return
    conversation.turns.append({"role": "assistant", "content": output.outputs[0].text})
    conversation.stats = figures_line(output, llm.report)


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising, so that no step of the engine is cut in half; a second
    Ctrl-C raises all the same."""
    noted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
