"""The figures of the slot table: planning time by context, and the table before and after a row finishes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nanoserve_lab.bench.plan import three_rows
from nanoserve_lab.figures.diagrams import Canvas
from nanoserve_lab.figures.registry import FigureError, by_rows, figure, require
from nanoserve_lab.figures.style import Palette, Picture

PLAN_COLUMNS = ("rows", "context", "gather_us", "window_us")
_ARMS = (("gather", "gather_us"), ("window", "window_us"))


def _planning(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    require(frame, PLAN_COLUMNS, name)
    if (frame[list(PLAN_COLUMNS)] <= 0).any(axis=None):
        raise FigureError(f"{name}: rows, context and both times must be positive")
    if frame.duplicated(["rows", "context"]).any():
        raise FigureError(f"{name}: two lines for one number of rows and context")
    if frame["rows"].nunique() > 3:
        raise FigureError(f"{name}: at most 3 numbers of rows, saw {frame['rows'].nunique()}")
    return frame.sort_values(["rows", "context"]).reset_index(drop=True)


def _planning_alt(frame: pd.DataFrame) -> str:
    frame = _planning(frame, "planning_time")
    first, last = int(frame["context"].min()), int(frame["context"].max())
    parts = []
    for rows, part in by_rows(frame):
        ends = part[part["context"].isin((first, last))].sort_values("context")
        told = [f"{name} from {ends[c].iloc[0]:.0f} to {ends[c].iloc[-1]:.0f} microseconds" for name, c in _ARMS]
        parts.append(f"with {rows} row{'s' * (rows > 1)}, {' and '.join(told)}")
    return (
        "Host time to plan one decode step against context, both axes logarithmic, a solid line for the gathered "
        f"rectangle and a dashed one for the window at each number of rows. From {first:,} to {last:,} tokens: "
        f"{'; '.join(parts)}."
    )


@figure(
    name="planning_time",
    data="plan.csv",
    caption=(
        "Host time to plan one decode step. A rectangle gathered anew costs more with every token of context; a window "
        "on the slot table does not."
    ),
    alt=_planning_alt,
    size=(7.0, 3.9),
)
def planning_time(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Host time to plan a step against context: for each number of rows a gather (solid) and a window (dashed).

    ``frame`` has a row per number of ``rows`` (three at most) and ``context`` (tokens) with ``gather_us`` and
    ``window_us`` (microseconds).
    """
    frame = _planning(frame, "planning_time")
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    axes = picture.add_axes((0.8 / width, 0.78 / height, 1 - 2.15 / width, 1 - 0.95 / height))
    contexts, times = sorted(frame["context"].unique()), frame[["gather_us", "window_us"]].to_numpy()
    axes.set(xscale="log", yscale="log", xlim=(contexts[0] / 1.15, contexts[-1] * 1.15))
    axes.set_ylim(times.min() / 1.5, times.max() * 1.6)
    colours = (palette.families["matmul"], palette.families["norm"], palette.families["attention"])
    ends = []
    for (rows, part), colour, marker in zip(by_rows(frame), colours, "os^", strict=False):
        for name, column in _ARMS:
            axes.plot(part["context"], part[column], color=colour, marker=marker, ls="-" if name == "gather" else "--",
                      mfc=colour if name == "gather" else palette.paper)  # fmt: skip
            ends.append((float(part[column].iloc[-1]), f"{name}, {rows} row{'s' * (rows > 1)}", colour))
    _end_labels(axes, ends, height - 0.95)
    axes.set_xlabel("context of each row, tokens")
    axes.set_ylabel("time to plan one step, µs")
    axes.set_xticks(contexts, [f"{int(context):,}" for context in contexts])
    axes.xaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.yaxis.set_minor_formatter("")


def _end_labels(axes: Axes, ends: list[tuple[float, str, str]], inches: float) -> None:
    """Each line's name to the right of its end, moved apart where two ends are closer than a line of text."""
    low, high = np.log(axes.get_ylim())
    places = sorted(((np.log(value) - low) / (high - low), text, colour) for value, text, colour in ends)
    step = 0.185 / inches
    heights = np.array([place for place, _, _ in places])
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + step)
    # What was pushed over the top comes down again, and takes the ones below it along.
    heights[-1] = min(heights[-1], 1.0)
    for index in range(len(heights) - 2, -1, -1):
        heights[index] = min(heights[index], heights[index + 1] - step)
    for at, (_, text, colour) in zip(heights, places, strict=True):
        axes.text(1.015, at, text, transform=axes.transAxes, va="center", ha="left", size=10, color=colour)


@figure(
    name="finished_row",
    data=None,
    caption=(
        "The prefix rule. Row 0 finishes: the last row in use takes its place, its slots with it, and the cells it "
        "leaves are the sink again. The window is the frame."
    ),
    alt=(
        "Two tables of 4 rows and 12 columns side by side, each cell with its number. Before: row 0 holds the slots 4, "
        "5, 6, 7, 12, 13 of sequence A, row 1 the slots 8, 9, 10, 11, 16, 17 of B, row 2 the slots 20, 21, 22 of C; "
        "every other cell is 0, and a frame, the window, encloses three rows and six columns from the upper left "
        "corner. After A finished: row 0 holds 20, 21, 22 and then zeros, row 1 is unchanged, row 2 is all zeros, and "
        "the frame encloses two rows and six columns from the same corner."
    ),
    size=(7.0, 2.35),
)
def finished_row(picture: Picture, data: None, palette: Palette) -> None:
    """A slot table of 4 x 12 before and after its row 0 finishes, drawn from a real `SlotTable`; the window framed."""
    rows = three_rows()
    assert rows.table is not None
    axes, height = Canvas.over(picture, palette).axes, picture.get_size_inches()[1]
    fills = dict(zip("ABC", (palette.families[f] for f in ("elementwise", "embedding", "norm")), strict=True))
    owner = {int(slot): name for row, name in enumerate("ABC") for slot in rows.cache.slots(row)}
    _table(axes, palette, 0.5, rows.table.mirror, "ABC", _window_shape(rows.cache.lengths), owner, fills)
    axes.text(0.5, height - 0.22, "before", weight="bold", va="center")
    rows.cache.remove(0)
    _table(axes, palette, 4.12, rows.table.mirror, "CB", _window_shape(rows.cache.lengths), owner, fills)
    axes.text(4.12, height - 0.22, "after A finished", weight="bold", va="center")
    axes.annotate("", (3.9, 1.07), (3.32, 1.07), arrowprops={
        "arrowstyle": "-|>", "color": palette.ink, "lw": 1.4, "shrinkA": 6, "shrinkB": 10, "mutation_scale": 11,
    })  # fmt: skip
    axes.text(0.5, 0.26, "0 is the sink: the cells that no sequence owns.  Frame: the window of the next read.",
              size=9.5, color=palette.muted, va="center")  # fmt: skip


def _window_shape(lengths: np.ndarray) -> tuple[int, int]:
    return int((lengths > 0).sum()), int(lengths.max())


def _table(
    axes: Axes, palette: Palette, left: float, cells: np.ndarray, names: str, window: tuple[int, int],
    owner: dict[int, str], fills: dict[str, str],
) -> None:  # fmt: skip
    """The cells of a table, its first row on top, with its rows' sequences and the window's frame."""
    wide, high, top = 0.232, 0.34, 1.92
    for (row, column), slot in np.ndenumerate(cells):
        x, y = left + column * wide, top - (row + 1) * high
        fill = fills[owner[slot]] if slot else palette.paper
        axes.add_patch(Rectangle((x, y), wide, high, fc=fill, ec=palette.line, lw=0.7))
        ink = palette.text_on(fill) if slot else palette.muted
        axes.text(x + wide / 2, y + high / 2, str(slot), ha="center", va="center_baseline", size=9, color=ink)
    for row in range(len(cells)):
        text = f"{names[row]}, {row}" if row < len(names) else f"{row}"
        axes.text(left - 0.07, top - (row + 0.5) * high, text, ha="right", va="center_baseline", size=9.5)
    rows, columns = window
    axes.add_patch(
        Rectangle((left, top - rows * high), columns * wide, rows * high, fill=False, ec=palette.warn, lw=2.4)
    )
