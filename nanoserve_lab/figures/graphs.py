"""The figures of compiling: the graphs that growing contexts make, and what a compiled step takes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from nanoserve_lab.figures.charts import milliseconds
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.style import Palette, Picture

GRAPH_COLUMNS = ("way", "step", "context", "graphs", "refused")
COMPILE_COLUMNS = ("model", "rows", "graphs", "compile_s", "eager_ms", "compiled_ms")
#: The ways of `graphs_against_steps`, in the order of their colours and marks.
WAYS = ("fixed sizes", "a Python int", "dynamic sizes")


def _ways(frame: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    require(frame, GRAPH_COLUMNS, name)
    seen = list(dict.fromkeys(frame["way"]))
    if sorted(seen) != sorted(WAYS):
        raise FigureError(f"{name}: wanted the ways {', '.join(WAYS)}, saw {', '.join(map(str, seen))}")
    ways = {way: frame[frame["way"] == way].sort_values("step") for way in WAYS}
    for way, one in ways.items():
        if (np.diff(one["graphs"]) < 0).any():
            raise FigureError(f"{name}: {way}: graphs become fewer")
    return ways


def _last(one: pd.DataFrame) -> str:
    last = one.iloc[-1]
    count = f"{last['graphs']} graph" + ("s" if last["graphs"] > 1 else "")
    return f"{count}, refused" if last["refused"] else count


def _graphs_alt(frame: pd.DataFrame) -> str:
    ways = _ways(frame, "graphs_against_steps")
    parts = []
    for way, one in ways.items():
        last = one.iloc[-1]
        what = f"ends with a cross in step {last['step']}" if last["refused"] else f"runs to step {last['step']}"
        parts.append(f"{way}: {what}, {_last(one)}")
    return (
        f"Graphs made against decode steps, three lines of steps, one token more context in each. {'; '.join(parts)}."
    )


@figure(
    name="graphs_against_steps",
    data="graphs.csv",
    caption=(
        "Contexts grow by a token in each step. With fixed sizes each step makes a graph until the compiler's limit; "
        "a Python int costs one more graph; with dynamic sizes one graph serves."
    ),
    alt=_graphs_alt,
)
def graphs_against_steps(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """The graphs made so far over the steps, a line for each way to say how long the contexts are.

    ``frame`` has a row per ``way`` and ``step`` (from 1): the ``context`` in tokens, the ``graphs`` so far, and
    ``refused``, True in a way's last step where the compiler gave up.
    """
    ways = _ways(frame, "graphs_against_steps")
    axes = picture.subplots()
    colours = (palette.warn, palette.families["norm"], palette.accent)
    most, longest = int(frame["graphs"].max()), int(frame["step"].max())
    least = min(int(one["graphs"].iloc[-1]) for one in ways.values())
    for (way, one), colour, marker, line in zip(ways.items(), colours, "os^", ("-", "--", "-."), strict=True):
        kept = one[~one["refused"].astype(bool)]
        axes.plot(kept["step"], kept["graphs"], color=colour, marker=marker, ls=line, drawstyle="steps-post", ms=5)
        stopped = one[one["refused"].astype(bool)]
        axes.plot(stopped["step"], stopped["graphs"], color=colour, marker="x", ls="", ms=11, mew=2.5)
        last = one.iloc[-1]
        text = f"{way}: {_last(one)}"
        if last["refused"]:
            axes.text(last["step"] + 0.7, last["graphs"], text, color=colour, ha="left", va="center", size=10)
        else:
            side = -1 if last["graphs"] == least else 1
            axes.text(longest, last["graphs"] + side * 0.05 * most, text, color=colour, ha="right",
                      va="top" if side < 0 else "bottom", size=10)  # fmt: skip
    axes.set(xlim=(0.4, longest + 0.6), ylim=(0, most * 1.2))
    axes.set_xlabel("decode step, one token more context in each")
    axes.set_ylabel("graphs made so far")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _models(frame: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    require(frame, COMPILE_COLUMNS, name)
    if (frame[["eager_ms", "compiled_ms", "compile_s"]] <= 0).any().any():
        raise FigureError(f"{name}: a time must be positive")
    models = {str(model): one.sort_values("rows") for model, one in frame.groupby("model", sort=False)}
    if len(models) > 2:
        raise FigureError(f"{name}: wanted one or two models, saw {', '.join(models)}")
    if any(one["rows"].duplicated().any() for one in models.values()):
        raise FigureError(f"{name}: one number of rows twice for one model")
    return models


def _cells(one: pd.DataFrame) -> list[tuple[int, float, float]]:
    return list(zip(one["rows"].tolist(), one["eager_ms"].tolist(), one["compiled_ms"].tolist(), strict=True))


def _compile_alt(frame: pd.DataFrame) -> str:
    parts = []
    for model, one in _models(frame, "compiled_step").items():
        cells = "; ".join(
            f"{rows} row{'s' * (rows > 1)}: {milliseconds(eager)} ms eager, {milliseconds(graph)} ms compiled"
            for rows, eager, graph in _cells(one)
        )
        parts.append(f"{model}: {cells}; {one['graphs'].max()} graphs, compiled in {one['compile_s'].sum():.3g} s")
    return f"Pairs of bars, the time of a decode step eager and compiled, by rows. {'. '.join(parts)}."


@figure(
    name="compiled_step",
    data="compile.csv",
    caption=(
        "One decode step by rows, eager and compiled, and eager's time over the compiled one's. Compiling is measured "
        "with the compiler's cache on the disk filled."
    ),
    alt=_compile_alt,
    size=(7.0, 3.8),
)
def compiled_step(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Milliseconds a decode step, eager beside compiled, a panel for each model.

    ``frame`` has a row per ``model`` and number of ``rows``: ``eager_ms`` and ``compiled_ms`` (medians, ms), ``graphs``
    so far and ``compile_s`` (s, of the first call at that number of rows).
    """
    models = _models(frame, "compiled_step")
    panels = picture.subplots(1, len(models), squeeze=False)[0]
    for axes, (model, one) in zip(panels, models.items(), strict=True):
        places = np.arange(len(one))
        top = float(one[["eager_ms", "compiled_ms"]].max().max())
        for shift, column, colour in ((-0.2, "eager_ms", palette.muted), (0.2, "compiled_ms", palette.accent)):
            axes.bar(places + shift, one[column], 0.38, color=colour)
        for place, (_, eager, graph) in zip(places, _cells(one), strict=True):
            axes.text(place, max(eager, graph) + 0.03 * top, f"{eager / graph:.2f}x", ha="center", va="bottom", size=10)
        axes.set_xticks(places, [str(rows) for rows in one["rows"]])
        axes.set(ylim=(0, top * 1.18))
        axes.set_xlabel("rows")
        graphs = int(one["graphs"].max())
        axes.set_title(f"{model}\n{graphs} graphs, compiled in {one['compile_s'].sum():.3g} s", size=10)
        axes.tick_params(axis="x", length=0)
    panels[0].set_ylabel("time of one step, ms")
    for name, colour, y in (("eager", palette.muted, 0.97), ("compiled", palette.accent, 0.88)):
        panels[0].text(0.03, y, name, transform=panels[0].transAxes, color=colour, weight="bold", size=10, va="top")
