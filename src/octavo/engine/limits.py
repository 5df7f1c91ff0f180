"""The sizes that the engine works within, and the requests that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.engine.request import Request
from octavo.errors import ConfigError, ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from octavo.engine.grammar import GrammarCompiler


@dataclass(frozen=True)
class EngineLimits:
    """The sizes that the engine works within; ``num_blocks`` is per KV group.

    Raises :class:`ConfigError` where they leave no room to work.
    """

    max_num_seqs: int  # rows of a step
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of a request, prompt and output
    block_size: int
    num_blocks: tuple[int, ...]
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    deterministic: bool = False  # engine/scheduler.py says how

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step must have room for one token of every row"
            )
        if not self.num_blocks or min(self.num_blocks) < 1:
            raise ConfigError(f"num_blocks is {self.num_blocks}, every KV group needs one at least")


def check_request(
    request: Request,
    limits: EngineLimits,
    *,
    vocab_size: int,
    max_total_tokens: int,
    grammars: Callable[[], GrammarCompiler | None],
) -> None:
    """Raise :class:`ContextLengthError` for a prompt that leaves no room for a token, and
    :class:`InvalidRequestError` for what can't be carried out. ``grammars`` is called if the
    request needs one."""
    params, prompt = request.params, request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("the prompt is empty: it has no tokens", "prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"the prompt has token id {wrong}, ids go from 0 to {vocab_size - 1}", "prompt"
        )
    params.check_vocabulary(vocab_size)
    if params.structured_outputs is not None:
        missing = None
        if grammars() is None:
            missing = "the tokenizer, which was skipped (skip_tokenizer_init)"
        elif not request.eos_token_ids:
            missing = "an end-of-sequence token, the checkpoint names none"
        if missing is not None:
            raise InvalidRequestError(f"structured_outputs need {missing}", "structured_outputs")
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise InvalidRequestError(
            "max_tokens 0 asks for nothing: set prompt_logprobs to score the prompt, or "
            "max_tokens to 1 or more",
            "max_tokens",
        )
    room = 0 if params.max_tokens == 0 else 1
    if len(prompt) + room > max_total_tokens:
        holder = (
            f"max_model_len is {max_total_tokens}"
            if max_total_tokens == limits.max_model_len
            else f"the KV cache holds {max_total_tokens} tokens"
        )
        need = f"the prompt has {len(prompt)} tokens"
        if room:
            need += f" and needs room for one more ({len(prompt) + room})"
        raise ContextLengthError(
            f"{need}, but {holder}; shorten the prompt or raise the limit", "prompt"
        )
