"""The chart of lesson 06: how often a run has to record, and what its replays cost."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from nanoserve_lab.figures.labels import Labels
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.style import Palette, Picture

CAPTURE_COLUMNS = ("steps", "rows", "captures_open", "captures_closed", "ratio")


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    name = "captures_over_steps"
    require(frame, CAPTURE_COLUMNS, name)
    if frame.duplicated(["rows", "steps"]).any():
        raise FigureError(f"{name}: two lines for one number of rows and steps")
    if (frame["ratio"] <= 0).any():
        raise FigureError(f"{name}: a ratio of times must be positive")
    if frame["rows"].nunique() > 3:
        raise FigureError(f"{name}: at most 3 numbers of rows, saw {frame['rows'].nunique()}")
    if (frame.groupby("steps")[["captures_open", "captures_closed"]].nunique() > 1).any(axis=None):
        raise FigureError(f"{name}: captures that depend on the rows; all rows grow together in this run")
    return frame.sort_values(["rows", "steps"]).reset_index(drop=True)


def _by_rows(frame: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    return [(int(rows), frame[frame["rows"] == rows]) for rows in sorted(frame["rows"].unique())]


def _captures_alt(frame: pd.DataFrame) -> str:
    frame = _checked(frame)
    last = frame[frame["steps"] == frame["steps"].max()].iloc[0]
    ratios = [
        f"{rows} row{'s' * (rows > 1)} {part['ratio'].min():.2f} to {part['ratio'].max():.2f}"
        for rows, part in _by_rows(frame)
    ]
    return (
        "Two charts over the steps of a run. Left, recordings: with an open set of shapes a straight line rises to "
        f"{last.captures_open} at {last.steps} steps; with a closed set the line stays low and ends at "
        f"{last.captures_closed}. Right, the time of replays over that of eager steps, a line for each number of rows, "
        f"and a dotted line at 1, where both take the same time: {', '.join(ratios)}."
    )


@figure(
    name="captures_over_steps",
    data="day-54-capturebench.csv",
    caption=(
        "A run of growing rows: the recordings it needs with an open and a closed set of shapes, and the time of its "
        "replays over that of eager steps, recording left out."
    ),
    alt=_captures_alt,
    size=(7.0, 3.5),
)
def captures_over_steps(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Left: recordings over the steps, open and closed set. Right: replayed over eager time, by rows.

    ``frame`` has a row per number of ``rows`` (three at most) and ``steps`` with ``captures_open``,
    ``captures_closed`` (the same for all rows) and ``ratio`` (of times).
    """
    frame = _checked(frame)
    # Fixed axes rather than a computed layout: the labels' places are worked out in inches.
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    low, tall = 0.82 / height, 1 - 1.0 / height
    _captures(picture.add_axes((0.72 / width, low, 2.5 / width, tall)), frame, palette)
    _ratios(picture.add_axes((4.15 / width, low, 2.65 / width, tall)), frame, palette)


def _captures(axes: Axes, frame: pd.DataFrame, palette: Palette) -> None:
    counts = frame.drop_duplicates("steps").sort_values("steps")
    steps, most = counts["steps"].to_numpy(), counts["captures_open"].max()
    axes.set(xlim=(0, steps[-1] * 1.1), ylim=(-0.06 * most, most * 1.18))
    for name, colour, line in (("open", palette.warn, "-"), ("closed", palette.accent, "--")):
        values = counts[f"captures_{name}"].to_numpy()
        axes.plot(steps, values, color=colour, ls=line, marker="o", clip_on=False)
        axes.annotate(f"{name} set: {values[-1]}", (steps[-1], values[-1]), (-7, 5), textcoords="offset points",
                      ha="right", va="bottom", color=colour, weight="bold", size=10)  # fmt: skip
    axes.set_xlabel("decode steps")
    axes.set_ylabel("recordings")


def _ratios(axes: Axes, frame: pd.DataFrame, palette: Palette) -> None:
    ratios, steps = frame["ratio"], sorted(frame["steps"].unique())
    axes.set(xscale="log", xlim=(steps[0] / 1.3, steps[-1] * 1.3))
    axes.set_ylim(min(0.7, ratios.min() - 0.05), max(1.1, ratios.max() + 0.05))
    xs = np.geomspace(steps[0] / 1.3, steps[-1] * 1.3, 100)
    axes.plot(xs[[0, -1]], [1, 1], color=palette.muted, ls=":", marker="", lw=1.4)
    points = [(x, 1.0) for x in xs]
    colours = (palette.families["matmul"], palette.families["norm"], palette.families["attention"])
    lines = []
    for (rows, part), colour, marker in zip(_by_rows(frame), colours, "os^", strict=False):
        axes.plot(part["steps"], part["ratio"], color=colour, marker=marker)
        points += [*zip(xs, np.interp(xs, part["steps"], part["ratio"]), strict=True)]
        places = [*zip(part["steps"], part["ratio"], strict=True)]
        lines.append((f"{rows} row{'s' * (rows > 1)}", places, colour))
    axes.set_xlabel("decode steps")
    axes.set_ylabel("time, replayed / eager")
    axes.set_xticks(steps, [f"{step:,}" for step in steps])
    axes.xaxis.set_minor_formatter("")
    labels = Labels(axes, points)
    labels.add("the same time", [(x, 1.0) for x in xs[::-7]], palette.muted)
    for text, places, colour in lines:
        labels.add(text, places[::-1], colour, weight="bold")
