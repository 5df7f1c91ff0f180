"""``octavo run``: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from octavo.cli.figures import figures, figures_line
from octavo.cli.loading import load
from octavo.cli.options import EngineFlags, Model, SamplingFlags, Switch
from octavo.cli.streaming import print_as_it_comes
from octavo.config import EngineConfig
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.build import LoadReport


def run(
    model: Model = None,
    /,
    *,
    prompt: Annotated[str, Parameter(name=("--prompt", "-p"), allow_leading_hyphen=True)],
    chat: Switch = False,
    as_json: Annotated[Switch, Parameter(name="--json")] = False,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008 - frozen
    engine: EngineFlags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Complete one prompt, greedily and to its end unless told otherwise.

    The text goes to stdout as it comes, then one line of figures to stderr.

    Parameters
    ----------
    prompt
        The text to complete; - reads it from stdin.
    chat
        Put the prompt into the model's chat template, as the user's message.
    as_json
        Print one JSON object instead of the text: ids, text, figures, and what was chosen.
    """
    params = sampling.params(SamplingParams(temperature=0.0, max_tokens=None))
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = load(model, engine)
    if chat:
        outputs = llm.stream_chat([{"role": "user", "content": text}], params)
    else:
        outputs = llm.stream(text, params)
    if as_json:
        *_, output = outputs
    else:
        output = print_as_it_comes(outputs)
    print(figures_line(output, llm.report), file=sys.stderr)
    if as_json:
        print(json.dumps(_as_dict(output, llm.report), ensure_ascii=False))


def _as_dict(output: RequestOutput, report: LoadReport) -> dict[str, Any]:
    answer, numbers = output.outputs[0], figures(output)
    return {
        "model": report.model,
        "attention_backend": report.attention_backend,
        "runtime": report.runtime,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "ttft_s": numbers.ttft_s,
        "tpot_s": numbers.tpot_s,
        "tokens_per_s": numbers.tokens_per_s,
    }
