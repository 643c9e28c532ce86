"""The figures of lesson 02: graphs made while contexts grow, and a plan's numbers between planner and forward."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from nanoserve_lab.bench.recompiles import ARMS, two_row_plan
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import SINK_SLOT
from nanoserve_lab.figures.diagrams import Canvas
from nanoserve_lab.figures.labels import Labels
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.style import Palette, Picture
from nanoserve_lab.plan import DecodePlan

GRAPHS_COLUMNS = ("context", "arm", "graphs")
#: How often the compiler compiles one function before it gives up.
COMPILER_LIMIT = 8
#: Each arm in the words of the page.
ARM_WORDS = {
    "block tables": "block tables in the forward",
    "plan, static": "a plan, every shape its own graph",
    "plan, dynamic": "a plan, sizes may change",
}


def _arms(frame: pd.DataFrame, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Contexts and graphs of each arm in ``frame``, both rising."""
    require(frame, GRAPHS_COLUMNS, name)
    unknown = sorted(set(frame["arm"]) - set(ARMS))
    if unknown:
        raise FigureError(f"{name}: unknown arm {', '.join(map(repr, unknown))}; wanted {', '.join(ARMS)}")
    found = {}
    for arm in ARMS:
        part = frame[frame["arm"] == arm].sort_values("context")
        if part.empty:
            continue
        contexts, graphs = part["context"].to_numpy(), part["graphs"].to_numpy()
        if graphs[0] < 1 or (np.diff(graphs) < 0).any() or (np.diff(contexts) <= 0).any():
            raise FigureError(f"{name}: {arm}: graphs are counted from 1 and never fall, one count a context")
        found[arm] = contexts, graphs
    return found


def _graphs_alt(frame: pd.DataFrame) -> str:
    arms = _arms(frame, "graphs_by_addressing")
    low, high = int(frame["context"].min()), int(frame["context"].max())
    ends = "; ".join(f"{ARM_WORDS[arm]}: {graphs[-1]}" for arm, (_, graphs) in arms.items())
    return (
        f"Graphs compiled so far against the context of the longest row, from {low} to {high} tokens, the count on a "
        f"logarithmic axis. At the right end: {ends}. A dotted line marks {COMPILER_LIMIT}, where the compiler gives "
        "up unless its limit is raised."
    )


@figure(
    name="graphs_by_addressing",
    data="recompiles.csv",
    caption=(
        "How often the decode forward is compiled while two rows grow token by token: over Python state, over a plan "
        "whose shapes are static, and over a plan whose sizes may change. The compiler's limit is lifted."
    ),
    alt=_graphs_alt,
    size=(7.0, 3.6),
)
def graphs_by_addressing(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Graphs made so far over the context, a line an arm, the count on a logarithmic axis.

    ``frame`` has a row a step and arm: ``context`` (tokens of the longest row), ``arm`` (one of
    `bench.recompiles.ARMS`), ``graphs`` (compiled so far).
    """
    arms = _arms(frame, "graphs_by_addressing")
    # Fixed axes rather than a computed layout: the labels' places are worked out in inches.
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    axes = picture.add_axes((0.62 / width, 0.78 / height, 1 - 0.8 / width, 1 - 0.9 / height))
    low, high = frame["context"].min(), frame["context"].max()
    margin = max(1.0, 0.02 * (high - low))
    axes.set(yscale="log", xlim=(low - margin, high + margin), ylim=(0.7, 3 * max(COMPILER_LIMIT, frame.graphs.max())))
    axes.plot([low - margin, high + margin], [COMPILER_LIMIT] * 2, color=palette.muted, ls=":", marker="", lw=1.4)
    looks = {
        "block tables": (palette.warn, "--"),
        "plan, static": (palette.families["norm"], "-."),
        "plan, dynamic": (palette.accent, "-"),
    }
    xs = np.linspace(low, high, 200)
    points = [(x, COMPILER_LIMIT) for x in xs]
    for arm, (contexts, graphs) in arms.items():
        colour, line = looks[arm]
        axes.plot(contexts, graphs, color=colour, ls=line, marker="", lw=2.2, drawstyle="steps-post")
        points += [*zip(xs, np.interp(xs, contexts, graphs), strict=True)]
    labels = Labels(axes, points)
    for arm, (contexts, graphs) in arms.items():
        places = [*zip(contexts.tolist(), graphs.tolist(), strict=True)][::-1][len(contexts) // 4 :: 4]
        labels.add(f"{ARM_WORDS[arm]}: {graphs[-1]}", places or [(high, graphs[-1])], looks[arm][0], weight="bold")
    text = f"the compiler's limit, {COMPILER_LIMIT}"
    labels.add(text, [(x, COMPILER_LIMIT) for x in xs[::-5]], palette.muted)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("context of the longest row, tokens")
    axes.set_ylabel("graphs compiled so far")


def _plan_alt(data: None) -> str:
    cache, plan = two_row_plan()
    rows = []
    for row in range(cache.rows):
        length, slot = plan.context_list[row], plan.write_list[row]
        read = plan.slot_mapping[row, :length].tolist()
        blocks = " and ".join(map(str, cache.owned(row)))
        rows.append(
            f"Row {row} owns blocks {blocks} and has {length} tokens: position {length - 1}, written to slot {slot}, "
            f"reading slots {', '.join(map(str, read))}."
        )
    return (
        "One decode step of two rows in three columns. On the left, on the host, the planner with the block tables and "
        "lengths. In the middle the four tensors it makes, with their numbers, and the token ids. On the right the "
        f"forward over the pool's slots, of which those written now are framed and slot {SINK_SLOT} is the sink. "
        f"{' '.join(rows)} What a row does not fill of its {plan.shape[1]} columns is the sink's slot. Only the "
        "tensors cross from left to right."
    )


@figure(
    name="plan_between",
    data=None,
    caption="One decode step of two rows, block size 2: Python state stays with the planner, the forward sees tensors.",
    alt=_plan_alt,
    size=(7.0, 3.5),
)
def plan_between(picture: Picture, data: None, palette: Palette) -> None:
    """The planner's state, the tensors of its plan and the slots of the pool, all read from a real plan of two rows."""
    cache, plan = two_row_plan()
    canvas, height = Canvas.over(picture, palette), picture.get_size_inches()[1]
    for left, right, name in (
        (0.06, 1.78, "host: the planner"),
        (2.06, 4.5, "tensors: the plan"),
        (4.78, 6.94, "device: the forward"),
    ):
        canvas.shade(left, 0.1, right - left, height - 0.2)
        canvas.text(left + 0.09, height - 0.15, name, size=10, color=palette.muted, ha="left", va="top", weight="bold")
    canvas.arrow((1.78, 1.75), (2.06, 1.75))
    canvas.arrow((4.5, 1.75), (4.78, 1.75))
    fills = [palette.families["elementwise"], palette.families["norm"]]
    _planner(canvas, cache, fills)
    _tensors(canvas, plan, fills)
    _pool(canvas, cache, plan, fills)


def _planner(canvas: Canvas, cache: PagedCache, fills: list[str]) -> None:
    for row in range(cache.rows):
        y = 2.62 - row * 1.12
        canvas.text(0.15, y + 0.13, f"row {row}", ha="left", weight="bold")
        canvas.text(0.15, y - 0.19, "blocks", ha="left")
        _cells(canvas, 0.95, y - 0.29, [cache.owned(row)], [[fills[row]] * len(cache.owned(row))])
        canvas.text(0.15, y - 0.49, "length", ha="left")
        canvas.text(0.98, y - 0.49, f"{cache.lengths[row]} tokens", ha="left")
    canvas.text(0.15, 0.5, "Python and NumPy:", ha="left", color=canvas.palette.muted, size=8.5)
    canvas.text(0.15, 0.3, "grows in every step", ha="left", color=canvas.palette.muted, size=8.5)


def _tensors(canvas: Canvas, plan: DecodePlan, fills: list[str]) -> None:
    paper, by_row = canvas.palette.paper, [[fill] for fill in fills]
    rectangle = [
        [fill if column < length else paper for column in range(plan.shape[1])]
        for fill, length in zip(fills, plan.context_list, strict=True)
    ]
    columns = ("positions", plan.positions), ("write_slots", plan.write_slots), ("context_lens", plan.context_lens)
    for index, (name, tensor) in enumerate(columns):
        y = 2.56 - index * 0.62
        canvas.text(2.15, y + 0.2, name, ha="left", va="center_baseline")
        _cells(canvas, 3.2, y, tensor.view(-1, 1).tolist(), by_row)
    canvas.text(2.15, 0.9, "slot_mapping", ha="left", va="center_baseline")
    _cells(canvas, 3.2, 0.7, plan.slot_mapping.tolist(), rectangle)
    canvas.text(2.15, 0.3, "and input_ids, the newest tokens", ha="left", color=canvas.palette.muted, size=8.5)


def _pool(canvas: Canvas, cache: PagedCache, plan: DecodePlan, fills: list[str]) -> None:
    palette, size = canvas.palette, cache.pool.block_size
    owner = {int(slot): row for row in range(cache.rows) for slot in cache.slots(row)}
    canvas.text(4.87, 2.82, "K/V pool, a slot a cell", ha="left", weight="bold")
    blocks = max(block for row in range(cache.rows) for block in cache.owned(row)) + 1
    for block in range(blocks):
        y = 2.44 - block * 0.3
        slots = range(block * size, (block + 1) * size)
        colours = [palette.muted if slot == SINK_SLOT else fills[owner[slot]] if slot in owner else palette.paper
                   for slot in slots]  # fmt: skip
        canvas.text(4.87, y + 0.1, f"block {block}", ha="left", va="center_baseline")
        _cells(canvas, 5.47, y, [list(slots)], [colours])
        for at, slot in enumerate(slots):
            if slot in plan.write_list:
                canvas.axes.add_patch(
                    Rectangle((5.47 + at * 0.3, y), 0.3, 0.2, fill=False, ec=palette.warn, lw=2.4, zorder=4)
                )
                canvas.text(6.14, y + 0.1, "written", ha="left", color=palette.warn, va="center_baseline")
        if SINK_SLOT in slots:
            canvas.text(6.14, y + 0.1, "the sink", ha="left", color=palette.muted, va="center_baseline")
    canvas.text(4.87, 0.72, "writes K and V there,", ha="left")
    canvas.text(4.87, 0.52, "reads the rectangle,", ha="left")
    canvas.text(4.87, 0.32, "looks nothing up", ha="left")


def _cells(canvas: Canvas, x: float, y: float, values: list[list[int]], fills: list[list[str]]) -> None:
    """Cells with their values, the first row on top; ``x`` and ``y`` are the lower left corner."""
    for line, (row, colours) in enumerate(zip(values[::-1], fills[::-1], strict=True)):
        for at, (value, fill) in enumerate(zip(row, colours, strict=True)):
            low = y + line * 0.2
            canvas.axes.add_patch(Rectangle((x + at * 0.3, low), 0.3, 0.2, fc=fill, ec=canvas.palette.ink, lw=0.8))
            ink = canvas.palette.text_on(fill)
            canvas.text(x + at * 0.3 + 0.15, low + 0.1, str(value), size=8.5, color=ink, va="center_baseline")
