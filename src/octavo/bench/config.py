"""What ``octavo bench serve`` and ``throughput`` can be told: vLLM's flag names; each docstring is
the flag's help."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
SLO_METRICS = ("ttft", "tpot", "e2el")  # those that a request has one value of
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)

INPUT_LEN, OUTPUT_LEN = 1024, 128  # of random prompts
FILE_OUTPUT_LEN = 256  # where a custom file names none


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Which prompts. Raises :class:`ConfigError` on construction where a value is out of range or
    means nothing for the dataset."""

    dataset_name: Literal["random", "sharegpt", "custom"] = "random"
    """random: made-up prompts; sharegpt: a JSON file of conversations; custom: JSON lines with a
    "prompt" each and, if they like, "output_tokens"."""

    dataset_path: str | None = None
    """The file of a sharegpt or custom dataset."""

    num_prompts: int = 1000
    """Requests to make; a dataset with fewer is gone through again."""

    input_len: int | None = None
    """Tokens of a random prompt; 1024 if left out."""

    output_len: int | None = None
    """Tokens of an answer; if left out 128 for random prompts, the file's own for others (256 where
    a custom file has none)."""

    random_input_len: int | None = None
    """The same as --input-len."""

    random_output_len: int | None = None
    """The same as --output-len, for random prompts."""

    random_range_ratio: float = 0.0
    """Vary random lengths evenly by this share of them, up and down."""

    seed: int = 0
    """Makes prompts and arrivals repeatable."""

    def __post_init__(self) -> None:
        lengths = ("input_len", "output_len", "random_input_len", "random_output_len")
        for name in ("num_prompts", *lengths):
            _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio is {self.random_range_ratio:g}, it must be at least 0 and "
                "below 1"
            )
        for general in ("input_len", "output_len"):
            if (
                getattr(self, general) is not None
                and getattr(self, f"random_{general}") is not None
            ):
                raise ConfigError(f"{general} and random_{general} say the same; give one of them")
        if self.dataset_name == "random":
            if self.dataset_path is not None:
                raise ConfigError(
                    "random prompts come from no file; leave out dataset_path, or say with "
                    "dataset_name what is in it: sharegpt or custom"
                )
            return
        if self.dataset_path is None:
            raise ConfigError(f"a {self.dataset_name} dataset needs its file: give dataset_path")
        for name in ("input_len", "random_input_len", "random_output_len", "random_range_ratio"):
            if getattr(self, name):
                raise ConfigError(f"{name} is for random prompts; a file brings its own")

    @property
    def random_lens(self) -> tuple[int, int]:
        """Mean tokens of a random prompt and of its answer."""
        return (
            self.input_len or self.random_input_len or INPUT_LEN,
            self.output_len or self.random_output_len or OUTPUT_LEN,
        )


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Which server, how hard, and what is reported. Raises :class:`ConfigError` on construction
    where a value is out of range or two contradict."""

    backend: Literal["openai", "openai-chat"] = "openai"
    """The API to speak: completions or chat completions."""

    base_url: str | None = None
    """The server, such as https://HOST/PREFIX, instead of --host and --port."""

    host: str = "127.0.0.1"
    """Address of the server."""

    port: int = 8000
    """Port of the server."""

    endpoint: str | None = None
    """Path below the server; the API's own if left out: /v1/completions or /v1/chat/completions."""

    model: str | None = None
    """The model's name; the first of /v1/models if left out."""

    tokenizer: str | None = None
    """A model, or a folder with its tokenizer.json, to count tokens with: random prompts get their
    exact length, and servers that give no usage can be measured."""

    request_rate: float = math.inf
    """Requests per second; inf sends all at once."""

    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests: 1 is a Poisson process, less
    comes in bursts, more is steadier, inf is a clock."""

    max_concurrency: int | None = None
    """Most requests at a time; further ones wait in the client."""

    num_warmups: int = 0
    """Requests before the measurement, with prompts of their own."""

    ready_check_timeout_sec: float = 0.0
    """Wait so long for the server to answer a first, short request; 0 doesn't ask."""

    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """What to report, separated by commas; also client_queue_time and e2el_including_client_queue,
    with --max-concurrency."""

    metric_percentiles: str = "99"
    """Percentiles to report, separated by commas."""

    goodput: tuple[str, ...] = ()
    """Count the requests that meet these limits in ms, such as ttft:500 tpot:50; metrics are ttft,
    tpot and e2el."""

    save_result: bool = False
    """Write the figures into a JSON file."""

    save_detailed: bool = False
    """With --save-result: each request's lengths, times, text and error too."""

    result_dir: str | None = None
    """Folder of the file; the current one if left out."""

    result_filename: str | None = None
    """Name of the file; made of backend, rate, model and date if left out."""

    metadata: tuple[str, ...] = ()
    """KEY=VALUE pairs to write into the file."""

    ignore_eos: bool | None = None
    """Have the model go on where it would end; auto: with random prompts only."""

    temperature: float | None = None
    """Sampling is the server's own where a flag is left out."""

    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""

    top_k: int | None = None
    """Choose among the k likeliest tokens."""

    min_p: float | None = None
    """Leave out tokens less likely than this share of the likeliest one's probability."""

    frequency_penalty: float | None = None
    """Make tokens less likely the more often they came."""

    presence_penalty: float | None = None
    """Make tokens less likely that came."""

    repetition_penalty: float | None = None
    """Make tokens less likely that came, in the prompt too."""

    extra_body: str | None = None
    """A JSON object with more fields for every request."""

    def __post_init__(self) -> None:
        if self.base_url is not None and (self.host, self.port) != ("127.0.0.1", 8000):
            raise ConfigError("base_url has host and port; leave out --host and --port")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"endpoint is {self.endpoint!r}, it must begin with /")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}, it must be above 0")
        if self.burstiness != 1 and self.request_rate == math.inf:
            raise ConfigError("burstiness needs a request_rate: now all requests go at once")
        _at_least("max_concurrency", self.max_concurrency, 1)
        _at_least("num_warmups", self.num_warmups, 0)
        _at_least("ready_check_timeout_sec", self.ready_check_timeout_sec, 0)
        for metric in self.metrics:
            if metric not in METRICS:
                raise ConfigError(
                    f"percentile_metrics has {metric!r}, metrics are {', '.join(METRICS)}"
                )
            if "queue" in metric and self.max_concurrency is None:
                raise ConfigError(f"{metric} needs max_concurrency: without it no request queues")
        for name in ("result_dir", "result_filename", "metadata", "save_detailed"):
            if getattr(self, name) and not self.save_result:
                raise ConfigError(f"{name} is about the file; give save_result as well")
        _ = self.percentiles, self.goodput_limits, self.metadata_items, self.extra_fields

    @property
    def url(self) -> str:
        """The server's base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        """The endpoint, below the base URL."""
        if self.endpoint is not None:
            return self.endpoint
        return "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"

    @property
    def metrics(self) -> list[str]:
        return _words(self.percentile_metrics)

    @property
    def percentiles(self) -> list[float]:
        try:
            found = [float(word) for word in _words(self.metric_percentiles)]
        except ValueError:
            found = [math.nan]
        if not all(0 <= percentile <= 100 for percentile in found):
            raise ConfigError(
                f"metric_percentiles is {self.metric_percentiles!r}, it must be numbers from 0 to "
                "100 separated by commas"
            )
        return found

    @property
    def goodput_limits(self) -> dict[str, float]:
        """Seconds by metric."""
        limits = {}
        for text in self.goodput:
            metric, _, number = text.partition(":")
            try:
                seconds = float(number) / 1000
            except ValueError:
                seconds = math.nan
            if metric not in SLO_METRICS or not 0 <= seconds < math.inf:
                raise ConfigError(
                    f"goodput is {text!r}, it must be one of {', '.join(SLO_METRICS)}, a colon and "
                    "milliseconds, such as ttft:500"
                )
            limits[metric] = seconds
        return limits

    @property
    def metadata_items(self) -> dict[str, str]:
        pairs = [text.partition("=") for text in self.metadata]
        for key, equals, _ in pairs:
            if not equals or not key.strip():
                raise ConfigError(f"metadata has {key!r}, it must be KEY=VALUE")
        return {key.strip(): value.strip() for key, _, value in pairs}

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        """What every request has besides its prompt and length: sampling, then ``extra_body``."""
        given = {name: getattr(self, name) for name in SAMPLING}
        fields = {name: value for name, value in given.items() if value is not None}
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(f"extra_body is {self.extra_body!r}, it must be a JSON object")
        return {**fields, **extra}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _at_least(name: str, value: float | None, low: int) -> None:
    if value is not None and not value >= low:
        raise ConfigError(f"{name} is {value:g}, it must be at least {low}")
