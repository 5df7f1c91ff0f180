"""What the server's processes tell each other: msgpack, over a ZeroMQ socket between the API
processes and the engine, and over the standard input of those that the first one has started.

One message a step carries to an API process what it brought all its requests. Ids only: text stays
on the API side.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.delivery import RequestUpdate
from octavo.engine.loop import EngineStats
from octavo.engine.request import Request
from octavo.sampling_params import SamplingParams

# ---- to the engine


class StartEngine(msgspec.Struct):
    """The first thing the engine process reads, on its standard input. It is ready once
    ``num_peers`` API processes have said so; ``max_answers`` is as in :func:`check_room`."""

    config: EngineConfig
    address: str  # of the ZeroMQ socket that it binds
    num_peers: int
    max_answers: int | None


class Hello(msgspec.Struct, tag=True, array_like=True):
    """An API process is there and takes calls as soon as the engine is ready."""


class NewRequest(msgspec.Struct, array_like=True):
    """One answer to make; ``priority`` and the rest as in :class:`Request`. The seed is that of
    ``params``; where they have none the engine draws it, one order for all API processes."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    choice: int
    priority: int
    cache_salt: str | None

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        return cls(**{name: getattr(request, name) for name in cls.__struct_fields__})

    def request(self, seed: int) -> Request:
        """The engine's own; it arrives now, on the engine's clock."""
        return Request(**{name: getattr(self, name) for name in self.__struct_fields__}, seed=seed)


class Add(msgspec.Struct, tag=True, array_like=True):
    """Queue the requests of one call."""

    requests: list[NewRequest]


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Drop these requests."""

    request_ids: list[str]


class Finish(msgspec.Struct, tag=True, array_like=True):
    """End these requests: a stop string or forbidden content was found."""

    request_ids: list[str]


ToEngine = Hello | Add | Abort | Finish

# ---- from the engine


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded. ``max_total_tokens`` is the longest a request may become."""

    max_total_tokens: int
    block_size: int
    num_blocks: int
    runtime: str
    attention_backend: str
    precision: str
    load_phases: dict[str, float]  # seconds, in order
    notes: list[str]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The model can't be loaded, for a reason that is the user's to mend."""

    message: str


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The engine didn't take a call; ``request_id`` is the first of its requests."""

    request_id: str
    message: str
    status: int
    param: str | None
    code: str | None


class Step(msgspec.Struct, tag=True, array_like=True):
    """What a step brought; no updates where only the figures have changed."""

    updates: list[RequestUpdate]
    stats: EngineStats


FromEngine = Ready | Failed | Refused | Step

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


decode_start_engine = msgspec.msgpack.Decoder(StartEngine).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
