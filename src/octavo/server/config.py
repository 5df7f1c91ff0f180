"""The server's settings: vLLM's flag names where it has them; each docstring is the flag's help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from octavo.config import EngineConfig
from octavo.errors import ConfigError

# Where several API processes keep what they count: prometheus_client's own variable.
METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
GOODPUT_METRICS = ("ttft", "tpot", "itl", "e2el")
_GOODPUT = re.compile(r"(\w+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What can be set about the server. Raises :class:`ConfigError` on construction where a value
    is out of range or two contradict."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the server to the network."""

    port: int = 8000
    """Port to listen on; 0 takes a free one, which the log names."""

    served_model_name: tuple[str, ...] = ()
    """Names that requests may give as the model; may be given several times. The model's own if
    left out."""

    api_key: tuple[str, ...] = ()
    """Ask every call but /health for one of these keys; may be given several times. The variable
    OCTAVO_API_KEY holds one as well."""

    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server (CORS); * is any. None if left out."""

    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that such pages may use."""

    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that such pages may send."""

    allow_credentials: bool = False
    """Whether such pages may send cookies and HTTP credentials."""

    ssl_keyfile: str | None = None
    """The private key's PEM file: serve HTTPS."""

    ssl_certfile: str | None = None
    """The certificate's PEM file."""

    max_num_queued_reqs: int | None = None
    """Most answers that may wait beyond those that run; calls beyond get 503. No limit if left
    out."""

    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body; larger ones get 413."""

    shutdown_timeout: float = 20.0
    """Seconds that running answers get to finish after SIGTERM or Ctrl-C."""

    api_server_count: int = 1
    """API processes on the port, in front of the one engine process."""

    restart_engine: int = 0
    """How often to start the engine again after it has died; then the server ends."""

    watchdog_timeout: float = 300.0
    """Seconds that the engine may take over a step; then it counts as hung, and is killed. 0 lets
    it take any time."""

    content_rules: str | None = None
    """A file of regular expressions, one a line, that no prompt and no answer may match."""

    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = "auto"
    """How the model writes tool calls; auto reads it off the chat template."""

    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """How the model sets its reasoning apart; auto reads it off the chat template."""

    enable_force_include_usage: bool = False
    """End every stream with its usage, asked for or not."""

    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    """Count the requests that meet these limits in ms, such as ttft:500 tpot:50; metrics are
    ttft, tpot, itl and e2el."""

    metrics_alias_vllm: bool = False
    """Export every metric under its vllm: name as well, for dashboards that exist."""

    enable_log_requests: bool = False
    """Log every request and what became of it."""

    enable_request_id_headers: bool = False
    """Give every response the header X-Request-Id: the client's own, or a new one."""

    disable_log_stats: bool = False
    """Leave out the line of figures that is logged every ten seconds while there is work."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, it must be from 0 to 65535")
        for name, low in (
            ("max_num_queued_reqs", 0),
            ("max_body_bytes", 1),
            ("shutdown_timeout", 0),
            ("api_server_count", 1),
            ("restart_engine", 0),
            ("watchdog_timeout", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ConfigError(f"{name} is {value}, it must be at least {low}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together; give both or none")
        if not all(self.api_key):
            raise ConfigError("api_key is empty: a key must have at least one character")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name is empty")
        _ = self.goodput_limits

    def max_answers(self, engine: EngineConfig) -> int | None:
        """Most answers that may run or wait; None is no limit."""
        if self.max_num_queued_reqs is None:
            return None
        return engine.max_num_seqs + self.max_num_queued_reqs

    @property
    def goodput_limits(self) -> dict[str, float]:
        """Seconds by metric."""
        limits = {}
        for text in self.goodput:
            parts = _GOODPUT.fullmatch(text)
            if parts is None or parts[1] not in GOODPUT_METRICS:
                raise ConfigError(
                    f"goodput is {text!r}, it must be one of {', '.join(GOODPUT_METRICS)}, a "
                    "colon and milliseconds, such as ttft:500"
                )
            limits[parts[1]] = float(parts[2]) / 1000
        return limits
