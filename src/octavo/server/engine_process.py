"""The engine's process: loads the model, then steps for as long as there is work.

API processes are its peers, each with the identity under which it said hello; what a step brings a
request goes to the peer that asked for it, and the figures go to all.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import random
from collections import defaultdict
from typing import NoReturn

import zmq

from octavo.engine.build import LoadReport, build_engine
from octavo.engine.delivery import RequestUpdate
from octavo.engine.loop import Engine
from octavo.errors import OctavoError
from octavo.sampling_params import MAX_SEED
from octavo.server import messages, processes
from octavo.server.limits import check_room

Peer = bytes
Socket = zmq.Socket[bytes]

_IDLE_MS = 250  # without a message: a client that asks again at once should find the engine waiting


def main() -> NoReturn:
    """Run until the first API process ends this one, or ends itself."""
    gc.disable()  # a seventh of what imports take is looks through what they have made
    start = messages.decode_start_engine(processes.begin())
    processes.listen(lambda _: None)
    faulthandler.enable()  # if it is killed because it hangs, the log says where
    logging.basicConfig(format="%(message)s", level=logging.WARNING)

    socket: Socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.bind(start.address)
    try:
        loaded = build_engine(start.config, with_text=False)
    except OctavoError as error:
        while True:  # until the one that reports it has said hello, and ends this
            _tell(socket, _greeted(socket, 1), messages.Failed(str(error)))
    gc.freeze()  # what is loaded stays, and no step waits for a look through it
    gc.enable()
    peers = _greeted(socket, start.num_peers)
    _tell(socket, peers, _ready(loaded.engine, loaded.report))
    seeds = random.Random(start.config.seed)
    EngineServer(loaded.engine, socket, peers, start.max_answers, seeds).run()


class EngineServer:
    """Carries out what the peers ask and tells them what came of it."""

    def __init__(
        self,
        engine: Engine,
        socket: Socket,
        peers: list[Peer],
        max_answers: int | None,
        seeds: random.Random,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._peers = peers
        self._max_answers = max_answers
        self._seeds = seeds  # for requests without one of their own
        self._owners: dict[str, Peer] = {}  # by the id of a request that is not finished

    def run(self) -> NoReturn:
        """Step while there is work and wait for some where there is none, for ever."""
        engine, socket = self._engine, self._socket
        self._tell_step([])
        while True:
            told = False
            if not engine.has_work:
                self._wait_for_message()
            while socket.poll(0):
                peer, raw = socket.recv_multipart()
                self._obey(peer, messages.decode_to_engine(raw))
                told = True
            # A step without updates is told as well: the engine is alive.
            if engine.has_work:
                self._tell_step(engine.step())
            elif told:
                self._tell_step([])

    def _wait_for_message(self) -> None:
        """If none comes for a while, the time goes to what later steps will need."""
        found = self._socket.poll(_IDLE_MS)
        while not found and self._engine.use_idle_time():
            found = self._socket.poll(0)
        if not found:
            self._socket.poll(None)

    def _obey(self, peer: Peer, message: messages.ToEngine) -> None:
        match message:
            case messages.Add():
                self._add(peer, message.requests)
            case messages.Abort():
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
                    self._owners.pop(request_id, None)
            case messages.Finish():
                for request_id in message.request_ids:
                    self._engine.finish(request_id)
                    self._owners.pop(request_id, None)

    def _add(self, peer: Peer, requests: list[messages.NewRequest]) -> None:
        """Queue a call's requests. Where one is refused its peer gives up, and aborts, them all."""
        try:
            check_room(len(self._owners), len(requests), self._max_answers)
            for request in requests:
                seed = request.params.seed
                drawn = self._seeds.randint(0, MAX_SEED) if seed is None else seed
                self._engine.add(request.request(drawn))
                self._owners[request.request_id] = peer
        except OctavoError as error:
            refused = messages.Refused(
                requests[0].request_id,
                str(error),
                error.status,
                getattr(error, "param", None),
                error.code,
            )
            _tell(self._socket, [peer], refused)

    def _tell_step(self, updates: list[RequestUpdate]) -> None:
        """One message for each peer, those first whose message brings no more than the figures:
        whoever has its answer finds it counted, whichever peer it asks."""
        stats = self._engine.stats()
        brought: defaultdict[Peer, list[RequestUpdate]] = defaultdict(list)
        for update in updates:
            brought[self._owners[update.request_id]].append(update)
            if update.finish_reason is not None:
                del self._owners[update.request_id]
        idle = [peer for peer in self._peers if peer not in brought]
        _tell(self._socket, idle, messages.Step([], stats))
        for peer, own in brought.items():
            _tell(self._socket, [peer], messages.Step(own, stats))


def _greeted(socket: Socket, count: int) -> list[Peer]:
    """Wait until so many peers have said hello."""
    peers: list[Peer] = []
    while len(peers) < count:
        peer, raw = socket.recv_multipart()
        messages.decode_to_engine(raw)
        peers.append(peer)
    return peers


def _tell(socket: Socket, peers: list[Peer], message: messages.FromEngine) -> None:
    if peers:
        raw = messages.encode(message)
        for peer in peers:
            socket.send_multipart([peer, raw])


def _ready(engine: Engine, report: LoadReport) -> messages.Ready:
    return messages.Ready(
        max_total_tokens=engine.max_total_tokens,
        block_size=engine.limits.block_size,
        num_blocks=sum(engine.limits.num_blocks),
        runtime=report.runtime,
        attention_backend=report.attention_backend,
        precision=report.precision,
        load_phases=report.phases,
        notes=list(report.notes),
    )


if __name__ == "__main__":
    main()
