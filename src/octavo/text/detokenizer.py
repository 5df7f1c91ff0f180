"""Token ids to text, by bytes: every token is some bytes, and text is their UTF-8 decoding.

So a character whose bytes lie in several tokens appears once it is whole, and streamed text is the
same as text decoded at once. Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a
character (Unicode's recommended practice), which is where this differs from ``tokenizers``.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tokenizers

from octavo.errors import UnsupportedModelError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

SPACE_MARK = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, worked out when first asked for.

    An id that the tokenizer doesn't know has no bytes: a model's vocabulary is often padded beyond
    its tokenizer's. ``leading_spaces`` is how many spaces the decoder drops at the start of a
    text (SentencePiece puts one there when encoding). Raises :class:`UnsupportedModelError` for a
    decoder that is neither byte-level nor SentencePiece's.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._added = {id: str(token) for id, token in backend.get_added_tokens_decoder().items()}
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._byte_fallback = False
        self.leading_spaces = 0
        if not self._byte_level:
            self._read_sentencepiece_decoder(decoder)

    def _read_sentencepiece_decoder(self, decoder: dict[str, Any] | None) -> None:
        parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        for part in parts:
            match part:
                case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                    pass
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    self.leading_spaces = start
                case _:
                    raise UnsupportedModelError(
                        f"the tokenizer's decoder {json.dumps(part, ensure_ascii=False)} is not "
                        "supported; ByteLevel and SentencePiece's (Replace, ByteFallback, Fuse, "
                        "Strip) are"
                    )

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""  # not kept: there is no end of unknown ids
        self[token_id] = data = self._bytes_of(token_id, token)
        return data

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        if self._byte_level:
            if token_id not in self._added and all(char in _BYTE_OF for char in token):
                return bytes(_BYTE_OF[char] for char in token)
            return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


class Detokenizer:
    """Turns one answer's token ids into text as they come.

    An answer continues its prompt, so a leading space of its first token is kept; ``whole_text``
    says that the ids are a text of their own, whose leading space SentencePiece's decoder drops.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, whole_text: bool = False
    ) -> None:
        self._bytes_of = tokenizer.bytes_table(skip_special_tokens).__getitem__
        self._leading_spaces = tokenizer.bytes_table(False).leading_spaces if whole_text else 0
        self._pending = b""  # of a character that isn't whole yet

    def feed(self, token_ids: Sequence[int]) -> str:
        """The characters that these ids complete: possibly none, never half of one."""
        data = b"".join(map(self._bytes_of, token_ids))
        while self._leading_spaces and data:
            if not data.startswith(b" "):
                self._leading_spaces = 0
                break
            self._leading_spaces -= 1
            data = data[1:]
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """The ids end here: the pending bytes of a character, if any, as U+FFFD."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes as characters, inverted: printable Latin-1 stands for itself, the
    other 68 bytes are spelled U+0100, U+0101, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
