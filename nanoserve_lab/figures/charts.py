"""The figures drawn from recorded or just measured numbers, one function a figure."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nanoserve_lab.figures.labels import Labels
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.style import KINDS, Palette, Picture, fitted, printable, text_width

LAUNCH_COLUMNS = ("order", "op", "kind", "module", "bytes_read", "bytes_written", "seconds")
BYTES_COLUMNS = ("bytes", "launches", "host_s_per_launch", "bandwidth_gb_s", "step_s")
READBACK_COLUMNS = ("step", "row", "token", "read_at", "kept")

#: Bandwidths shown, GB/s: from a slow laptop to beyond the fastest GPU memory.
BANDWIDTHS = (5.0, 10_000.0)


def checked_launches(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """``frame`` (see `launches_by_kind`) in launch order; raises `FigureError`, beginning with ``name``."""
    require(frame, LAUNCH_COLUMNS, name)
    unknown = sorted(set(frame["kind"]) - set(KINDS))
    if unknown:
        raise FigureError(f"{name}: unknown kind {', '.join(map(repr, unknown))}; wanted {', '.join(KINDS)}")
    if (frame["seconds"] < 0).any() or frame["seconds"].sum() <= 0:
        raise FigureError(f"{name}: seconds must not be negative, and not all zero")
    return frame.sort_values("order", kind="stable").reset_index(drop=True)


def _by_kind(frame: pd.DataFrame) -> pd.DataFrame:
    groups = frame.groupby("kind")["seconds"].agg(["size", "sum"]).reset_index()
    return groups.sort_values(["size", "sum", "kind"], ascending=[False, False, True]).reset_index(drop=True)


def duration(seconds: float) -> str:
    """``seconds`` in three digits with the unit that suits: ``"1.04 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _kinds_alt(frame: pd.DataFrame) -> str:
    groups = _by_kind(frame)
    slowest = groups.iloc[int(groups["sum"].to_numpy().argmax())]
    counts = ", ".join(f"{kind} {count}" for kind, count in zip(groups["kind"], groups["size"], strict=True))
    return (
        f"Two bar charts that share their rows, one row a kind of operation. Left, launches in one decode step, "
        f"{len(frame)} in all: {counts}. Right, the time of each kind, {duration(frame['seconds'].sum())} in all; "
        f"the longest bar is {slowest['kind']} with {duration(slowest['sum'])}."
    )


@figure(
    name="launches_by_kind",
    data="decode-step.csv",
    caption=lambda frame: (
        f"One decode step launches {len(frame)} operations. How often a kind is launched and how long it takes are two "
        "different orders."
    ),
    alt=_kinds_alt,
    size=(7.0, 3.8),
)
def launches_by_kind(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Launches of one decode step by kind, and beside them the time of each kind.

    ``frame`` has a row per operation launched: ``order`` (int), ``op`` (``"aten.mm.default"``), ``kind`` (one of
    `KINDS`), ``module`` (``"layers.3.attn"``), ``bytes_read``, ``bytes_written`` (int), ``seconds`` (float).
    """
    groups = _by_kind(checked_launches(frame, "launches_by_kind"))
    left, right = picture.subplots(1, 2, sharey=True)
    rows = np.arange(len(groups))[::-1]
    colours = [palette.kind(kind) for kind in groups["kind"]]
    milliseconds = groups["sum"] * 1e3
    _bars(left, rows, groups["size"], [f"{count}" for count in groups["size"]], colours)
    _bars(right, rows, milliseconds, [f"{value:.3g}" for value in milliseconds], colours)
    left.set_yticks(rows, groups["kind"])
    left.set_xlabel("launches")
    right.set_xlabel("time, ms")
    left.set_title(f"{len(frame)} launches")
    right.set_title(f"{duration(frame['seconds'].sum())}")


def _bars(axes: Axes, rows: np.ndarray, values: pd.Series, labels: list[str], colours: list[str]) -> None:
    axes.barh(rows, values, color=colours, height=0.72)
    axes.set_xlim(0, float(values.max()) * 1.18)
    for row, value, label in zip(rows, values, labels, strict=True):
        axes.annotate(label, (value, row), (4, 0), textcoords="offset points", va="center", size=10)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)


def milliseconds(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _limits(frame: pd.DataFrame, name: str) -> tuple[float, float, float, float]:
    require(frame, BYTES_COLUMNS, name)
    if len(frame) != 1:
        raise FigureError(f"{name}: wanted one row, saw {len(frame)}")
    values = {column: float(frame[column].iloc[0]) for column in BYTES_COLUMNS}
    wrong = [column for column, value in values.items() if not 0 < value < math.inf]
    if wrong:
        raise FigureError(f"{name}: {', '.join(f'{c} must be positive, saw {values[c]}' for c in wrong)}")
    host_ms = values["launches"] * values["host_s_per_launch"] * 1e3
    return values["bytes"], host_ms, values["bandwidth_gb_s"], values["step_s"] * 1e3


def _bandwidth_alt(frame: pd.DataFrame) -> str:
    size, host_ms, bandwidth, step_ms = _limits(frame, "bytes_against_bandwidth")
    return (
        f"Time of one decode step against memory bandwidth, both axes logarithmic. A falling line, the time to read "
        f"{size / 1e6:.4g} MB, meets a level line, {milliseconds(host_ms)} ms that the host needs to issue "
        f"{int(frame['launches'].iloc[0])} launches, at {size / host_ms / 1e6:.3g} GB/s: left of it a step is bound by "
        f"memory, right of it by launches. The measured step, {milliseconds(step_ms)} ms, is marked at this machine's "
        f"{bandwidth:.3g} GB/s."
    )


@figure(
    name="bytes_against_bandwidth",
    data="decode-floor.csv",
    caption="A decode step can be no faster than its bytes allow, and no faster than its launches allow.",
    alt=_bandwidth_alt,
    size=(7.0, 3.8),
)
def bytes_against_bandwidth(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """The two lower bounds of a step's time over memory bandwidth, and this machine's measured step.

    ``frame`` has one row: ``bytes`` read a step, ``launches``, ``host_s_per_launch`` (s), ``bandwidth_gb_s`` (1e9
    bytes a second) and ``step_s`` (s), all measured on one machine.
    """
    size, host_ms, bandwidth, step_ms = _limits(frame, "bytes_against_bandwidth")
    x = np.geomspace(*BANDWIDTHS, 200)
    memory_ms = size / (x * 1e9) * 1e3
    crossing = size / (host_ms * 1e6)
    low, high = min(memory_ms[-1], host_ms, step_ms) / 2.2, max(memory_ms[0], host_ms, step_ms) * 4
    # Fixed axes rather than a computed layout: the labels' places are worked out in inches.
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    axes = picture.add_axes((0.72 / width, 0.78 / height, 1 - 1.0 / width, 1 - 0.9 / height))
    axes.set(xscale="log", yscale="log", xlim=BANDWIDTHS, ylim=(low, high))
    shown = float(np.clip(crossing, *BANDWIDTHS))
    axes.axvspan(BANDWIDTHS[0], shown, color=palette.memory, lw=0)
    axes.axvspan(shown, BANDWIDTHS[1], color=palette.launch, lw=0)
    axes.plot(x, memory_ms, color=palette.accent, ls="-", marker="", lw=2.2)
    axes.plot(BANDWIDTHS, [host_ms, host_ms], color=palette.warn, ls="--", marker="", lw=2.2)
    _region(axes, BANDWIDTHS[0], shown, "memory-bound", palette.accent)
    _region(axes, shown, BANDWIDTHS[1], "launch-bound", palette.warn)
    points = [*zip(x, memory_ms, strict=True), *((value, host_ms) for value in x), (bandwidth, step_ms)]
    labels = Labels(axes, points)
    axes.plot([bandwidth], [step_ms], marker="D", ms=8, color=palette.ink)
    text = f"measured: {milliseconds(step_ms)} ms at {bandwidth:.3g} GB/s"
    labels.add(text, [(bandwidth, step_ms)], color=palette.ink, weight="bold")
    if BANDWIDTHS[0] < crossing < BANDWIDTHS[1]:
        axes.plot([crossing], [host_ms], marker="o", ms=8, mfc=palette.paper, mec=palette.ink, mew=1.6)
        labels.add(f"equal at {crossing:.3g} GB/s", [(crossing, host_ms)], color=palette.ink)
    text = f"the host issues {int(frame['launches'].iloc[0])} launches: {milliseconds(host_ms)} ms"
    labels.add(text, [(value, host_ms) for value in x[::-8]], color=palette.warn)
    labels.add(f"reading {size / 1e6:.4g} MB", [*zip(x[150::-4], memory_ms[150::-4], strict=True)], palette.accent)
    axes.set_xlabel("memory bandwidth, GB/s")
    axes.set_ylabel("time of one step, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axis.set_minor_formatter("")


def _region(axes: Axes, low: float, high: float, text: str, colour: str) -> None:
    if math.log10(high / low) > 0.65:
        axes.text(math.sqrt(low * high), 0.965, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                  color=colour, weight="bold", size=11)  # fmt: skip


class Sampled(NamedTuple):
    """One sampled token: the step that sampled it, its request, its text, and the step at which the host reads it."""

    step: int
    row: str
    token: str
    read_at: int
    kept: bool


def _readback(frame: pd.DataFrame, name: str) -> list[Sampled]:
    require(frame, READBACK_COLUMNS, name)
    columns = [frame[column].tolist() for column in READBACK_COLUMNS]
    tokens = sorted(
        Sampled(int(step), str(row), str(token), int(read_at), bool(kept))
        for step, row, token, read_at, kept in zip(*columns, strict=True)
    )
    rows = sorted({token.row for token in tokens})
    if rows != ["A", "B"]:
        raise FigureError(f"{name}: wanted the rows A and B, saw {', '.join(rows)}")
    if any(token.read_at < token.step for token in tokens):
        raise FigureError(f"{name}: a token is read before the step that samples it")
    if len({(token.row, token.step) for token in tokens}) < len(tokens):
        raise FigureError(f"{name}: two tokens of one row in one step")
    return tokens


def _readback_alt(frame: pd.DataFrame) -> str:
    tokens = _readback(frame, "deferred_readback")
    lags = sorted({token.read_at - token.step for token in tokens})
    steps = f"{lags[0]}" if len(lags) == 1 else f"{lags[0]} to {lags[-1]}"
    parts = []
    for row in ("A", "B"):
        mine = [token for token in tokens if token.row == row]
        dropped = sum(not token.kept for token in mine)
        kept = "all kept" if not dropped else f"{dropped} of them dropped after its stop"
        parts.append(f"Request {row} samples {len(mine)} tokens, {kept}.")
    return (
        "A timeline of decode steps for two requests. Each has a row of boxes, the tokens sampled on the device, and "
        f"under it a row of marks where the host reads them, {steps} {'step' if steps == '1' else 'steps'} later; "
        f"arrows join the two. {' '.join(parts)}"
    )


@figure(
    name="deferred_readback",
    data="deferred-readback.csv",
    caption=(
        "A sampled token stays on the device and is read some steps later; what was sampled after a stop is dropped."
    ),
    alt=_readback_alt,
    size=(7.0, 3.9),
)
def deferred_readback(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Where each sampled token is produced and where the host reads it, for two requests over the steps.

    ``frame`` has a row per sampled token: ``step`` (int), ``row`` (``"A"`` or ``"B"``), ``token`` (text), ``read_at``
    (the step at which the host sees it, int) and ``kept`` (bool, False for a token sampled after the stop).
    """
    tokens = _readback(frame, "deferred_readback")
    axes = picture.subplots()
    first, last = tokens[0].step, max(token.read_at for token in tokens)
    inches = 6.2 / (last - first + 1.0)
    lanes = {"A": (3.3, 2.4), "B": (1.05, 0.15)}
    for token in tokens:
        device, host = lanes[token.row]
        fill, edge = (palette.memory, palette.accent) if token.kept else (palette.paper, palette.warn)
        box = Rectangle(
            (token.step - 0.46, device - 0.27), 0.92, 0.54, fc=fill, ec=edge, lw=1,
            hatch=None if token.kept else "////",
        )  # fmt: skip
        axes.add_patch(box)
        text = fitted(printable(token.token), inches * 0.86, 9)
        ink = palette.ink if token.kept else palette.warn
        paper = None if token.kept else {"fc": palette.paper, "ec": "none", "pad": 1}
        axes.text(token.step, device, text, ha="center", va="center", size=9, color=ink, bbox=paper)
        if not token.kept:
            half = text_width(text, 9) / inches / 2 + 0.02
            axes.plot([token.step - half, token.step + half], [device, device], color=palette.warn, marker="", ls="-",
                      lw=1, zorder=4)  # fmt: skip
        colour = palette.muted if token.kept else palette.warn
        axes.annotate(
            "", (token.read_at, host + 0.09), (token.step, device - 0.27),
            arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.2, "ls": "-" if token.kept else ":",
                        "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9},
        )  # fmt: skip
        axes.plot([token.read_at], [host], marker="o" if token.kept else "x", ms=6, mew=1.8, color=colour)
    for _, host in lanes.values():
        axes.axhline(host, color=palette.grid, lw=1, ls="-", marker="", zorder=0)
    axes.set_yticks(
        [lane for pair in lanes.values() for lane in pair],
        [name for row in lanes for name in (f"{row}, device", f"{row}, host")],
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(first - 0.6, last + 0.6), ylim=(-0.25, 3.65), xlabel="step of the engine (0 is the prefill)")
    stride = max(1, math.ceil((last - first + 1) / 16))
    axes.set_xticks(range(first, last + 1, stride))
    if not all(token.kept for token in tokens):
        axes.set_title("hatched, struck through: sampled after the stop, dropped", size=10, weight="normal",
                       color=palette.warn, pad=2)  # fmt: skip
