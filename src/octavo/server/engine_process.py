"""The engine's process: loads the model, then steps for as long as there is work.

The API process starts it as ``python -m octavo.server.engine_process``, writes a ``Start`` to its
standard input and leaves that pipe open: when it closes, whatever has become of the API process,
this process ends as well.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import BinaryIO, NoReturn

import zmq

from octavo.engine.build import LoadReport, build_engine
from octavo.engine.loop import Engine
from octavo.errors import OctavoError
from octavo.server import messages

_LINGER_MS = 2000  # for a last message to leave


def main() -> NoReturn:
    """Run until the API process ends; exit with 1 where the model can't be loaded, having told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the API process's to handle
    logging.basicConfig(format="octavo: %(message)s", level=logging.WARNING)
    pipe = sys.stdin.buffer
    start = messages.decode_start(pipe.read(int.from_bytes(pipe.read(4), "little")))
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(start.address)
    try:
        loaded = build_engine(start.config)
    except OctavoError as error:
        socket.send(messages.encode(messages.Failed(str(error))))
        socket.close(linger=_LINGER_MS)
        zmq.Context.instance().term()
        sys.exit(1)
    socket.send(messages.encode(_ready(loaded.engine, loaded.report)))
    serve_engine(loaded.engine, socket)


def serve_engine(engine: Engine, socket: zmq.Socket[bytes]) -> NoReturn:
    """Carry out what comes in and step while there is work, for ever."""
    socket.send(messages.encode(messages.Step([], engine.stats())))
    while True:
        told = False
        while socket.poll(0 if told or engine.has_work else None):
            for answer in _obey(engine, messages.decode_to_engine(socket.recv())):
                socket.send(messages.encode(answer))
            told = True
        updates = engine.step() if engine.has_work else []
        if updates or told:
            socket.send(messages.encode(messages.Step(updates, engine.stats())))


def _obey(engine: Engine, message: messages.ToEngine) -> list[messages.Refused]:
    match message:
        case messages.Add():
            try:
                engine.add(message.request())
            except OctavoError as error:
                param = getattr(error, "param", None)
                refused = messages.Refused(
                    message.request_id, str(error), error.status, param, error.code
                )
                return [refused]
        case messages.Abort():
            for request_id in message.request_ids:
                engine.abort(request_id)
        case messages.Finish():
            for request_id in message.request_ids:
                engine.finish(request_id)
    return []


def _ready(engine: Engine, report: LoadReport) -> messages.Ready:
    return messages.Ready(
        max_total_tokens=engine.max_total_tokens,
        max_num_seqs=engine.limits.max_num_seqs,
        block_size=engine.limits.block_size,
        num_blocks=sum(engine.limits.num_blocks),
        runtime=report.runtime,
        attention_backend=report.attention_backend,
        precision=report.precision,
        load_seconds=report.load_seconds,
        notes=list(report.notes),
    )


def _end_with(pipe: BinaryIO) -> None:
    pipe.read()
    os._exit(0)  # from a thread, in whatever the main thread is busy with


if __name__ == "__main__":
    main()
