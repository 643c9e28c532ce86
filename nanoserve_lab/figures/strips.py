"""One decode step laid out in time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Polygon, Rectangle

from nanoserve_lab.figures.charts import checked_launches, duration
from nanoserve_lab.figures.registry import FigureError, figure
from nanoserve_lab.figures.style import FAMILIES, FAMILY_OF, Palette, Picture, fitted, text_width


def _layers(frame: pd.DataFrame) -> pd.Series:
    return frame["module"].astype(str).str.extract(r"\blayers\.(\d+)", expand=False).astype("Int64")


def short_op(op: str) -> str:
    """``"mm"`` of ``"aten.mm.default"``."""
    parts = op.split(".")
    return (parts[1] if len(parts) > 2 else parts[-1]).strip("_")


def _middle_layer(frame: pd.DataFrame, layers: pd.Series) -> int:
    spans = frame.groupby(layers)["seconds"].sum().sort_values(kind="stable")
    return int(spans.index[len(spans) // 2])


def _strip_alt(frame: pd.DataFrame) -> str:
    frame = checked_launches(frame, "step_strip")
    layers = _layers(frame)
    chosen = _middle_layer(frame, layers)
    inside = frame[layers == chosen]
    shares = frame.groupby(frame["kind"].map(FAMILY_OF))["seconds"].sum().sort_values(ascending=False)
    most = ", ".join(f"{name} {share / shares.sum():.0%}" for name, share in shares.head(3).items())
    return (
        f"One decode step as a strip of {len(frame)} blocks in the order they ran, each as wide as its time, "
        f"{duration(frame['seconds'].sum())} in all, with {layers.nunique()} layers marked above; the same pattern "
        f"repeats in every layer. Below, layer {chosen} enlarged: {len(inside)} operations in "
        f"{duration(inside['seconds'].sum())}, once in time and once with a named block of equal width for "
        f"each launch. Most of the step is {most}."
    )


@figure(
    name="step_strip",
    data="decode-step.csv",
    caption=(
        "One decode step in time, every operation a block as wide as it took, and one layer of it enlarged: in time, "
        "and launch by launch."
    ),
    alt=_strip_alt,
    size=(7.0, 5.1),
)
def step_strip(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """One decode step as a strip of blocks, width = time, and one layer (the one of median time) enlarged.

    The enlarged layer is shown twice: in time, and with every launch equally wide.

    ``frame`` is as in `launches_by_kind`. Layers are read from ``layers.N`` in ``module``; raises `FigureError` when
    no row has one.
    """
    frame = checked_launches(frame, "step_strip")
    layers = _layers(frame)
    if layers.isna().all():
        raise FigureError("step_strip: no module names a layer; wanted paths such as 'layers.3.attn'")
    ends = frame["seconds"].cumsum().to_numpy() * 1e3
    starts = ends - frame["seconds"].to_numpy() * 1e3
    colours = [palette.kind(kind) for kind in frame["kind"]]
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    left, span = 0.15 / width, 1 - 0.3 / width
    colour_names = [family for family in FAMILIES if family in set(frame["kind"].map(FAMILY_OF))]

    top = picture.add_axes((left, 4.1 / height, span, 0.5 / height))
    blocks(top, starts, ends, colours)
    top.set(xlim=(0, ends[-1]), ylim=(0, 1), yticks=[])
    top.spines["left"].set_visible(False)
    top.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    top.set_xlabel("time in the step, ms, one operation after another", size=10, labelpad=1)
    _mark_layers(top, layers, starts, ends, palette, span * width)

    chosen = _middle_layer(frame, layers)
    inside = np.flatnonzero((layers == chosen).fillna(False).to_numpy())
    part = slice(inside[0], inside[-1] + 1)
    names = [short_op(str(op)) for op in frame["op"][part]]
    inks = [palette.text_on(colour) for colour in colours[part]]
    zoom = picture.add_axes((left, 2.65 / height, span, 0.5 / height))
    edges = np.append(starts[part], ends[part.stop - 1])
    _named_blocks(zoom, edges, colours[part], names, inks, (span * width, 0.5))
    zoom.set_title(f"layer {chosen} in time: {duration((edges[-1] - edges[0]) * 1e-3)}", size=10, pad=3, y=1)
    _lens(picture, top, zoom, (edges[0], edges[-1]), palette)

    even = picture.add_axes((left, 0.75 / height, span, 1.4 / height))
    _named_blocks(even, np.arange(len(names) + 1.0), colours[part], names, inks, (span * width, 1.4))
    even.set_title(f"layer {chosen} in launches: {len(names)}, one block each", size=10, pad=3, y=1)
    _chips(picture, colour_names, palette)


def blocks(
    axes: Axes, starts: np.ndarray, ends: np.ndarray, colours: list[str], lows: np.ndarray | float = 0.0
) -> None:
    """A block of height 1 from each start to its end, standing at ``lows``."""
    # A gap between neighbours would swallow blocks thinner than itself: only wide blocks get one.
    gap = np.minimum((ends[-1] - starts[0]) * 0.0012, (ends - starts) * 0.15)
    places = zip(starts, ends, gap, np.broadcast_to(lows, starts.shape), strict=True)
    corners = [[(a, y), (a, y + 1), (b - g, y + 1), (b - g, y)] for a, b, g, y in places]
    axes.add_collection(PolyCollection(corners, facecolors=colours, linewidths=0))


def _mark_layers(
    axes: Axes, layers: pd.Series, starts: np.ndarray, ends: np.ndarray, palette: Palette, inches: float
) -> None:
    above = axes.get_xaxis_transform()
    spans = [(int(n), starts[at.index[0]], ends[at.index[-1]]) for n, at in layers.dropna().groupby(layers.dropna())]
    scale = inches / ends[-1]
    wide = min((b - a) * scale for _, a, b in spans) > text_width("00", 9) + 0.05
    for n, a, b in spans:
        axes.plot([a, b], [1.1, 1.1], transform=above, clip_on=False, color=palette.line, lw=2.4 if n % 2 else 1.2,
                  marker="", ls="-", solid_capstyle="butt")  # fmt: skip
        if wide or n % 5 == 0:
            axes.text((a + b) / 2, 1.2, str(n), transform=above, ha="center", va="bottom", size=9, color=palette.muted)
    axes.text(0, 1.62, "layer", transform=above, ha="left", va="bottom", size=10, weight="bold")
    tail = ends[-1] - spans[-1][2]
    label = "after the layers: norm, LM head, sampling"
    if tail > 0:
        axes.plot([ends[-1] - tail, ends[-1]], [1.1, 1.1], transform=above, clip_on=False, color=palette.accent, lw=1.2,
                  marker="", ls="-", solid_capstyle="butt")  # fmt: skip
        axes.text(ends[-1], 1.62, label, transform=above, ha="right", va="bottom", size=9, color=palette.accent)


def _named_blocks(
    axes: Axes, edges: np.ndarray, colours: list[str], names: list[str], inks: list[str], inches: tuple[float, float]
) -> None:
    blocks(axes, edges[:-1], edges[1:], colours)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 1), xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    scale = inches[0] / (edges[-1] - edges[0])
    for start, end, name, ink in zip(edges, edges[1:], names, inks, strict=False):
        room, turn, shown = (end - start) * scale, 0, name
        if text_width(name, 9) > room - 0.06:
            turn, shown = 90, fitted(name, inches[1] - 0.1, 9) if room > 9 / 72 * 1.25 else ""
        axes.text((start + end) / 2, 0.5, shown, ha="center", va="center", size=9, color=ink, rotation=turn)


def _lens(picture: Picture, top: Axes, zoom: Axes, span: tuple[float, float], palette: Palette) -> None:
    low, high = (top.get_position().x0 + x / top.get_xlim()[1] * top.get_position().width for x in span)
    upper, lower = top.get_position().y0, zoom.get_position().y1
    corners = [(low, upper), (high, upper), (zoom.get_position().x1, lower), (zoom.get_position().x0, lower)]
    shade = Polygon(corners, transform=picture.transFigure, color=palette.grid, alpha=0.6, lw=0, zorder=-2)
    picture.add_artist(shade)
    top.add_patch(Rectangle((span[0], 0), span[1] - span[0], 1, fill=False, ec=palette.ink, lw=1.2, clip_on=False))


def _chips(picture: Picture, families: list[str], palette: Palette) -> None:
    width, height = picture.get_size_inches()
    box, pad, y = 0.13, 0.06, 0.42
    needs = [box + pad + text_width(family, 10) for family in families]
    gap = min(0.3, (width - 0.3 - sum(needs)) / max(1, len(needs) - 1))
    x = 0.15
    for family, need in zip(families, needs, strict=True):
        picture.add_artist(
            Rectangle((x / width, y / height), box / width, box / height, color=palette.families[family], lw=0,
                      transform=picture.transFigure)
        )  # fmt: skip
        picture.text((x + box + pad) / width, (y + box / 2) / height, family, va="center_baseline", size=10)
        x += need + gap
