"""The figures of lesson 05: what writing in place saves and costs, and the step's inputs before and after."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.figures.diagrams import Canvas
from nanoserve_lab.figures.over_steps import checked, draw, ranges
from nanoserve_lab.figures.registry import figure
from nanoserve_lab.figures.style import Palette, Picture
from nanoserve_lab.inputs import DecodeInputs, check_one_set_covers, input_bytes, per_shape_bytes
from nanoserve_lab.model.tiny import TINY
from nanoserve_lab.plan import DecodePlan, Planner, check_plan_current
from nanoserve_lab.slots import SlotTable, check_window_intact
from nanoserve_lab.unsound import Unsound

_COUNTS = {"fresh": "fresh_allocations", "buffered": "buffered_allocations"}
#: What a plan hands the forward beside the slot mapping: the tensors that are built anew without buffers.
PLANNED = ("positions", "write_slots", "context_lens")
#: The engine whose bytes the diagram prices: rows, context, width multiple.
PRICED = (256, 8192, 2048)


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    return checked(frame, _COUNTS, "allocations_over_steps")


def _allocations_alt(frame: pd.DataFrame) -> str:
    frame = _checked(frame)
    last = frame[frame["steps"] == frame["steps"].max()].iloc[0]
    return (
        "Two charts over the steps of a run. Left, tensors allocated for inputs: a straight line rises to "
        f"{last.fresh_allocations:,} at {last.steps} steps for fresh tensors; the line for buffers lies at "
        f"{last.buffered_allocations:,}. Right, planning time with buffers over planning time with fresh tensors, a "
        f"line for each number of rows, and a dotted line at 1, where both take the same time: {ranges(frame)}."
    )


@figure(
    name="allocations_over_steps",
    data="day-53-inputbench.csv",
    caption=(
        "Planning with fresh tensors and with buffers that are written in place: the tensors allocated, and the time "
        "of one over the other."
    ),
    alt=_allocations_alt,
    size=(7.0, 3.5),
)
def allocations_over_steps(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Left: tensors allocated over the steps, fresh and buffered. Right: planning time, buffered over fresh, by rows.

    ``frame`` has a row per number of ``rows`` (three at most) and ``steps`` with ``fresh_allocations``,
    ``buffered_allocations`` (the same for all rows) and ``ratio`` (of times).
    """
    draw(picture, _checked(frame), palette, _COUNTS, "tensors allocated", "planning time, buffered / fresh")


@dataclass(frozen=True)
class InputsRun:
    """Three steps of three rows, planned fresh and in buffers of 6 rows, padded to 4; all plans are kept.

    The addresses are numbered in the order in which they first appear, a list a step: of the tensors of `PLANNED`
    where they are fresh, of ``input_ids`` and these where they are buffered. ``verdicts`` says of both gates whether
    they refuse the first buffered plan after the last step, without and with its snapshots.
    """

    inputs: DecodeInputs
    fresh: list[DecodePlan]
    buffered: list[DecodePlan]
    fresh_addresses: list[list[int]]
    buffered_addresses: list[list[int]]
    lengths: list[list[int]]
    snapshot: list[int]
    verdicts: dict[bool, list[bool]]


def inputs_run() -> InputsRun:
    """The run that the diagram draws: block size 4, a fourth row that ends before the first step and leaves its token
    in the buffer."""
    table, inputs, buckets = SlotTable(6, 16), DecodeInputs(6), BucketSet(6, 16, 8)
    cache = PagedCache(KVPool(TINY, 25, 4, torch.float32, "cpu"), 6, 16, table)
    for length in (3, 3, 2, 3):
        cache.add(cache.reserve(length), length)
    inputs.input_ids.write([31, 8, 17, 42])
    cache.remove(3)
    planners = Planner(cache, table, buckets), Planner(cache, table, buckets, inputs)
    plans: tuple[list[DecodePlan], list[DecodePlan]] = ([], [])
    lengths = []
    ids = []
    for sampled in ((5, 23, 40), (12, 9, 3), (27, 6, 50)):
        cache.grow()
        lengths.append(cache.lengths[: cache.rows].tolist())
        for planner, made in zip(planners, plans, strict=True):
            made.append(planner.plan())
        ids.append(inputs.input_ids.write(torch.tensor(sampled), window=4))
    held = plans[1][0]
    blind = replace(held, context_snapshot=None, write_snapshot=None)
    verdicts = {
        seen: [_refuses(check_plan_current, plan, cache), _refuses(check_window_intact, plan, table, cache)]
        for seen, plan in ((False, blind), (True, held))
    }
    fresh, buffered = ([[getattr(plan, name) for name in PLANNED] for plan in made] for made in plans)
    buffered = [[tokens, *tensors] for tokens, tensors in zip(ids, buffered, strict=True)]
    return InputsRun(inputs, *plans, _numbered(fresh), _numbered(buffered), lengths, held.context_list, verdicts)


def _numbered(steps: list[list[Tensor]]) -> list[list[int]]:
    places: dict[int, int] = {}
    return [[places.setdefault(tensor.data_ptr(), len(places) + 1) for tensor in tensors] for tensors in steps]


def _refuses(gate: object, *arguments: object) -> bool:
    try:
        gate(*arguments)  # type: ignore[operator]
    except Unsound:
        return True
    return False


@figure(
    name="persistent_decode_inputs",
    data=None,
    caption=(
        "A replay takes no arguments, so a decode step's inputs are buffers that are written in place. What shares "
        "their storage is no witness any more; a snapshot on the host is one."
    ),
    alt=(
        "Four panels. Upper left, fresh tensors: positions, write_slots and context_lens of three steps lie at nine "
        "addresses, numbered 1 to 9; a frame around the first step, where the recording was made, holds 1, 2 and 3. "
        "Upper right, the same with buffers of six rows: four buffers, and a frame around their first four rows, the "
        "window. The fourth row is padded: its input_ids still hold an old token, 42, its position is 0, its write "
        "slot 0 is the sink and its length is 1. The addresses are the same in all three steps. Lower left, a held "
        "plan: when it is made, the cache, the plan's context_lens and its snapshot all say 4, 4, 3; two steps later "
        "cache and context_lens say 6, 6, 5 and the snapshot says 4, 4, 3. Without the snapshots check_plan_current "
        "and check_window_intact agree, with them both refuse. Lower right, windows of 1, 2, 4 and 8 rows are "
        "prefixes of one buffer, so one set serves every shape. Bytes at 256 rows and 8,192 tokens: one set 8,192; a "
        "set for each of 36 shapes 65,408, 8.0 times as much; the slot table 16,777,216, 2,048 times."
    ),
    size=(7.0, 6.7),
)
def persistent_decode_inputs(picture: Picture, data: None, palette: Palette) -> None:
    """A step's inputs fresh, in buffers, as a witness and as bytes: four panels, read from a run of three steps."""
    canvas, run = Canvas.over(picture, palette), inputs_run()
    canvas.quarters(
        "A replay takes no arguments: it reads where the recording read",
        "Fresh: three new tensors a step",
        "Buffers: written in place",
        "A held plan: who can still refuse?",
        "How many sets? One",
    )
    _fresh(canvas, run)
    _buffers(canvas, run)
    _witness(canvas, run)
    _sets(canvas)


def _fresh(canvas: Canvas, run: InputsRun) -> None:
    for step, (plan, places) in enumerate(zip(run.fresh, run.fresh_addresses, strict=True)):
        x = 1.12 + step * 0.79
        canvas.text(x + 0.33, 5.76, f"step {step + 1}", va="center_baseline")
        for at, (name, place) in enumerate(zip(PLANNED, places, strict=True)):
            y = 5.34 - at * 0.5
            if step == 0:
                canvas.text(0.16, y + 0.1, name, ha="left", va="center_baseline")
            _cells(canvas, x, y, getattr(plan, name)[: plan.live], 0.22)
            canvas.text(x + 0.33, y - 0.1, f"address {place}", size=8.5, color=canvas.palette.muted)
    canvas.axes.add_patch(Rectangle((1.05, 4.14), 0.79, 1.75, fill=False, ec=canvas.palette.warn, lw=2.2, ls="--"))
    known = {place for places in run.fresh_addresses for place in places}
    canvas.text(0.16, 3.93, f"{len(known)} addresses in 3 steps. The frame is what was", ha="left")
    first = ", ".join(map(str, run.fresh_addresses[0]))
    canvas.text(0.16, 3.73, f"recorded: a replay reads {first} again, and", ha="left")
    canvas.text(0.16, 3.53, "never sees what steps 2 and 3 were handed.", ha="left")


def _buffers(canvas: Canvas, run: InputsRun) -> None:
    palette, size, left, top = canvas.palette, 0.24, 4.54, 5.34
    rows, window = run.inputs.max_rows, len(run.buffered[-1].rows)
    live = run.buffered[-1].live
    head = top + 0.42
    words = {"input_ids": "an old token", "positions": "0", "write_slots": "0, the sink", "context_lens": "length 1"}
    for row in range(rows):
        canvas.text(left + (row + 0.5) * size, head, str(row), size=8.5, color=palette.muted, va="center_baseline")
    canvas.text(left - 0.08, head, "row", size=8.5, color=palette.muted, ha="right", va="center_baseline")
    for at, (name, buffer) in enumerate(run.inputs.buffers.items()):
        y = top - at * 0.33 + 0.08
        canvas.text(3.64, y + 0.1, name, ha="left", va="center_baseline")
        _cells(canvas, left, y, buffer.buffer, size, live)
        canvas.text(left + rows * size + 0.06, y + 0.1, words[name], size=8.5, ha="left", va="center_baseline")
    canvas.axes.add_patch(
        Rectangle((left - 0.03, top - 0.97), window * size + 0.06, 1.31, fill=False, ec=palette.warn, lw=2.2)
    )
    known = {place for places in run.buffered_addresses for place in places}
    canvas.text(left + rows * size + 0.06, head, f"padded row {live}", size=8.5, ha="left", va="center_baseline")
    canvas.text(3.64, 4.13, f"Frame: the window of {window} rows, {live} of them live.", ha="left")
    canvas.text(3.64, 3.93, f"{len(known)} addresses in 3 steps: a replay reads the", ha="left")
    canvas.text(3.64, 3.73, "newest step. A padded row may inherit a", ha="left")
    canvas.text(3.64, 3.53, "token; a slot or a length it may not.", ha="left")


def _witness(canvas: Canvas, run: InputsRun) -> None:
    palette = canvas.palette
    held = run.buffered[0]
    live = held.live
    lines = (
        ("cache", run.lengths[0], run.lengths[-1]),
        ("context_lens", run.lengths[0], held.context_lens[:live].tolist()),
        ("snapshot", run.snapshot[:live], held.context_list[:live]),
    )
    for x, text in ((1.3, "when made"), (2.55, "2 steps later")):
        canvas.text(x + 0.33, 2.58, text, va="center_baseline")
    for at, (name, before, after) in enumerate(lines):
        y = 2.2 - at * 0.33
        canvas.text(0.16, y + 0.1, name, ha="left", va="center_baseline")
        _cells(canvas, 1.3, y, torch.tensor(before), 0.22)
        _cells(canvas, 2.55, y, torch.tensor(after), 0.22)
        canvas.arrow((2.06, y + 0.1), (2.47, y + 0.1))
    canvas.axes.add_patch(Rectangle((2.48, 1.82), 0.8, 0.63, fill=False, ec=palette.warn, lw=2.2, ls="--"))
    canvas.text(1.53, 1.28, "without snapshots", ha="left", va="center_baseline", size=8.5)
    canvas.text(2.78, 1.28, "with", ha="left", va="center_baseline", size=8.5)
    for at, gate in enumerate(("check_plan_current", "check_window_intact")):
        y = 1.05 - at * 0.2
        canvas.text(0.16, y, gate, ha="left", va="center_baseline", size=8.5)
        for x, seen in ((1.53, False), (2.78, True)):
            refused = run.verdicts[seen][at]
            canvas.text(x, y, "refuses" if refused else "agrees, always", ha="left", va="center_baseline", size=8.5,
                        weight="bold", color=palette.accent if refused else palette.warn)  # fmt: skip
    canvas.text(0.16, 0.52, "The buffer follows the cache, so it agrees with it.", ha="left")
    canvas.text(0.16, 0.32, "A witness that is shared storage is none.", ha="left")


def _sets(canvas: Canvas) -> None:
    palette, size, left = canvas.palette, 0.3, 3.75
    drawn = BucketSet(8, 16, 8)
    canvas.text(3.64, 2.62, "Each shape's window is a prefix of one buffer:", ha="left")
    for row in range(drawn.max_rows):
        canvas.axes.add_patch(Rectangle((left + row * size, 2.28), size, 0.2, fc=palette.paper, ec=palette.ink, lw=0.8))
    for at, rows in enumerate(drawn.rows):
        y, right = 2.16 - at * 0.2, left + rows * size
        canvas.axes.plot([left, left, right, right], [y + 0.06, y, y, y + 0.06], color=palette.ink, lw=1.3, marker="",
                         ls="-")  # fmt: skip
        canvas.text(right + 0.06, y + 0.02, f"{rows} row{'s' * (rows > 1)}", size=8.5, ha="left", va="center")
    rows, context, multiple = PRICED
    shapes = BucketSet(rows, context, multiple).shapes()
    inputs, table = DecodeInputs(rows), SlotTable(rows, context)
    check_one_set_covers(inputs, shapes)
    one = input_bytes(rows)
    lines = (
        ("one set of 4 inputs", one),
        (f"a set for each of {len(shapes)} shapes", per_shape_bytes(shapes)),
        ("the slot table", table.data.nbytes),
    )
    canvas.text(3.64, 1.2, f"bytes, {rows} rows and {context:,} tokens", ha="left", size=8.5, color=palette.muted)
    for at, (name, size_) in enumerate(lines):
        y = 0.98 - at * 0.2
        canvas.text(3.64, y, name, ha="left", va="center_baseline")
        canvas.text(6.26, y, f"{size_:,}", ha="right", va="center_baseline", weight="bold")
        if size_ != one:
            times = f"{size_ / one:,.{1 if size_ < 100 * one else 0}f}x"
            canvas.text(6.85, y, times, ha="right", va="center_baseline")
    canvas.text(3.64, 0.32, "Kept for their address, not for their size.", ha="left")


def _row_fill(palette: Palette, row: int) -> str:
    return palette.families[("elementwise", "norm", "embedding", "sampling")[row % 4]]


def _cells(canvas: Canvas, x: float, y: float, values: Tensor, size: float, live: int | None = None) -> None:
    """A row of cells with their numbers, a colour a row of the batch; rows from ``live`` on are blank."""
    for row, value in enumerate(values.flatten().tolist()):
        fill = _row_fill(canvas.palette, row) if live is None or row < live else canvas.palette.paper
        canvas.axes.add_patch(Rectangle((x + row * size, y), size, 0.2, fc=fill, ec=canvas.palette.ink, lw=0.8))
        canvas.text(x + (row + 0.5) * size, y + 0.1, str(value), size=8.5, color=canvas.palette.text_on(fill),
                    va="center_baseline")  # fmt: skip
