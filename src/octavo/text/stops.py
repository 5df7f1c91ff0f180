"""Stop strings in streamed text: found across pieces, and nothing shown that may be taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopChecker:
    """Watches one answer for its stop strings.

    The stop string that completes first wins; of several that complete at the same character, the
    one that starts first. So the result doesn't depend on how the text is cut into pieces. Text
    that may yet turn out to be the beginning of a stop string is withheld.

    The strings are searched for all at once with the automaton of Aho and Corasick (1975); the
    cost is proportional to the new text, however many stop strings there are.
    """

    def __init__(
        self, stop_strings: Sequence[str], include_stop_str_in_output: bool = False
    ) -> None:
        self.matched: str | None = None  # the stop string that ended the text
        self._include = include_stop_str_in_output
        self._automaton = _build_automaton(stop_strings)
        self._state = 0
        self._withheld = ""

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Take the next piece of text, return what is safe to show: ``""`` once a stop matched.

        Without ``may_match`` a stop string that completes in this piece is text like any other.
        """
        if self.matched is not None:
            return ""
        if len(self._automaton) == 1:  # no stop strings
            return text
        state = self._state
        for position, character in enumerate(text, 1):
            while character not in self._automaton[state].next and state:
                state = self._automaton[state].fallback
            state = self._automaton[state].next.get(character, 0)
            if may_match and (stop := self._automaton[state].match) is not None:
                self.matched = stop
                seen = self._withheld + text[:position]
                self._withheld = ""
                return seen if self._include else seen[: len(seen) - len(stop)]
        self._state = state
        seen = self._withheld + text
        safe = len(seen) - self._automaton[state].depth
        self._withheld = seen[safe:]
        return seen[:safe]

    def finish(self) -> str:
        """The text ends here: what was withheld turned out to be no stop string."""
        rest, self._withheld = self._withheld, ""
        return rest


class _State:
    """The longest end of the text so far that begins a stop string; ``depth`` is its length."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, int] = {}
        self.fallback = 0  # the state of the next shorter such end
        self.match: str | None = None  # the longest stop string that is complete here


def _build_automaton(stop_strings: Sequence[str]) -> list[_State]:
    states = [_State(0)]
    for stop in stop_strings:
        state = 0
        for character in stop:
            if character not in states[state].next:
                states[state].next[character] = len(states)
                states.append(_State(states[state].depth + 1))
            state = states[state].next[character]
        states[state].match = stop
    queue = deque(states[0].next.values())  # states of depth 1 fall back to the root
    while queue:
        state = queue.popleft()
        for character, child in states[state].next.items():
            fallback = states[state].fallback
            while character not in states[fallback].next and fallback:
                fallback = states[fallback].fallback
            states[child].fallback = states[fallback].next.get(character, 0)
            if states[child].match is None:
                states[child].match = states[states[child].fallback].match
            queue.append(child)
    return states
