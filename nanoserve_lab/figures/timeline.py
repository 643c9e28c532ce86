"""A recording laid out in time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from nanoserve_lab.figures.charts import LAUNCH_COLUMNS, duration
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.strips import blocks, short_op
from nanoserve_lab.figures.style import FAMILIES, FAMILY_OF, KINDS, Palette, Picture, text_width

NAME = "recording_in_time"
#: From this many launches on, those of one module and kind are drawn as one block.
MANY = 200


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` in order, with the columns ``family`` and ``group`` (see `_group`); without times, of equal ones."""
    require(frame, tuple(column for column in LAUNCH_COLUMNS if column != "seconds"), NAME)
    unknown = sorted(set(frame["kind"]) - set(KINDS))
    if unknown:
        raise FigureError(f"{NAME}: unknown kind {', '.join(map(repr, unknown))}; wanted {', '.join(KINDS)}")
    seconds = frame["seconds"] if "seconds" in frame else pd.Series(np.nan, index=frame.index)
    timed = bool(seconds.notna().all())
    if timed != bool(seconds.notna().any()) or (timed and ((seconds < 0).any() or seconds.sum() <= 0)):
        raise FigureError(f"{NAME}: seconds must be missing everywhere, or nowhere; not negative, and not all zero")
    frame = frame.assign(
        seconds=seconds if timed else 1.0,
        timed=timed,
        family=frame["kind"].map(FAMILY_OF),
        group=frame["module"].astype(str).map(_group),
        count=1,
    )
    return frame.sort_values("order", kind="stable").reset_index(drop=True)


def _group(module: str) -> str:
    """The module down to its first number, the layer's: ``layers.3`` of ``layers.3.attn``; else its first part."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _runs(values: pd.Series) -> pd.Series:
    """A number for each value that changes where it differs from the one before."""
    return (values != values.shift()).cumsum()


def _merged(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for what a group launches of one family in one go; families of a group stand in order of appearance."""
    sums = {"seconds": "sum", "bytes_read": "sum", "bytes_written": "sum", "count": "sum", "group": "first"}
    keys = [_runs(frame["group"]).rename("run"), frame["family"]]
    return frame.groupby(keys, sort=False).agg({**sums, "op": "first"}).reset_index()


def _size(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def _alt(frame: pd.DataFrame) -> str:
    frame = _checked(frame)
    shares = frame.groupby("family")["seconds"].sum().sort_values(ascending=False)
    most = ", ".join(f"{name} {share / shares.sum():.0%}" for name, share in shares.head(3).items())
    timed = frame["timed"].all()
    groups = frame["group"][frame["group"] != ""].nunique()
    wide = f"each as wide as its time, {duration(frame['seconds'].sum())} in all" if timed else "equally wide"
    read, written = _size(frame["bytes_read"].sum()), _size(frame["bytes_written"].sum())
    return (
        f"A recording of {len(frame)} operations from left to right in the order they run, {wide}, in one lane for "
        f"each kind; {groups} modules are marked above. By {'time' if timed else 'number'} most are {most}. Below, the "
        f"bytes that each reads and writes, {read} and {written} in all."
    )


@figure(
    name=NAME,
    data="recording.csv",
    caption=(
        "What a replay runs: the operations of one recorded step in order, by kind, and the bytes that each reads and "
        "writes."
    ),
    alt=_alt,
    size=(7.0, 4.4),
)
def recording_in_time(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """The operations of a recording along time, a lane for each kind, modules above and bytes below.

    ``frame`` is `Recording.launches` with provenance columns (``with_provenance(recording.launches(repeats=20))``).
    Where ``seconds`` is missing, as without ``repeats``, operations are equally wide. From `MANY` operations on, those
    of one layer and kind are one block.
    """
    frame = _checked(frame)
    timed = bool(frame["timed"].all())
    launches = len(frame)
    merged = launches >= MANY
    frame = _merged(frame) if merged else frame
    edges = np.append(0.0, frame["seconds"].cumsum().to_numpy()) * (1e3 if timed else 1.0)
    families = [family for family in FAMILIES if family in set(frame["family"])]
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    left, span = 1.05, width - 1.25
    lanes = picture.add_axes((left / width, 1.75 / height, span / width, 1.95 / height))
    _lanes(lanes, frame, edges, families, palette, (span, 1.95))
    _modules(lanes, frame, edges, palette, span)
    counted = f"{launches} launches" + (", one block for each layer and kind" if merged else "")
    lanes.set_title(counted + (f": {duration(edges[-1] * 1e-3)}" if timed else ""), size=10, loc="left", y=1.13)
    moved = picture.add_axes((left / width, 0.72 / height, span / width, 0.8 / height), sharex=lanes)
    _traffic(moved, frame, edges, palette)
    moved.set_xlabel(
        "time in the replay, ms, one operation after another" if timed else "operations in order; no times were taken",
        size=10,
        labelpad=1,
    )


def _lanes(
    axes: Axes,
    frame: pd.DataFrame,
    edges: np.ndarray,
    families: list[str],
    palette: Palette,
    inches: tuple[float, float],
) -> None:
    step = 1.3
    lows = np.array([(len(families) - 1 - families.index(family)) * step for family in frame["family"]])
    colours = [palette.families[family] for family in frame["family"]]
    thin = edges[-1] * 0.003  # what is too short to be seen is drawn this wide
    blocks(axes, edges[:-1], np.maximum(edges[1:], edges[:-1] + thin), colours, lows)
    axes.set(xlim=(0, edges[-1]), ylim=(-0.3, len(families) * step))
    axes.set_yticks([(len(families) - 1 - at) * step + 0.5 for at in range(len(families))], families)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines["left"].set_visible(False)
    scale = inches[0] / edges[-1]
    names = [short_op(str(op)) if n == 1 else "" for op, n in zip(frame["op"], frame["count"], strict=True)]
    for start, end, low, name, colour in zip(edges, edges[1:], lows, names, colours, strict=False):
        if text_width(name, 9) < (end - start) * scale - 0.06:
            axes.text((start + end) / 2, low + 0.48, name, ha="center", va="center_baseline", size=9,
                      color=palette.text_on(colour))  # fmt: skip


def _modules(axes: Axes, frame: pd.DataFrame, edges: np.ndarray, palette: Palette, inches: float) -> None:
    above, scale = axes.get_xaxis_transform(), inches / edges[-1]
    parts = [part for _, part in frame.groupby(_runs(frame["group"]), sort=False) if part["group"].iloc[0]]
    spans = [(str(p["group"].iloc[0]), edges[p.index[0]], edges[p.index[-1] + 1]) for p in parts]
    layers = [(name, (end - start) * scale) for name, start, end in spans if name[-1].isdigit()]
    # Numbers of layers stand at all of them or at every fifth, never at those that happen to have room.
    wide = all(text_width(name.rpartition(".")[2], 9) < room - 0.04 for name, room in layers)
    for number, (name, start, end) in enumerate(spans):
        axes.plot([start, end], [1.02, 1.02], transform=above, clip_on=False, color=palette.line, marker="", ls="-",
                  lw=2.4 if number % 2 else 1.2, solid_capstyle="butt")  # fmt: skip
        short, room = name.rpartition(".")[2], (end - start) * scale - 0.04
        if short.isdigit() and not wide:
            shown = short if int(short) % 5 == 0 else ""
        else:
            shown = next((text for text in (name, short) if text_width(text, 9) < room), "")
        axes.text((start + end) / 2, 1.035, shown, transform=above, ha="center", va="bottom", size=9,
                  color=palette.muted)  # fmt: skip


def _traffic(axes: Axes, frame: pd.DataFrame, edges: np.ndarray, palette: Palette) -> None:
    read, written = (frame[column].clip(lower=1).to_numpy() for column in ("bytes_read", "bytes_written"))
    axes.stairs(read, edges, baseline=1, fill=True, color=palette.grid)
    axes.stairs(written, edges, baseline=None, color=palette.warn, lw=1.1)
    axes.set(yscale="log", ylim=(1, 30 * max(read.max(), written.max())))
    axes.yaxis.set_major_formatter(lambda value, _: _size(value))
    axes.set_yticks([tick for tick in (10, 1e3, 1e5, 1e7, 1e9) if tick <= axes.get_ylim()[1]])
    axes.yaxis.set_minor_formatter("")
    axes.minorticks_off()
    axes.text(0.004, 0.97, "bytes read (filled)", transform=axes.transAxes, ha="left", va="top", size=9,
              color=palette.muted)  # fmt: skip
    axes.text(0.996, 0.97, "bytes written (line)", transform=axes.transAxes, ha="right", va="top", size=9,
              color=palette.warn)  # fmt: skip
