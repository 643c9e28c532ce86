"""The small figure that closes every lesson: its list of shapes in bytes, and when recording it has paid."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes

from nanoserve_lab.figures.registry import figure, require
from nanoserve_lab.figures.style import Palette, Picture

BREAKEVEN_COLUMNS = ("lessons", "shapes", "shared_bytes", "private_bytes", "breakeven_steps")


def bytes_label(count: float) -> str:
    """``count`` bytes in decimal units, three digits at most: ``268 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{count:.0f} bytes"


def _pays(steps: float) -> str:
    return "never pays" if math.isinf(steps) else f"pays after {steps:,.0f} steps"


def _lessons(which: object) -> str:
    return f"lesson{'s' if ' ' in str(which) else ''} {which}"


def _alt(frame: pd.DataFrame) -> str:
    require(frame, BREAKEVEN_COLUMNS, "pool_and_breakeven")
    lists = "; ".join(
        f"{_lessons(line['lessons'])}, {line['shapes']:,} shapes: {bytes_label(line['shared_bytes'])} shared, "
        f"{bytes_label(line['private_bytes'])} private, {_pays(line['breakeven_steps'])}"
        for line in frame.to_dict("records")
    )
    return (
        "Two bar charts on logarithmic axes, a line for each list of shapes of the course so far, the newest at the "
        "foot. Left, bytes of scores in one shared pool and in private ones; right, steps until recording has paid. "
        f"{lists}."
    )


@figure(
    name="pool_and_breakeven",
    data="breakeven.csv",
    caption=(
        "The bill of the course's lists so far, at 256 rows, 8,192 tokens and 32 heads: bytes of scores, and the steps "
        "after which recording the whole list has paid, at the costs measured on this machine."
    ),
    alt=_alt,
    size=(7.0, 2.4),
)
def pool_and_breakeven(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Left: shared and private bytes of each list. Right: the steps after which recording it has paid.

    ``frame`` is that of `bench.breakeven.lesson_costs`: ``lessons``, ``shapes``, ``shared_bytes``, ``private_bytes``,
    ``breakeven_steps`` (infinite: it never pays), the newest list last.
    """
    require(frame, BREAKEVEN_COLUMNS, "pool_and_breakeven")
    memory, steps = picture.subplots(1, 2, width_ratios=(3, 2))
    places = range(len(frame))
    for offset, column, word, colour in (
        (-0.2, "shared_bytes", "shared", palette.families["matmul"]),
        (0.2, "private_bytes", "private", palette.families["elementwise"]),
    ):
        memory.barh([place + offset for place in places], frame[column], height=0.36, color=colour)
        for place, count in zip(places, frame[column], strict=True):
            _beside(memory, count, place + offset, f"{word} {bytes_label(count)}", palette.ink)
    finite = [value for value in frame["breakeven_steps"] if math.isfinite(value)]
    most = max(finite, default=1.0)
    for place, value in zip(places, frame["breakeven_steps"], strict=True):
        if math.isfinite(value):
            steps.barh([place], [value], height=0.5, color=palette.families["attention"])
            _beside(steps, value, place, f"{value:,.0f} steps", palette.ink)
        else:
            _beside(steps, 1, place, _pays(value), palette.warn)
    # The labels say the values; on a logarithmic axis ticks would only repeat them.
    memory.set(xscale="log", xlim=(1e7, frame["private_bytes"].max() * 3e3), title="bytes of scores, log scale")
    steps.set(xscale="log", xlim=(1, most * 300), title="steps to pay, log scale")
    names = [f"{_lessons(line['lessons'])}\n{line['shapes']:,} shapes" for line in frame.to_dict("records")]
    memory.set_yticks(list(places), names)
    steps.set_yticks([])
    for axes in (memory, steps):
        axes.minorticks_off()
        axes.set_xticks([])
        axes.set_ylim(max(len(frame), 2) - 0.45, -0.55)


def _beside(axes: Axes, value: float, place: float, text: str, colour: str) -> None:
    axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", size=10, color=colour)
