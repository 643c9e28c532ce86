"""`bench breakeven`: for each lesson's list of shapes its memory, and the steps after which recording it has paid."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from nanoserve_lab.bench.launch import MODELS, decode_costs
from nanoserve_lab.bench.provenance import with_provenance, write_csv
from nanoserve_lab.bench.timing import require, show
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.captured import (
    capture_breakeven_steps,
    capture_cost_s,
    launch_saving_s,
    private_pool_bytes,
    shared_pool_bytes,
)
from nanoserve_lab.device import default_device

#: The engine whose lists are priced: rows, context and heads of the log's table; scores in fp32.
MAX_ROWS, MAX_CONTEXT, HEADS = 256, 8192, 32
#: The width multiple of a lesson's list; None where every number of rows and every context is a shape of its own.
WIDTH_MULTIPLES: dict[str, int | None] = {
    "00_decode_step": None,
    "01_graph_breaks": None,
    "02_decode_plan": None,
    "03_slot_table": None,
    "04_bucketing": 128,
    "05_persistent_inputs": 128,
    "06_graph_capture": 128,
    "07_pool_and_breakeven": 2048,
}
COMMAND = "nanoserve-lab bench breakeven"


def shape_list(lesson: str) -> list[tuple[int, int]]:
    """The shapes ``(rows, width)`` that a decode step can have at the end of ``lesson``, all of which would have to be
    recorded. Raises `KeyError` for an unknown lesson."""
    multiple = WIDTH_MULTIPLES[lesson]
    if multiple is None:
        return [(rows, width) for rows in range(1, MAX_ROWS + 1) for width in range(1, MAX_CONTEXT + 1)]
    return BucketSet(MAX_ROWS, MAX_CONTEXT, multiple).shapes()


def lesson_costs(lesson: str, repeats: int = 3) -> pd.DataFrame:
    """The lists of the course up to ``lesson``, a row each, the newest last, at this machine's costs.

    Columns ``lessons`` (the first and the last with this list), ``shapes``, ``shared_bytes`` and ``private_bytes``
    (the scores, in one pool or in a pool each), ``record_ms`` (one recording of the tiny model's step of two rows),
    ``saving_ms`` (what a step saves by being a replay), ``breakeven_steps``, and the provenance. An open set meets a
    new shape at every step, so that no recording is used twice: it saves nothing and never pays. The costs are the
    medians of ``repeats`` measurements, made at the first call.
    """
    until = list(WIDTH_MULTIPLES)[: list(WIDTH_MULTIPLES).index(lesson) + 1]
    costs = _tiny_costs(repeats)
    lists = [list(group) for _, group in groupby(until, WIDTH_MULTIPLES.__getitem__)]
    return with_provenance(pd.DataFrame([_bill(group, costs) for group in lists]), default_device(), COMMAND)


def _bill(lessons: Sequence[str], costs: dict[str, Any]) -> dict[str, Any]:
    shapes = shape_list(lessons[0])
    replay_s, launch_s = costs["replay_ms"] / 1e3, costs["launch_us"] / 1e6
    closed = WIDTH_MULTIPLES[lessons[0]] is not None
    saving_s = launch_saving_s(costs["launches"], launch_s, replay_s) if closed else 0.0
    cost_s = capture_cost_s(shapes, costs["record_ms"] / 1e3)
    first, last = lessons[0][:2], lessons[-1][:2]
    return {
        "lessons": first if first == last else f"{first} to {last}",
        "shapes": len(shapes),
        "shared_bytes": shared_pool_bytes(shapes, HEADS),
        "private_bytes": private_pool_bytes(shapes, HEADS),
        "record_ms": costs["record_ms"],
        "saving_ms": saving_s * 1e3,
        "breakeven_steps": float(capture_breakeven_steps(cost_s, saving_s)),
    }


@functools.cache
def _tiny_costs(repeats: int) -> dict[str, Any]:
    return decode_costs(MODELS["tiny"](), rows=2, repeats=repeats)


def run(out: Path = Path("data"), repeats: int = 7) -> list[Path]:
    """Bytes and breakeven steps of every lesson's list to OUT/breakeven.csv."""
    require("repeats", repeats, 1)
    frame = lesson_costs(list(WIDTH_MULTIPLES)[-1], repeats)
    show(frame)
    return [write_csv(frame, out / "breakeven.csv")]
