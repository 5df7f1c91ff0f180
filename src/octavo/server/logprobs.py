"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.outputs import TokenLogprobs
from octavo.text import Detokenizer, Tokenizer


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int
) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice: token, its bytes, and the ``top`` likeliest."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(data),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
        content.append(
            named(token_id, entry[token_id].logprob)
            | {"top_logprobs": [named(other, one.logprob) for other, one in likeliest]}
        )
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The ``logprobs`` of a completion's choice, as its tokens come.

    ``text_offset`` is where in the text a token's characters begin: a token that isn't shown has no
    width. A token that is no whole character is spelled ``bytes:\\xNN``.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def take(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """The next tokens; an entry is None for the first token of a prompt."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed([token_id]))
        return {
            "tokens": [self._spelled(token_id) for token_id in token_ids],
            "token_logprobs": [
                None if entry is None else entry[token_id].logprob
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            "top_logprobs": [
                None
                if entry is None
                else {self._spelled(other): one.logprob for other, one in entry.items()}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _spelled(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
