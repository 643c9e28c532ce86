"""`bench padding`: what a closed set of shapes costs in padded cells, and how many of its shapes a run meets.

Requests with the moments of a published trace are served by continuous batching, simulated without a model: only the
rows of each decode step and their contexts matter here. Everything is a count, the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nanoserve_lab.bench.load import CONVERSATION, TRACES, Trace, arrivals
from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import BenchRefused, command_line, parse_counts, require, show
from nanoserve_lab.buckets import BucketSet

MAX_ROWS, MAX_CONTEXT = 256, 8192
MULTIPLES = (128, 256, 512, 1024, 2048, 4096, 8192)
#: What the trace's rate is multiplied by: a server for few, one for more, and the published rate.
RATE_SCALES = (1 / 16, 1 / 4, 1.0)
#: Seconds of one decode step, whatever its shape.
STEP_S = 0.05
#: In `seen_over_run`, the width multiple of a run without buckets.
OPEN = 0
#: The multiples that `seen_over_run` follows beside the open set: the ends and two between them.
FOLLOWED = (128, 512, 2048, 8192)
#: Steps at which `seen_over_run` looks, evenly spaced on a logarithmic axis.
POINTS = 48


def simulate(
    trace: Trace = CONVERSATION,
    seconds: float = 600.0,
    rate_scale: float = 1.0,
    seed: int = 0,
    step_s: float = STEP_S,
    max_rows: int = MAX_ROWS,
    max_context: int = MAX_CONTEXT,
) -> pd.DataFrame:
    """The decode steps of a server that gets ``trace`` for about ``seconds``, its rate times ``rate_scale``.

    Its lengths are unscaled, but cut to fit ``max_context``. See `decode_steps` for the columns.
    """
    count = max(1, round(seconds * trace.requests_per_s * rate_scale))
    requests = arrivals(trace, count, seed, rate_scale=rate_scale, max_prompt=max_context)
    # An output's last token is not fed back: prompt and output together may be one more than the context.
    room = max_context - requests.prompt_tokens + 1
    return decode_steps(requests.assign(output_tokens=np.minimum(requests.output_tokens, room)), step_s, max_rows)


def decode_steps(requests: pd.DataFrame, step_s: float = STEP_S, max_rows: int = MAX_ROWS) -> pd.DataFrame:
    """Serve ``requests`` (see `load.arrivals`) in steps of ``step_s`` seconds; a line for each decode step up to the
    last arrival.

    Columns ``rows``, ``longest`` (the longest context, the new token included) and ``live_cells`` (the sum of the
    contexts). As in the engine, the running rows decode one token each, then whoever has arrived takes a free row,
    first come first served. A prefill takes no time of its own and yields the first token.
    """
    at_s, prompts, outputs = (requests[name].to_numpy() for name in ("at_s", "prompt_tokens", "output_tokens"))
    contexts = left = np.empty(0, dtype=np.int64)
    served, step, steps = 0, 0, []
    while served < len(requests):
        if len(contexts):
            contexts = contexts + 1
            steps.append((len(contexts), int(contexts.max()), int(contexts.sum())))
            running = left > 1
            contexts, left = contexts[running], left[running] - 1
        elif at_s[served] > step * step_s:
            step = int(np.ceil(at_s[served] / step_s))
        arrived = int(np.searchsorted(at_s, step * step_s, side="right"))
        until = max(served, min(arrived, served + max_rows - len(contexts)))
        # A request of one token has it from its prefill.
        longer = served + np.flatnonzero(outputs[served:until] > 1)
        contexts = np.concatenate([contexts, prompts[longer]])
        left = np.concatenate([left, outputs[longer] - 1])
        served, step = until, step + 1
    return pd.DataFrame(steps, columns=["rows", "longest", "live_cells"])


def padding(
    steps: pd.DataFrame,
    multiples: Sequence[int] = MULTIPLES,
    max_rows: int = MAX_ROWS,
    max_context: int = MAX_CONTEXT,
) -> pd.DataFrame:
    """What the buckets of each width multiple make of ``steps`` (see `decode_steps`), a line for each multiple.

    ``shapes`` are in the set, ``seen`` of them come up. The cells of all read rectangles are the ``live_cells``, the
    ``ragged_cells`` that fill each row up to the longest, the ``row_cells`` of padded rows up to there, and the
    ``width_cells`` past the longest. The last three are ``padded_cells``, and ``waste`` their share of all cells.
    ``padded_rows`` and ``tokens`` are sums over the ``steps``; ``captures_per_1000_tokens`` is what recording every
    shape when it first comes up would take.
    """
    live, rectangle, tokens = (int(x.sum()) for x in (steps.live_cells, steps.rows * steps.longest, steps.rows))
    table = []
    for multiple in multiples:
        buckets = BucketSet(max_rows, max_context, multiple)
        shapes = _fitted(steps, buckets)
        tall, cells = int((shapes.rows * steps.longest).sum()), int((shapes.rows * shapes.width).sum())
        seen = len(shapes.drop_duplicates())
        table.append(
            {
                "width_multiple": multiple,
                "shapes": len(buckets.shapes()),
                "seen": seen,
                "live_cells": live,
                "ragged_cells": rectangle - live,
                "row_cells": tall - rectangle,
                "width_cells": cells - tall,
                "padded_cells": cells - live,
                "waste": (cells - live) / cells,
                "padded_rows": int((shapes.rows - steps.rows).sum()),
                "captures_per_1000_tokens": 1000 * seen / tokens,
                "steps": len(steps),
                "tokens": tokens,
            }
        )
    return pd.DataFrame(table)


def seen_over_run(
    steps: pd.DataFrame,
    multiples: Sequence[int] = FOLLOWED,
    max_rows: int = MAX_ROWS,
    max_context: int = MAX_CONTEXT,
) -> pd.DataFrame:
    """How many different shapes the first ``step`` of ``steps`` have: ``seen``, by ``width_multiple``, `OPEN` first."""
    points = np.unique(np.geomspace(1, len(steps), POINTS).round().astype(int))
    parts = []
    for multiple in (OPEN, *multiples):
        shapes = steps[["rows", "longest"]]
        if multiple != OPEN:
            shapes = _fitted(steps, BucketSet(max_rows, max_context, multiple))
        seen = (~shapes.duplicated()).cumsum().to_numpy()
        parts.append(pd.DataFrame({"width_multiple": multiple, "step": points, "seen": seen[points - 1]}))
    return pd.concat(parts, ignore_index=True)


def by_load(
    trace: Trace = CONVERSATION,
    seconds: float = 600.0,
    rate_scales: Sequence[float] = RATE_SCALES,
    multiples: Sequence[int] = MULTIPLES,
    seed: int = 0,
    step_s: float = STEP_S,
) -> pd.DataFrame:
    """`padding` of a `simulate` run for each of ``rate_scales``, which is a column more; ``mean_rows`` is another."""
    parts = []
    for scale in rate_scales:
        steps = simulate(trace, seconds, scale, seed, step_s)
        if steps.empty:
            raise BenchRefused(f"seconds: {seconds:g} at {scale:g} times the trace's rate have no decode step")
        parts.append(padding(steps, multiples).assign(rate_scale=scale, mean_rows=float(steps.rows.mean())))
    return pd.concat(parts, ignore_index=True)


def _fitted(steps: pd.DataFrame, buckets: BucketSet) -> pd.DataFrame:
    shapes = [buckets.fit(rows, longest) for rows, longest in zip(steps.rows, steps.longest, strict=True)]
    return pd.DataFrame(shapes, columns=["rows", "width"], index=steps.index)


def run(
    out: Path = Path("data"),
    multiples: str = ",".join(map(str, MULTIPLES)),
    trace: str = CONVERSATION.name,
    seconds: float = 600.0,
    step_s: float = STEP_S,
    seed: int = 0,
) -> list[Path]:
    """Padded cells and shapes met, by load and width multiple, at 256 rows x 8,192 tokens: to OUT/padding.csv and
    OUT/padding-shapes.csv.

    The trace comes for SECONDS at 1/16, 1/4 and 1 times its published rate, lengths unscaled; a decode step takes
    STEP_S seconds. The shapes met are those at the published rate.
    """
    command = command_line("padding", run, locals())
    widths = parse_counts("multiples", multiples)
    require("seconds", seconds, 1)
    require("step-s", step_s, 0.001)
    require("seed", seed, 0)
    if trace not in TRACES:
        raise BenchRefused(f"--trace: wanted one of {', '.join(TRACES)}, got {trace!r}")
    settings: dict[str, Any] = {"trace": trace, "seconds": seconds, "step_s": step_s, "seed": seed}
    settings |= {"max_rows": MAX_ROWS, "max_context": MAX_CONTEXT}
    frame = by_load(TRACES[trace], seconds, RATE_SCALES, widths, seed, step_s)
    show(frame[["rate_scale", "mean_rows", "width_multiple", "shapes", "seen", "waste", "captures_per_1000_tokens"]])
    shapes = seen_over_run(simulate(TRACES[trace], seconds, 1.0, seed, step_s)).assign(rate_scale=1.0)
    return [
        write_csv(frame.assign(**settings), out / "padding.csv", command=command),
        write_csv(shapes.assign(**settings), out / "padding-shapes.csv", command=command),
    ]
