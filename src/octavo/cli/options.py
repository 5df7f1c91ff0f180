"""The flags that commands share, each declared once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Annotated

from cyclopts import Group, Parameter

from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams

Model = Annotated[
    str | None,
    Parameter(
        help="Folder, .gguf file, Hugging Face id, repo:quant or alias; "
        "left out, the embedded SmolLM2-135M-Instruct."
    ),
]

Switch = Annotated[bool, Parameter(negative=(), show_default=False)]

SAMPLING, ENGINE = Group.create_ordered("Sampling"), Group.create_ordered("Engine")


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """What the user said about sampling; ``None`` is what the user left to the command."""

    max_tokens: int | None = None
    """Most tokens to generate; as many as the context has room for if left out."""

    temperature: Annotated[float | None, Parameter(allow_leading_hyphen=True)] = None
    """How freely to choose: 0 always takes the likeliest token."""

    top_k: Annotated[int | None, Parameter(allow_leading_hyphen=True)] = None
    """Choose among the k likeliest tokens; 0 among all."""

    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""

    min_p: float | None = None
    """Leave out tokens less likely than this share of the likeliest one's probability."""

    seed: int | None = None
    """Makes sampling repeatable."""

    stop: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, show_default=False)] = ()
    """End the answer before this text; may be given several times."""

    ignore_eos: Switch = False
    """Go on where the model would end."""

    def params(self, base: SamplingParams) -> SamplingParams:
        """``base`` with what the user said. Raises InvalidRequestError for values out of range."""
        said = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        return replace(base, **said)


# The model is an argument, --seed the request's, and a command line needs the tokenizer.
_ALL_BUT = re.compile("^(?!(model|seed|skip_tokenizer_init)$)")
EngineFlags = Annotated[EngineConfig, Parameter(name="*", group=ENGINE, parse=_ALL_BUT)]
