"""A tokenizer: ``tokenizers`` does the work, the checkpoint's special tokens are kept beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.text.detokenizer import Detokenizer, TokenBytes
from octavo.text.special_texts import SpecialTexts, check_unicode


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back, safe to use from several threads.

    ``eos_ids`` are all ids that end an answer, from every place a checkpoint names one.
    ``special_tokens`` are the texts that templates know by name (``bos_token``, ``eos_token``,
    ...); ``chat_templates`` the templates by name, ``"default"`` the usual one.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str | list[str]] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id; the model's own vocabulary may be padded beyond."""
        added = self.backend.get_added_tokens_decoder()
        return max([self.backend.get_vocab_size(), *(token_id + 1 for token_id in added)])

    @cached_property
    def adds_bos(self) -> bool:
        """Whether a raw prompt gets BOS in front."""
        return self.bos_id is not None and self.backend.encode("").ids[:1] == [self.bos_id]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens: they are hidden in output and never made from messages."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_texts(self) -> SpecialTexts:
        """The texts that are special tokens in a prompt and must stay text in a message."""
        added = self.backend.get_added_tokens_decoder()
        texts = frozenset(str(added[token_id]) for token_id in self.special_ids)
        return SpecialTexts(texts - {""})

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a raw prompt.

        ``add_special_tokens`` adds what the tokenizer adds to a text by itself, mostly BOS. A text
        that already begins with BOS gets no second one. ``parse_special`` turns the text of a
        special token into that token, as llama.cpp and vLLM do. Raises
        :class:`InvalidRequestError` for a string that is no Unicode text (a lone surrogate).
        """
        backend = self.backend if parse_special else self._plain
        ids = _encode(backend, text, add_special_tokens)
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_id]:
            del ids[0]
        return ids

    def encode_with_literals(self, text: str, literals: Sequence[int]) -> list[int]:
        """Token ids of ``text``, adding nothing, where some special tokens' texts stay text.

        ``literals`` are the indices at which such texts begin. Elsewhere special tokens are
        parsed, and what lies between them is encoded just as the library encodes ordinary text:
        added tokens that are not special (``<think>``) are vocabulary like any other.
        """
        if not literals:
            return _encode(self.backend, text, add_special_tokens=False)
        check_unicode(text, "the prompt")
        broken = list(text)
        for index in literals:
            broken[index] = self._stand_in
        # The library itself says where the special tokens lie, with the white space they swallow.
        encoding = self.backend.encode("".join(broken), add_special_tokens=False)
        ids: list[int] = []
        start = 0
        for token_id, (left, right) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.special_ids:
                ids += self._encode_plain(text, start, left)
                ids.append(token_id)
                start = right
        return ids + self._encode_plain(text, start, len(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids that are a text of their own; ids beyond the vocabulary have none."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens, whole_text=True)
        return detokenizer.feed(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters."""
        return self.bytes_table(skip_special_tokens=False)[token_id]

    def bytes_table(self, skip_special_tokens: bool) -> TokenBytes:
        """Bytes by token id; with ``skip_special_tokens`` those of special tokens are empty."""
        return self._shown_bytes if skip_special_tokens else self._all_bytes

    @cached_property
    def _all_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    @cached_property
    def _shown_bytes(self) -> TokenBytes:
        table = TokenBytes(self.backend)
        table.update(dict.fromkeys(self.special_ids, b""))
        return table

    @cached_property
    def _stand_in(self) -> str:
        texts = "".join(str(token) for token in self.backend.get_added_tokens_decoder().values())
        return next(char for char in map(chr, range(0xE000, 0xF900)) if char not in texts)

    def _encode_plain(self, text: str, start: int, stop: int) -> list[int]:
        if start == stop:
            return []
        backend = self._plain if start == 0 else self._plain_inside
        return _encode(backend, text[start:stop], add_special_tokens=False)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return _plain_twin(self.backend, self.backend.pre_tokenizer)

    @cached_property
    def _plain_inside(self) -> tokenizers.Tokenizer:
        """For a piece that doesn't begin its text: some tokenizers put a space before the first
        word of a text only."""
        pre_tokenizer = copy.deepcopy(self.backend.pre_tokenizer)
        first, never = b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'
        if pre_tokenizer is None or first not in pre_tokenizer.__getstate__():
            return self._plain
        pre_tokenizer.__setstate__(pre_tokenizer.__getstate__().replace(first, never))
        return _plain_twin(self.backend, pre_tokenizer)


def _plain_twin(
    backend: tokenizers.Tokenizer, pre_tokenizer: PreTokenizer | None
) -> tokenizers.Tokenizer:
    """The same tokenizer, to which special tokens are ordinary text. The model is shared."""
    twin = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if pre_tokenizer is not None:
        twin.pre_tokenizer = pre_tokenizer
    if backend.post_processor is not None:
        twin.post_processor = backend.post_processor
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[token_id] for token_id in sorted(added)])
    twin.encode_special_tokens = True
    return twin


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    check_unicode(text, "the prompt")
    return backend.encode(text, add_special_tokens=add_special_tokens).ids
