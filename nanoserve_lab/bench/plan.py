"""`bench plan`: what it costs the host to plan a decode step, its rectangle gathered anew or a window on a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from nanoserve_lab.bench.provenance import with_provenance, write_csv
from nanoserve_lab.bench.timing import alternate, command_line, parse_counts, require, show, spread, synchronize
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.device import default_device
from nanoserve_lab.model.tiny import TINY
from nanoserve_lab.plan import DecodePlan, Planner
from nanoserve_lab.slots import SlotTable

#: K and V of next to no size: planning never looks at them.
SMALL = replace(TINY, num_layers=1, num_kv_heads=1, head_dim=2)
#: Steps that an arm runs in its turn. Their median leaves out the first ones, whose data the other arm has driven from
#: the processor's cache.
BURST = 10


class Planning(NamedTuple):
    """A K/V cache with rows in it and the planner of its steps; ``table`` is None where the planner gathers."""

    cache: PagedCache
    planner: Planner
    table: SlotTable | None

    def step(self) -> DecodePlan:
        """Room for one more token in every row, and the plan of the step that writes it."""
        self.cache.grow()
        return self.planner.plan()


def planning(
    contexts: Sequence[int],
    max_context: int,
    window: bool,
    max_rows: int | None = None,
    block_size: int = 16,
    device: torch.device | str = "cpu",
) -> Planning:
    """A cache with a row of ``contexts[i]`` tokens each, without a model; every row may grow to ``max_context``.

    With ``window`` the rectangle is a window on a `SlotTable`, else it is gathered. Raises `ValueError` for a context
    above ``max_context`` or more rows than ``max_rows`` (None: as many as there are).
    """
    max_rows = max_rows or len(contexts)
    if len(contexts) > max_rows:
        raise ValueError(f"rows: {len(contexts)}, at most {max_rows}")
    if max(contexts) > max_context:
        raise ValueError(f"context: {max(contexts)} tokens, at most {max_context}")
    pool = KVPool(SMALL, max_rows * -(-max_context // block_size) + 1, block_size, torch.float32, device)
    table = SlotTable(max_rows, max_context, device) if window else None
    cache = PagedCache(pool, max_rows, max_context, table)
    for tokens in contexts:
        cache.add(cache.reserve(tokens), tokens)
    return Planning(cache, Planner(cache, table), table)


def three_rows() -> Planning:
    """Rows A, B, C of 6, 6 and 3 tokens on a table of 4 x 12, blocks of 4: two prompts of 3 tokens, two steps, a third
    prompt of 2 tokens, a step."""
    rows = planning([3, 3], max_context=12, window=True, max_rows=4, block_size=4)
    rows.step()
    rows.step()
    rows.cache.add(rows.cache.reserve(2), 2)
    rows.step()
    return rows


def measure(rows: Sequence[int], contexts: Sequence[int], repeats: int) -> pd.DataFrame:
    """One line for each number of rows and context: medians over ``repeats`` turns of `BURST` steps, arms alternating.

    Columns ``rows``, ``context`` (tokens of each row in the last step), ``gather_us`` and ``window_us`` (microseconds
    on the host to grow the cache by a token a row and to plan the step), ``gather_bytes`` and ``window_bytes`` (what is
    written for the rectangle in that step: all of it, or the new cells of the table), ``table_bytes``,
    ``repeats``, ``threads``, and the provenance.
    """
    device = default_device()
    lines = [_cell(count, context, max(contexts), repeats, device) for count in rows for context in contexts]
    return with_provenance(pd.DataFrame(lines).assign(repeats=repeats, threads=torch.get_num_threads()), device)


def _cell(count: int, context: int, max_context: int, repeats: int, device: torch.device) -> dict[str, float]:
    start = context - tokens_written(repeats)
    gather, window = (planning([start] * count, max_context, on, device=device) for on in (False, True))
    with torch.inference_mode():
        arms = {"gather": _timed(gather, device), "window": _timed(window, device)}
        medians = {name: spread(times).median for name, times in alternate(arms, repeats).items()}
    assert window.table is not None
    itemsize = window.table.data.itemsize
    return {
        "rows": count,
        "context": context,
        "gather_us": medians["gather"] * 1e6,
        "window_us": medians["window"] * 1e6,
        "gather_bytes": count * context * itemsize,
        "window_bytes": count * itemsize,
        "table_bytes": window.table.data.nbytes,
    }


def _timed(rows: Planning, device: torch.device) -> Callable[[], float]:
    # The plan outlives the clock: to free the one before it is no part of planning.
    kept: list[DecodePlan] = []

    def step() -> float:
        synchronize(device)
        start = time.perf_counter()
        plan = rows.step()
        seconds = time.perf_counter() - start
        kept[:] = [plan]
        return seconds

    return lambda: statistics.median(step() for _ in range(BURST))


def tokens_written(repeats: int) -> int:
    """Tokens that a row grows by in a measurement of ``repeats`` turns: one a step, a turn of warming up included."""
    return BURST * (1 + repeats)


def run(
    out: Path = Path("data"),
    rows: str = "1,8,32",
    contexts: str = "128,256,512,1024,2048,4096,8192",
    repeats: int = 10,
) -> list[Path]:
    """Microseconds on the host to plan a decode step, gathered against window, to OUT/plan.csv. No model runs."""
    command = command_line("plan", run, locals())
    batches, lengths = parse_counts("rows", rows), parse_counts("contexts", contexts)
    require("repeats", repeats, 1)
    require("contexts", min(lengths), tokens_written(repeats) + 1)
    frame = measure(batches, lengths, repeats).assign(command=command)
    show(frame)
    return [write_csv(frame, out / "plan.csv", default_device(), command)]
