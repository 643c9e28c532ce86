"""Lesson 03: the prefix rule on bare arrays, and the bytes that gather and window write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve_lab.bench.plan import planning
from nanoserve_lab.slots import SlotTable

IntArray = NDArray[np.int64]
Move = Callable[[IntArray, IntArray, int, int], None]

#: The lengths of the rows in use, and the row that finishes: longer, shorter and as long as the last, and the last.
_FINISHES = (((4, 3, 4), 0), ((2, 3, 5), 0), ((6, 3, 2), 0), ((3, 6, 2), 1), ((3, 4), 1))


def check_move(move: Move) -> str:
    """Lesson 03: ``move(table, lengths, source, target)``, in place, against `SlotTable.move`.

    ``table`` is int64 ``[rows, columns]``, ``lengths`` int64 ``[rows]``.
    """
    for lengths, target in _FINISHES:
        source = len(lengths) - 1
        wanted = _filled(lengths)
        before, cells, counts = wanted.mirror.copy(), wanted.mirror.copy(), wanted.lengths.copy()
        wanted.move(source, target)
        case = f"rows of {', '.join(map(str, lengths))} tokens, row {target} finishes"
        try:
            move(cells, counts, source, target)
        except Exception as error:
            return f"{case}: {type(error).__name__}: {error}"
        said = _difference(before, cells, counts, wanted, source, target)
        if said:
            return f"{case}: {said}"
    return f"right in {len(_FINISHES)} cases, the last row itself among them"


def _filled(lengths: tuple[int, ...]) -> SlotTable:
    table, start = SlotTable(len(lengths) + 1, 8), 4
    for row, tokens in enumerate(lengths):
        table.fill(row, np.arange(start, start + tokens))
        start += 8
    return table


def _difference(
    before: IntArray, cells: IntArray, counts: IntArray, wanted: SlotTable, source: int, target: int
) -> str | None:
    right = wanted.mirror
    for row in range(len(right)):
        if row in (source, target) or np.array_equal(cells[row], right[row]):
            continue
        return f"row {row} is {cells[row].tolist()}, it was {before[row].tolist()} and had no part in this"
    new = int(wanted.lengths[target])
    if not np.array_equal(cells[target], right[target]):
        if source == target:
            return f"row {target} is the last row itself; it ends empty, not as {cells[target].tolist()}"
        if np.array_equal(cells[target], before[target]):
            return f"row {target} still holds the slots of the sequence that finished"
        if np.array_equal(cells[target, :new], right[target, :new]):
            column = new + int(np.flatnonzero(cells[target, new:])[0])
            return f"row {target}, column {column} still holds slot {int(cells[target, column])}: a stale tail"
        return f"row {target} is {cells[target].tolist()}, wanted {right[target].tolist()}"
    if not np.array_equal(cells[source], right[source]):
        return f"row {source} moved away and still holds {cells[source].tolist()}, wanted the sink, 0"
    if not np.array_equal(counts, wanted.lengths):
        return f"lengths {counts.tolist()}, wanted {wanted.lengths.tolist()}"
    return None


def check_bytes(predict: Callable[[int, int, int], Any]) -> str:
    """Lesson 03: ``predict(rows, context, steps)``, a pair, against the bytes that gather and window write for the read
    rectangle over a run, counted."""
    for rows, context, steps in ((2, 3, 1), (2, 3, 4), (3, 7, 5)):
        counted = _counted(rows, context, steps)
        said = predict(rows, context, steps)
        case = f"{rows} rows from {context} tokens, {steps} step{'s' * (steps > 1)}"
        if not (isinstance(said, tuple) and len(said) == 2 and all(isinstance(value, int) for value in said)):
            return f"{case}: {said!r}; a pair of whole numbers was wanted, gather and window"
        for name, value, wanted in zip(("gather", "window"), said, counted, strict=True):
            if value != wanted:
                hint = _hint(name, value, wanted, rows, context, steps)
                return f"{case}: {name} {value:,}, counted {wanted:,}{hint}"
    return "right for three runs"


def _counted(rows: int, context: int, steps: int) -> tuple[int, int]:
    """Bytes of the rectangles gathered, and of the table's cells that changed, over ``steps`` steps."""
    gathered, window = (planning([context] * rows, context + steps, on, block_size=4) for on in (False, True))
    gather_bytes = sum(gathered.step().slot_mapping.nbytes for _ in range(steps))
    assert window.table is not None
    before = window.table.mirror.copy()
    for _ in range(steps):
        window.step()
    return gather_bytes, int((before != window.table.mirror).sum()) * before.itemsize


def _hint(name: str, said: int, wanted: int, rows: int, context: int, steps: int) -> str:
    hints = {
        wanted // 8: "those are cells; a cell is 8 bytes",
        8 * rows * steps * (context + 1): "the rectangle is a column wider in every step",
        wanted - 8 * rows * steps: "the token that a step writes is read in the same step",
        8 * rows * (context + steps): "that is one rectangle, the last; every step writes one",
    }
    if name == "window":
        hints = {
            wanted // 8: "those are cells; a cell is 8 bytes",
            8 * steps: "that is one row; every row grows",
            8 * rows: "that is one step",
            8 * rows * (context + steps): "the prompt's cells were written before the first step",
        }
    return f": {hints[said]}" if said in hints else ""
