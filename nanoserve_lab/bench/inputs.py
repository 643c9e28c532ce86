"""`bench inputs`: planning a step with fresh tensors against writing them in place: allocations, writes, time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch

from nanoserve_lab.bench.plan import SMALL
from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import command_line, parse_counts, require, show, spread, synchronize
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.device import default_device
from nanoserve_lab.inputs import DecodeInputs
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.plan import Planner
from nanoserve_lab.slots import SlotTable

#: Tokens of every row's prompt.
PROMPT = 16


def two_planners(rows: int, max_rows: int, steps: int) -> tuple[PagedCache, Planner, Planner, DecodeInputs]:
    """A cache of ``rows`` rows of `PROMPT` tokens with room for ``steps`` more, a planner that builds fresh tensors, a
    planner that writes into the buffers, and these. Both plan over one slot table."""
    device, context = default_device(), PROMPT + steps
    table, inputs = SlotTable(max_rows, context, device), DecodeInputs(max_rows, device)
    pool = KVPool(SMALL, rows * -(-context // 16) + 1, 16, torch.float32, device)
    cache = PagedCache(pool, max_rows, context, table)
    for _ in range(rows):
        cache.add(cache.reserve(PROMPT), PROMPT)
    return cache, Planner(cache, table), Planner(cache, table, inputs=inputs), inputs


def count(rows: int, max_rows: int, steps: int) -> dict[str, int]:
    """Tensors that ``steps`` plans allocate on the device, fresh and buffered, and what was written in place, all seen
    by instruments. The host's copies on their way to a GPU are not counted."""
    allocations = {}
    for buffered in (False, True):
        cache, fresh, in_place, inputs = two_planners(rows, max_rows, steps)
        planner = in_place if buffered else fresh
        with StepTrace() as trace:
            for _ in range(steps):
                cache.grow()
                planner.plan()
        allocations[buffered] = trace.allocations_on[inputs.input_ids.buffer.device.type]
    return {
        "fresh_allocations": allocations[False],
        "buffered_allocations": allocations[True],
        "writes": sum(buffer.writes for buffer in inputs.buffers.values()),
        "cells": sum(buffer.cells for buffer in inputs.buffers.values()),
    }


@torch.inference_mode()
def plan_ms(rows: int, max_rows: int, steps: int) -> tuple[float, float]:
    """Milliseconds that ``steps`` plans take, fresh and buffered, side by side: in each step both planners plan, in an
    order that alternates."""
    cache, fresh, in_place, inputs = two_planners(rows, max_rows, steps)
    device = inputs.input_ids.buffer.device
    totals = {fresh: 0.0, in_place: 0.0}
    gc.disable()  # a collection takes longer than a plan, and would fall to whichever planner has its turn
    try:
        for step in range(steps):
            cache.grow()
            for planner in (fresh, in_place) if step % 2 == 0 else (in_place, fresh):
                totals[planner] += _seconds(planner.plan, device)
    finally:
        gc.enable()
    return totals[fresh] * 1e3, totals[in_place] * 1e3


def _seconds(plan: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    kept = plan()
    seconds = time.perf_counter() - start
    del kept  # to free the plan is no part of planning
    return seconds


def measure(rows: Sequence[int], steps: Sequence[int], repeats: int) -> pd.DataFrame:
    """One line for each number of rows and steps.

    Columns ``steps``, ``rows``, ``fresh_allocations``, ``buffered_allocations``, ``writes``, ``cells`` (counted),
    ``fresh_plan_ms`` and ``buffered_plan_ms`` (medians over ``repeats`` runs of all steps, one more for warming up) and
    ``ratio`` (the median of the runs' own ratios, buffered over fresh).
    """
    lines = []
    for count_of_rows in rows:
        max_rows = max(8, count_of_rows)
        for length in steps:
            runs = [plan_ms(count_of_rows, max_rows, length) for _ in range(repeats + 1)][1:]
            lines.append(
                {
                    "steps": length,
                    "rows": count_of_rows,
                    **count(count_of_rows, max_rows, length),
                    "fresh_plan_ms": spread([fresh for fresh, _ in runs]).median,
                    "buffered_plan_ms": spread([buffered for _, buffered in runs]).median,
                    "ratio": spread([buffered / fresh for fresh, buffered in runs]).median,
                }
            )
    return pd.DataFrame(lines).assign(repeats=repeats, threads=torch.get_num_threads())


def run(out: Path = Path("data"), rows: str = "3,32,256", steps: str = "8,64,128,512", repeats: int = 9) -> list[Path]:
    """Allocations, writes and milliseconds of planning, fresh and in place, to OUT/day-53-inputbench.csv."""
    command = command_line("inputs", run, locals())
    batches, lengths = parse_counts("rows", rows), parse_counts("steps", steps)
    require("repeats", repeats, 1)
    frame = measure(batches, lengths, repeats)
    show(frame)
    return [write_csv(frame, out / "day-53-inputbench.csv", default_device(), command)]
