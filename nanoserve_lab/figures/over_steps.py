"""Two charts over the steps of a run: a count by two ways to make it, and the ratio of their times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from nanoserve_lab.figures.labels import Labels
from nanoserve_lab.figures.registry import FigureError, by_rows, require
from nanoserve_lab.figures.style import Palette, Picture


def checked(frame: pd.DataFrame, counts: Mapping[str, str], name: str) -> pd.DataFrame:
    """``frame`` in order of ``rows`` (three numbers at most) and ``steps``: one line for each, with the columns that
    ``counts`` names, the same for all rows, and a positive ``ratio``. Raises `FigureError` in the name of a figure."""
    columns = list(counts.values())
    require(frame, ("steps", "rows", *columns, "ratio"), name)
    if frame.duplicated(["rows", "steps"]).any():
        raise FigureError(f"{name}: two lines for one number of rows and steps")
    if (frame["ratio"] <= 0).any():
        raise FigureError(f"{name}: a ratio of times must be positive")
    if frame["rows"].nunique() > 3:
        raise FigureError(f"{name}: at most 3 numbers of rows, saw {frame['rows'].nunique()}")
    if (frame.groupby("steps")[columns].nunique() > 1).any(axis=None):
        raise FigureError(f"{name}: {' and '.join(columns)} differ between rows; one line is drawn for all")
    return frame.sort_values(["rows", "steps"]).reset_index(drop=True)


def ranges(frame: pd.DataFrame) -> str:
    """The ratios in words, from the least to the most for each number of rows."""
    return ", ".join(
        f"{rows} row{'s' * (rows > 1)} {part['ratio'].min():.2f} to {part['ratio'].max():.2f}"
        for rows, part in by_rows(frame)
    )


def draw(
    picture: Picture, frame: pd.DataFrame, palette: Palette, counts: Mapping[str, str], counted: str, compared: str
) -> None:
    """Left, the columns of ``counts`` by their labels, two of them; right, ``ratio`` by rows. ``counted`` and
    ``compared`` name the two axes."""
    # Fixed axes rather than a computed layout: the labels' places are worked out in inches.
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    low, tall = 0.82 / height, 1 - 1.0 / height
    left = picture.add_axes((0.78 / width, low, 2.45 / width, tall))
    _counts(left, frame, palette, counts)
    left.set_ylabel(counted)
    right = picture.add_axes((4.15 / width, low, 2.65 / width, tall))
    _ratios(right, frame, palette)
    right.set_ylabel(compared)
    for axes in (left, right):
        axes.set_xlabel("decode steps")


def _counts(axes: Axes, frame: pd.DataFrame, palette: Palette, columns: Mapping[str, str]) -> None:
    counts = frame.drop_duplicates("steps").sort_values("steps")
    steps, most = counts["steps"].to_numpy(), counts[[*columns.values()]].to_numpy().max()
    axes.set(xlim=(0, steps[-1] * 1.1), ylim=(-0.06 * most, most * 1.18))
    for (label, column), colour, line in zip(columns.items(), (palette.warn, palette.accent), ("-", "--"), strict=True):
        values = counts[column].to_numpy()
        axes.plot(steps, values, color=colour, ls=line, marker="o", clip_on=False)
        axes.annotate(f"{label}: {values[-1]:,}", (steps[-1], values[-1]), (-7, 5), textcoords="offset points",
                      ha="right", va="bottom", color=colour, weight="bold", size=10)  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _ratios(axes: Axes, frame: pd.DataFrame, palette: Palette) -> None:
    ratios, steps = frame["ratio"], sorted(frame["steps"].unique())
    axes.set(xscale="log", xlim=(steps[0] / 1.3, steps[-1] * 1.3))
    axes.set_ylim(min(0.75, ratios.min() - 0.05), max(1.1, ratios.max() + 0.05))
    xs = np.geomspace(steps[0] / 1.3, steps[-1] * 1.3, 100)
    axes.plot(xs[[0, -1]], [1, 1], color=palette.muted, ls=":", marker="", lw=1.4)
    points = [(x, 1.0) for x in xs]
    colours = (palette.families["matmul"], palette.families["norm"], palette.families["attention"])
    lines = []
    for (rows, part), colour, marker in zip(by_rows(frame), colours, "os^", strict=False):
        axes.plot(part["steps"], part["ratio"], color=colour, marker=marker)
        points += [*zip(xs, np.interp(xs, part["steps"], part["ratio"]), strict=True)]
        places = [*zip(part["steps"], part["ratio"], strict=True)]
        lines.append((f"{rows} row{'s' * (rows > 1)}", places[::-1], colour))
    axes.set_xticks(steps, [f"{step:,}" for step in steps])
    axes.xaxis.set_minor_formatter("")
    labels = Labels(axes, points)
    labels.add("the same time", [(x, 1.0) for x in xs[::-7]], palette.muted)
    for text, places, colour in lines:
        labels.add(text, places, colour, weight="bold")
