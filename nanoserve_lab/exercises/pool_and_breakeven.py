"""Lesson 07: the order in which a list is recorded, and the shapes of a run that were worth recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanoserve_lab.captured import capture_breakeven_steps
from nanoserve_lab.recorders.allocator import Allocate, Free, Lifetimes, pool_bytes

Shape = tuple[int, int]

#: Lists of recordings, each one block of so many MiB.
LISTS = ([4, 12], [16, 24, 12], [30, 11, 50, 20], [7], [14, 14, 22], list(range(12, 44, 2)))
#: Runs: how often each shape came up, seconds of one recording, seconds that a replay saves.
RUNS: tuple[tuple[dict[Shape, int], float, float], ...] = (
    ({(1, 16): 100, (2, 16): 3}, 0.5, 0.01),
    ({(1, 16): 50, (2, 16): 49}, 0.5, 0.01),
    ({(rows, 16): 1 for rows in range(1, 20)}, 0.5, 0.01),
    ({(1, 16): 10**6}, 0.5, 0.0),
    ({(1, 16): 10**6}, 0.5, -0.001),
    ({(4, 32): 1, (8, 32): 2}, 0.01, 0.01),
    ({}, 0.5, 0.01),
)


def _block(mib: int) -> Lifetimes:
    return Lifetimes((Allocate(0, mib << 20), Free(0)))


def check_order(order: Callable[[list[int]], Any]) -> str:
    """Lesson 07: ``order(sizes)`` is the list of places in which recordings that need ``sizes`` bytes each are recorded
    into one shared pool; against the fewest bytes that any order reserves."""
    for mib in LISTS:
        recordings, sizes = [_block(size) for size in mib], [size << 20 for size in mib]
        try:
            places = list(order(list(sizes)))
            reserved = pool_bytes(recordings, order=places).reserved
        except Exception as error:
            return f"{mib} MiB: {type(error).__name__}: {error}"
        least = pool_bytes(recordings, order="largest").reserved
        if reserved > least:
            first = [mib[place] for place in places]
            return (
                f"{mib} MiB in the order {first}: {reserved >> 20} MiB are reserved, {least >> 20} would do; a free "
                "block that is too small for the next recording stays where it is"
            )
    return f"right for {len(LISTS)} lists: no order reserves less"


def check_worth(worth: Callable[[dict[Shape, int], float, float], Any]) -> str:
    """Lesson 07: ``worth(counts, record_s, saving_s)`` is the set of shapes whose replays saved at least what recording
    them cost, given how often each was met."""
    for counts, record_s, saving_s in RUNS:
        run = f"{_few(counts)}, {record_s:g} s a recording, {saving_s:g} s saved a replay"
        try:
            said = set(worth(dict(counts), record_s, saving_s))
        except Exception as error:
            return f"{run}: {type(error).__name__}: {error}"
        steps = capture_breakeven_steps(record_s, saving_s)
        wanted = {shape for shape, count in counts.items() if count >= steps}
        if unknown := said - set(counts):
            return f"{run}: {min(unknown)} never came up"
        if not_paid := sorted(said - wanted):
            count = counts[not_paid[0]]
            return f"{run}: {not_paid[0]} was met {count:,} times and pays after {steps:,.0f}"
        if missing := sorted(wanted - said):
            return f"{run}: {missing[0]} was met {counts[missing[0]]:,} times, has paid after {steps:,.0f}, is left out"
    return f"right for {len(RUNS)} runs"


def _few(counts: dict[Shape, int]) -> str:
    shapes: Sequence[str] = [f"{shape} x {count:,}" for shape, count in counts.items()]
    return ", ".join(shapes[:2]) + (f" and {len(shapes) - 2} more" if len(shapes) > 2 else "") or "no steps"
