"""Lesson 02: the slot a token is written to, the rectangle that is read, and plans that are out of date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import SINK_SLOT, KVPool
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.plan import DecodePlan, Planner

WriteSlot = Callable[[list[int], int, int], int]
Gather = Callable[[list[list[int]], list[int], int], Any]

#: Block tables, lengths and block sizes on which the answers are tried; the first is the lesson's own.
CASES = (
    ([[1, 2], [3, 4]], [4, 3], 2),
    ([[1, 2, 5], [3, 4]], [5, 4], 2),
    ([[7], [2]], [1, 4], 4),
    ([[9, 3, 1], [6]], [11, 2], 4),
)


#: Wrong answers that are wrong in one way throughout, and what to say of them.
SLIPS: tuple[tuple[WriteSlot, str], ...] = (
    (
        lambda table, length, size: length - 1,
        "That is the token's position; its block says where the position lies in the pool",
    ),
    (
        lambda table, length, size: table[(length - 1) // size],
        "That is the number of the block; a block's first slot is the number times the size",
    ),
    (
        lambda table, length, size: table[(length - 1) // size] * size,
        "That is the block's first slot; the token has an offset in it",
    ),
    (
        lambda table, length, size: table[(length - 1) // size] * size + length % size,
        "The block is right; the offset counts from 0, as positions do",
    ),
)


def check_write_slot(write_slot: WriteSlot) -> str:
    """Lesson 02: ``write_slot(block_table, length, block_size)``, the slot of the newest of ``length`` tokens."""
    rows = [
        (table, length, size) for tables, lengths, size in CASES for table, length in zip(tables, lengths, strict=True)
    ]
    answers = []
    for table, length, size in rows:
        case = f"blocks {table}, {length} tokens, block size {size}"
        try:
            said = write_slot(list(table), length, size)
        except IndexError:
            return f"{case}: there is no such block; the newest token is at position {length - 1}, not {length}"
        if not isinstance(said, int):
            return f"{case}: {said!r}; a whole number was wanted"
        answers.append(said)
    for (table, length, size), said in zip(rows, answers, strict=True):
        wanted = table[(length - 1) // size] * size + (length - 1) % size
        if said != wanted:
            hints = (words for slip, words in SLIPS if [slip(*row) for row in rows] == answers)
            hint = next(hints, "Position, then block of the position, then offset in the block")
            return f"blocks {table}, {length} tokens, block size {size}: slot {said}, wanted {wanted}. {hint}"
    return f"right for {len(rows)} rows"


def check_gather(gather: Gather) -> str:
    """Lesson 02: ``gather(block_tables, lengths, block_size)``, the slots to read, ``[rows, longest row]``, the sink
    behind a row's end; a list of lists, an array or a tensor."""
    for tables, lengths, size in CASES:
        case = f"blocks {tables}, lengths {lengths}, block size {size}"
        said = gather([list(table) for table in tables], list(lengths), size)
        rows = said.tolist() if hasattr(said, "tolist") else said
        if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence) for row in rows):
            return f"{case}: {said!r}; a rectangle of rows was wanted"
        width = max(lengths)
        shape = [len(row) for row in rows]
        if shape != [width] * len(tables):
            return (
                f"{case}: rows of {' and '.join(map(str, shape)) or 'no'} columns, "
                f"wanted {len(tables)} rows of {width}, as wide as the longest"
            )
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            for column, slot in enumerate(rows[row]):
                if column >= length:
                    if slot != SINK_SLOT:
                        return (
                            f"{case}: row {row} ends after {length} tokens, and column {column} reads slot {slot}; "
                            f"wanted the sink, {SINK_SLOT}"
                        )
                elif slot != (wanted := table[column // size] * size + column % size):
                    return f"{case}: row {row} reads token {column} from slot {slot}, wanted {wanted}"
    return f"right for {len(CASES)} batches"


def four_plans() -> tuple[PagedCache, dict[str, DecodePlan]]:
    """A cache of two rows, 5 and 4 tokens, block size 2, and four plans made for it at different times; the step that
    is about to run can use one of them."""
    model = tiny_model()
    cache = PagedCache(KVPool(TINY, 16, 2, model.dtype, model.device), max_rows=3, max_context=16)
    planner, plans = Planner(cache), {}
    for tokens in (3, 2):
        cache.add(cache.reserve(tokens), tokens)
    cache.grow()
    plans["A"] = planner.plan()
    cache.add(cache.reserve(1), 1)
    cache.grow()
    plans["B"] = planner.plan()
    cache.remove(2)
    plans["C"] = planner.plan()
    # The next request has its blocks before the one whose row it takes gives its own back.
    blocks = cache.reserve(4)
    cache.remove(1)
    cache.add(blocks, 4)
    plans["D"] = planner.plan()
    return cache, plans


def plan_table(plans: dict[str, DecodePlan]) -> pd.DataFrame:
    """What each plan says of its live rows, a row a plan: lengths, slots written, slots read."""
    return pd.DataFrame(
        {
            name: {
                "context_lens": plan.context_list,
                "write_slots": plan.write_list,
                "slot_mapping": plan.slot_mapping.tolist(),
            }
            for name, plan in plans.items()
        }
    ).T


def check_is_stale(is_stale: Callable[[DecodePlan, PagedCache], Any]) -> str:
    """Lesson 02: ``is_stale(plan, cache)`` on the plans of `four_plans`."""
    reasons = {
        "A": "it is a step old: the lengths differ",
        "B": "three rows ran when it was made, two run now",
        "C": "its lengths are right, but row 1 belongs to another sequence now, in other blocks",
    }
    cache, plans = four_plans()
    for name, plan in plans.items():
        said = is_stale(plan, cache)
        if not isinstance(said, bool):
            return f"plan {name}: {said!r}; True or False was wanted"
        if said and name not in reasons:
            return f"plan {name}: called stale, and it says what the cache says"
        if not said and name in reasons:
            return f"plan {name}: called current; {reasons[name]}"
    return "right: D alone is current"
