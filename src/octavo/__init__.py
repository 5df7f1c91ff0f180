"""Octavo: an LLM inference engine whose decode attention reads the history in parallel.

``LLM`` and ``AsyncLLM`` answer prompts offline, with vLLM's names. Names are imported when they are
first used, so that ``octavo --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling_params import SamplingParams, StructuredOutputs

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputs": "octavo.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
