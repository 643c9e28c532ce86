"""The chart of lesson 06: how often a run has to record, and what its replays cost."""

from __future__ import annotations

import pandas as pd

from nanoserve_lab.figures.over_steps import checked, draw, ranges
from nanoserve_lab.figures.registry import figure
from nanoserve_lab.figures.style import Palette, Picture

_COUNTS = {"open set": "captures_open", "closed set": "captures_closed"}


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    return checked(frame, _COUNTS, "captures_over_steps")


def _alt(frame: pd.DataFrame) -> str:
    frame = _checked(frame)
    last = frame[frame["steps"] == frame["steps"].max()].iloc[0]
    return (
        "Two charts over the steps of a run. Left, recordings: with an open set of shapes a straight line rises to "
        f"{last.captures_open} at {last.steps} steps; with a closed set the line stays low and ends at "
        f"{last.captures_closed}. Right, the time of replays over that of eager steps, a line for each number of rows, "
        f"and a dotted line at 1, where both take the same time: {ranges(frame)}."
    )


@figure(
    name="captures_over_steps",
    data="day-54-capturebench.csv",
    caption=(
        "A run of growing rows: the recordings it needs with an open and a closed set of shapes, and the time of its "
        "replays over that of eager steps, recording left out."
    ),
    alt=_alt,
    size=(7.0, 3.5),
)
def captures_over_steps(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Left: recordings over the steps, open and closed set. Right: replayed over eager time, by rows.

    ``frame`` has a row per number of ``rows`` (three at most) and ``steps`` with ``captures_open``,
    ``captures_closed`` (the same for all rows) and ``ratio`` (of times).
    """
    draw(picture, _checked(frame), palette, _COUNTS, "recordings", "time, replayed / eager")
