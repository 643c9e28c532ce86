"""The figures of a closed set of shapes: what padding fills, what it costs, and how few shapes a run meets."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nanoserve_lab.bench.padding import OPEN
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.figures.diagrams import Canvas
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.style import Palette, Picture

PADDING_COLUMNS = (
    "width_multiple", "shapes", "live_cells", "ragged_cells", "row_cells", "width_cells", "waste", "rate_scale",
    "mean_rows",
)  # fmt: skip
SEEN_COLUMNS = ("width_multiple", "step", "seen", "max_rows", "max_context")

#: What a cell of a read rectangle is, and the family whose colour it takes.
CELLS = {
    "live": "matmul",
    "ragged": "elementwise",
    "padded rows": "attention",
    "past the longest": "embedding",
}
#: The colours of the loads, none of them a cell's, and their markers.
LOAD_FAMILIES, MARKERS = ("norm", "sampling", "other"), ("^", "s", "o", "D", "v")
#: The rows of the drawn rectangle, and the set that pads it.
DRAWN_ROWS = (11, 4, 7)
DRAWN_SET = (4, 16, 8)


def choose(frame: pd.DataFrame, rate_scale: float, width_multiple: int) -> pd.DataFrame:
    """``frame`` of `padding_against_graphs` with one load and width multiple ``chosen``, to be ringed and taken apart.

    Raises `FigureError` where the frame has no such line.
    """
    chosen = (frame["rate_scale"] == rate_scale) & (frame["width_multiple"] == width_multiple)
    if chosen.sum() != 1:
        raise FigureError(
            f"padding_against_graphs: {chosen.sum()} lines with rate_scale {rate_scale:g} and width_multiple "
            f"{width_multiple}, wanted one"
        )
    return frame.assign(chosen=chosen)


def _checked(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    name = "padding_against_graphs"
    require(frame, PADDING_COLUMNS, name)
    if frame.duplicated(["rate_scale", "width_multiple"]).any():
        raise FigureError(f"{name}: two lines of one load and width multiple")
    if "chosen" not in frame:
        busiest = frame[frame["rate_scale"] == frame["rate_scale"].max()].sort_values("shapes")
        frame = choose(frame, *busiest.iloc[len(busiest) // 2][["rate_scale", "width_multiple"]])
    if frame["chosen"].sum() != 1:
        raise FigureError(f"{name}: {frame['chosen'].sum()} chosen lines, wanted one")
    return frame.sort_values(["rate_scale", "shapes"]), frame[frame["chosen"]].iloc[0]


def _shares(line: pd.Series) -> dict[str, float]:
    cells = [line.live_cells, line.ragged_cells, line.row_cells, line.width_cells]
    return {name: count / sum(cells) for name, count in zip(CELLS, cells, strict=True)}


def _padding_alt(frame: pd.DataFrame) -> str:
    frame, chosen = _checked(frame)
    lines = [
        f"with {group['mean_rows'].iloc[0]:.0f} rows on average from {group['waste'].iloc[0]:.0%} at "
        f"{group['shapes'].iloc[0]} graphs down to {group['waste'].iloc[-1]:.0%} at {group['shapes'].iloc[-1]}"
        for _, group in frame.groupby("rate_scale")
    ]
    parts = ", ".join(f"{name} {share:.0%}" for name, share in _shares(chosen).items())
    return (
        "Left, the share of read cells that are padding against the number of graphs to record, on a logarithmic axis "
        f"with the width multiple above; a falling line for each load: {'; '.join(lines)}. One point is ringed, width "
        f"multiple {chosen.width_multiple} with {chosen.mean_rows:.0f} rows on average. Right, its cells as a stacked "
        f"column: {parts}."
    )


@figure(
    name="padding_against_graphs",
    data="padding.csv",
    caption=(
        "More graphs, less padding: by width multiple, for three loads of one trace. The column takes the ringed point "
        "apart."
    ),
    alt=_padding_alt,
    size=(7.0, 4.0),
)
def padding_against_graphs(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """The share of padded cells over the number of graphs, a line a load, and the cells of one point by what they are.

    ``frame`` is that of `bench.padding.by_load`. A bool column ``chosen`` (see `choose`) marks the point that is taken
    apart; without it that is the middle one of the busiest load.
    """
    frame, chosen = _checked(frame)
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    left = picture.add_axes((0.75 / width, 0.8 / height, 3.05 / width, 2.55 / height))
    colours = [palette.families[family] for family in LOAD_FAMILIES]
    least = -np.inf
    for at, (_, group) in enumerate(frame.groupby("rate_scale")):
        colour, percent = colours[at % len(colours)], group["waste"] * 100
        left.plot(group["shapes"], percent, color=colour, marker=MARKERS[at % len(MARKERS)], ls="-")
        least = max(least + 4, percent.iloc[-1])
        left.annotate(f"{group['mean_rows'].iloc[0]:.0f} rows", (group["shapes"].iloc[-1], least), (9, 0), size=10,
                      textcoords="offset points", va="center", color=colour, weight="bold",
                      annotation_clip=False)  # fmt: skip
    left.plot([chosen.shapes], [chosen.waste * 100], marker="o", ms=15, mfc="none", mec=palette.ink, mew=1.6)
    low = np.floor(frame["waste"].min() * 10 - 0.4) * 10
    left.set(xscale="log", xlim=(frame["shapes"].min() / 1.5, frame["shapes"].max() * 1.2), ylim=(max(0, low), 100))
    sizes = frame.drop_duplicates("shapes")
    left.set_xticks(sizes["shapes"], [f"{n}" for n in sizes["shapes"]])
    left.set_xticks([], minor=True)
    left.set_xlabel("graphs to record")
    left.set_ylabel("read cells that are padding, %")
    above = left.secondary_xaxis("top")
    above.set_xticks(sizes["shapes"], [f"{m}" for m in sizes["width_multiple"]], size=9)
    above.set_xticks([], minor=True)
    above.set_xlabel("width multiple", size=10)
    above.spines["top"].set_visible(False)
    right = picture.add_axes((4.72 / width, 0.8 / height, 0.55 / width, 2.55 / height))
    _column(right, _shares(chosen), palette)
    right.set_title(f"the ringed point:\n{chosen.shapes:.0f} graphs, {chosen.mean_rows:.0f} rows", size=10)


def _column(axes: Axes, shares: dict[str, float], palette: Palette) -> None:
    """A stacked column of ``shares``, each named beside its part and no name on another's."""
    bottom, least = 0.0, -1.0
    for (name, share), family in zip(shares.items(), CELLS.values(), strict=True):
        axes.bar([0], [share], bottom=bottom, width=1, color=palette.families[family], edgecolor=palette.paper, lw=1)
        middle = max(bottom + share / 2, least)
        axes.annotate(f"{name} {share:.0%}", (0.5, bottom + share / 2), (0.75, middle), va="center", size=10,
                      arrowprops={"arrowstyle": "-", "color": palette.line, "lw": 0.8, "shrinkA": 0, "shrinkB": 0},
                      annotation_clip=False)  # fmt: skip
        bottom, least = bottom + share, middle + 0.075
    axes.set(xlim=(-0.5, 0.5), ylim=(0, 1), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _seen(frame: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    require(frame, SEEN_COLUMNS, "shapes_over_run")
    multiples: list[int] = sorted(frame["width_multiple"].unique().tolist())
    groups = [(multiple, frame[frame["width_multiple"] == multiple].sort_values("step")) for multiple in multiples]
    if len(groups) < 2 or groups[0][0] != OPEN:
        raise FigureError(f"shapes_over_run: wanted an open set (width_multiple {OPEN}) and closed ones")
    return groups


def _set_size(group: pd.DataFrame) -> int:
    rows, context, multiple = group[["max_rows", "max_context", "width_multiple"]].iloc[0].tolist()
    return len(BucketSet(rows, context, multiple).shapes())


def _seen_alt(frame: pd.DataFrame) -> str:
    (_, first), *closed = _seen(frame)
    parts = [f"{group['seen'].iloc[-1]} of {_set_size(group)} at width multiple {m}" for m, group in closed]
    return (
        f"Different shapes met against decode steps, both axes logarithmic. Without buckets the line rises nearly with "
        f"the steps, to {first['seen'].iloc[-1]:,} shapes after {first['step'].iloc[-1]:,} steps; with buckets the "
        f"lines flatten: {', '.join(parts)}."
    )


@figure(
    name="shapes_over_run",
    data="padding-shapes.csv",
    caption="Without buckets most decode steps have a shape that no step had before; with buckets hardly any has.",
    alt=_seen_alt,
    size=(7.0, 3.7),
)
def shapes_over_run(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """How many different shapes a run has met, over its steps: the open set, and a line for each width multiple.

    ``frame`` is that of `bench.padding.seen_over_run`, with ``max_rows`` and ``max_context``.
    """
    axes = picture.subplots()
    colours = [palette.families[name] for name in ("attention", "matmul", "elementwise", "norm", "embedding")]
    groups = _seen(frame)
    for at, (multiple, group) in enumerate(groups):
        axes.plot(group["step"], group["seen"], color=colours[at % len(colours)], marker=MARKERS[at % len(MARKERS)],
                  ms=5, markevery=(3, 6), ls="--" if multiple == OPEN else "-")  # fmt: skip
    steps, most = frame["step"].max(), frame["seen"].max()
    axes.set(xscale="log", yscale="log", xlim=(0.9, steps * 1.15), ylim=(0.8, most * 1.6))
    axes.set_xlabel("decode steps")
    axes.set_ylabel("different shapes met")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_minor_formatter("")
    # Beside the lines' ends from the lowest up, each clear of the one below; one line of text is this much of the axis.
    line, lowest = 0.07 * float(np.log10(most * 2)), -1.0
    for multiple, group in [*groups[:0:-1], groups[0]]:
        seen = int(group["seen"].iloc[-1])
        if multiple == OPEN:
            axes.annotate("width multiple:\nmet, of the set", (steps, 10 ** (lowest - 0.4 * line)), (8, 0), size=9,
                          textcoords="offset points", va="bottom", color=palette.muted,
                          annotation_clip=False)  # fmt: skip
            lowest += 1.8 * line
        lowest = max(lowest, float(np.log10(seen)))
        text = "no buckets" if multiple == OPEN else f"{multiple}: {seen} of {_set_size(group)}"
        axes.annotate(text, (steps, 10**lowest), (8, 0), textcoords="offset points", va="center", size=10,
                      weight="bold", annotation_clip=False)  # fmt: skip
        lowest += line


@figure(
    name="padded_rectangle",
    data=None,
    caption="One read rectangle: the cells that three rows need, and the three kinds of padding around them.",
    alt=(
        "A grid of 4 rows and 16 columns. Row 0 has 11 live cells, row 1 has 4, row 2 has 7; the last two are filled "
        "up to 11 with ragged cells. The fourth is a padded row, 11 cells up to there. The last 5 columns of all rows "
        "lie past the longest context. Of 64 cells 22 are live."
    ),
    size=(7.0, 2.5),
)
def padded_rectangle(picture: Picture, data: None, palette: Palette) -> None:
    """The read rectangle of three rows of 11, 4 and 7 tokens, padded by ``BucketSet(4, 16, 8)``, cell by cell."""
    rows, columns = BucketSet(*DRAWN_SET).fit(len(DRAWN_ROWS), max(DRAWN_ROWS))
    longest, size = max(DRAWN_ROWS), 0.3
    axes, height = Canvas.over(picture, palette).axes, picture.get_size_inches()[1]
    lengths = [*DRAWN_ROWS, *[0] * (rows - len(DRAWN_ROWS))]
    x, top = 1.2, height - 0.35
    counts = dict.fromkeys(CELLS, 0)
    for row, length in enumerate(lengths):
        y = top - (row + 1) * size
        name = f"row {row}" if length else "padded row"
        axes.text(x - 0.1, y + size / 2, name, ha="right", va="center_baseline", size=10)
        for column in range(columns):
            past = "past the longest" if column >= longest else "ragged" if length else "padded rows"
            kind = "live" if column < length else past
            counts[kind] += 1
            fill = palette.families[CELLS[kind]]
            axes.add_patch(Rectangle((x + column * size, y), size, size, fc=fill, ec=palette.paper, lw=1.2))
    for column in (0, longest - 1, columns - 1):
        axes.text(x + (column + 0.5) * size, top + 0.06, f"{column}", ha="center", va="bottom", size=9,
                  color=palette.muted)  # fmt: skip
    at = x
    for kind, count in counts.items():
        axes.add_patch(Rectangle((at, 0.42), 0.14, 0.14, fc=palette.families[CELLS[kind]], ec="none"))
        axes.text(at + 0.2, 0.49, f"{kind} {count}", va="center_baseline", size=10)
        at += 0.42 + 0.084 * len(f"{kind} {count}")
