"""``octavo bench``: how fast is it here? One file per benchmark."""

from __future__ import annotations

from cyclopts import App

from octavo.cli.bench.attention import attention
from octavo.cli.bench.kernels import kernels
from octavo.cli.bench.latency import latency
from octavo.cli.bench.serve import serve
from octavo.cli.bench.startup import startup
from octavo.cli.bench.throughput import throughput

__all__ = ["bench"]

bench = App(name="bench", help="Measure how fast Octavo, or another server, is on this machine.")
for command in (serve, throughput, latency, startup, attention, kernels):
    bench.command(command)
