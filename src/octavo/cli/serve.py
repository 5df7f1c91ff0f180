"""``octavo serve``: the engine behind OpenAI's HTTP API."""

from __future__ import annotations

import re
from typing import Annotated

from cyclopts import Group, Parameter

from octavo.cli.options import ENGINE, Model
from octavo.config import EngineConfig
from octavo.server.config import ServerConfig

SERVER = Group("Server", sort_key=0)
ServerFlags = Annotated[ServerConfig, Parameter(name="*", group=SERVER)]
_ALL_BUT = re.compile("^(?!(model|skip_tokenizer_init)$)")
EngineFlags = Annotated[EngineConfig, Parameter(name="*", group=ENGINE, parse=_ALL_BUT)]


def serve(
    model: Model = None,
    /,
    *,
    server: ServerFlags = ServerConfig(),  # noqa: B008 - frozen
    engine: EngineFlags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Without --api-key the server is open, and listens on this machine only unless told otherwise
    with --host. Ctrl-C or SIGTERM lets running answers finish; a second Ctrl-C ends at once.
    """
    from octavo.server.processes import ENGINE_MODULE, ChildProcess

    process = ChildProcess(ENGINE_MODULE)  # it imports while this process does
    from dataclasses import replace

    from octavo.server.serve import serve as run

    run(server, replace(engine, model=model), process)
