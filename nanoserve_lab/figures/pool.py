"""The figures of lesson 07: what recordings take in memory, and the steps after which they have paid."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

from nanoserve_lab.bench.pool import WAYS
from nanoserve_lab.captured import capture_breakeven_steps, capture_cost_s
from nanoserve_lab.figures.breakeven import bytes_label
from nanoserve_lab.figures.registry import FigureError, figure, require
from nanoserve_lab.figures.style import Palette, Picture, text_width

PRICED_COLUMNS = ("where", "how", "term", "rows", "context", "width_multiple", "shapes", "heads", "dtype")
MULTIPLE_COLUMNS = ("width_multiple", "shapes", "way", "computed_bytes", "simulated_bytes")
LAUNCH_COLUMNS = ("step", "rows", "launches", "replay_ms", "record_ms", "saving_ms")

ONE, MANY, HOLES = "the largest shape", "the list", "holes and rounding"
#: The family whose colour a term takes; K and V, gathered or laid out, take turns.
TERM_FAMILIES = {
    "K gathered": "matmul",
    "K laid out": "embedding",
    "V gathered": "norm",
    "V laid out": "copy, index",
    "scores": "attention",
    "masked scores": "attention",
    "weights": "elementwise",
}
HOW_STYLE = {"computed": ("attention", "o"), "simulated": ("matmul", "s"), "measured": ("elementwise", "^")}
#: The lists whose breakeven is drawn, in shapes: one, and the two coarse sets of the pool table.
LISTS = (1, 9, 36)


def _priced(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    require(frame, PRICED_COLUMNS, "pool_priced")
    known = frame[frame["how"] != "measured"]
    require(known, ("bytes",), "pool_priced")
    if frame[["rows", "context", "heads", "width_multiple", "dtype"]].drop_duplicates().shape[0] != 1:
        raise FigureError("pool_priced: lines of more than one engine; wanted one")
    one, many = frame[frame["where"] == ONE], frame[frame["where"] == MANY]
    if not {"computed", "simulated"} <= set(one["how"]) or set(many["term"]) != set(WAYS):
        raise FigureError(f"pool_priced: wanted {ONE} and {MANY}, computed and simulated, in {len(WAYS)} ways")
    return one, many


def _terms(one: pd.DataFrame, how: str) -> dict[str, float]:
    part = one[one["how"] == how]
    return dict(zip(part["term"], part["bytes"], strict=True))


def _total(bill: dict[str, float]) -> float:
    return math.fsum(bill.values())


def _unmeasured(frame: pd.DataFrame) -> str:
    return "no GPU has recorded it yet" if frame["device"].iloc[0] == "cpu" else "it did not fit"


def _priced_alt(frame: pd.DataFrame) -> str:
    one, many = _priced(frame)
    line, bill = frame.iloc[0], _terms(one, "simulated")
    parts = ", ".join(f"{term} {bytes_label(nbytes)}" for term, nbytes in bill.items())
    seen = _total(_terms(one, "measured"))
    ways = "; ".join(
        f"{how} "
        + ", ".join(
            f"{way} {bytes_label(nbytes)}"
            for way, nbytes in zip(part["term"], part["bytes"], strict=True)
            if not math.isnan(nbytes)
        )
        for how, part in many.groupby("how", sort=False)
        if part["bytes"].notna().any()
    )
    return (
        f"Above, bars of the memory of one recording of {_rows(line)} by {line.context:,} tokens, {line.heads} "
        f"heads, {line['dtype']}. Computed: the scores alone, {bytes_label(_total(_terms(one, 'computed')))}. "
        f"Simulated: {bytes_label(_total(bill))}, of which {parts}. Measured: "
        f"{_unmeasured(frame) if math.isnan(seen) else bytes_label(seen)}. Below, on a logarithmic axis, the list of "
        f"{line.shapes} shapes of width multiple {line.width_multiple}: {ways}."
    )


@figure(
    name="pool_priced",
    data="pool-terms.csv",
    caption=(
        "The memory of recorded reads: what the formula prices, what is alive at the peak, and what the pool reserves, "
        "for the largest shape and for the whole list."
    ),
    alt=_priced_alt,
    size=(7.0, 5.5),
)
def pool_priced(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Above: one recording, computed, simulated term by term, measured. Below: the list, in one pool and in many.

    ``frame`` is that of `bench.pool.priced`.
    """
    one, many = _priced(frame)
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    line = frame.iloc[0]
    heads = f"{line.heads} heads, {line.kv_heads} K/V heads, {line['dtype']}"
    _bars(picture.add_axes((0.95 / width, 3.5 / height, 5.85 / width, 1.6 / height)), one, frame, palette)
    picture.text(0.12 / width, 5.28 / height, f"One recording: {_rows(line)} x {line.context:,} tokens, {heads}",
                 size=10, weight="bold", va="center")  # fmt: skip
    _ways(picture.add_axes((1.85 / width, 0.72 / height, 4.75 / width, 1.9 / height)), many, palette)
    picture.text(0.12 / width, 2.85 / height,
                 f"All {line.shapes} shapes, width multiple {line.width_multiple}, log scale",
                 size=10, weight="bold", va="center")  # fmt: skip


def _bars(axes: Axes, one: pd.DataFrame, frame: pd.DataFrame, palette: Palette) -> None:
    bills = {how: _terms(one, how) for how in HOW_STYLE}
    most = max(_total(bill) for bill in bills.values() if not math.isnan(_total(bill)))
    axes.set(xlim=(0, most * 1.14), ylim=(2.5, -0.5))
    inches = 5.85 / (most * 1.14)
    for at, (how, bill) in enumerate(bills.items()):
        total, left = _total(bill), 0.0
        if math.isnan(total):
            axes.annotate(_unmeasured(frame), (0, at), (4, 0), textcoords="offset points", va="center", size=10,
                          color=palette.muted)  # fmt: skip
            continue
        thin: dict[str, float] = {}
        for term, nbytes in bill.items():
            family = HOW_STYLE[how][0] if how == "measured" else TERM_FAMILIES.get(term, "sampling")
            fill = palette.grid if term == HOLES else palette.families[family]
            axes.barh([at], [nbytes], left=left, height=0.62, color=fill, edgecolor=palette.paper, lw=0.6)
            label = f"{term}\n{bytes_label(nbytes)}"
            if max(text_width(part, 8.5) for part in label.split("\n")) + 0.08 < nbytes * inches and len(bill) > 1:
                axes.text(left + nbytes / 2, at, label, ha="center", va="center", size=8.5, color=palette.text_on(fill))
            elif len(bill) > 1:
                thin[term] = nbytes
            left += nbytes
        axes.annotate(bytes_label(total), (left, at), (4, 0), textcoords="offset points", va="center", size=10,
                      weight="bold")  # fmt: skip
        if thin:
            axes.annotate(_smallest(thin, 5.8), (0, at + 0.31), (0, -3), va="top", size=8.5,
                          textcoords="offset points", color=palette.muted)  # fmt: skip
    axes.set_yticks(range(3), list(bills))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: bytes_label(value) if value else "0")
    axes.locator_params(axis="x", nbins=5)


def _smallest(thin: dict[str, float], inches: float) -> str:
    """The terms that are too thin to label, largest first, as many as fit into a line."""
    named = [f"{term} {bytes_label(nbytes)}" for term, nbytes in sorted(thin.items(), key=lambda item: -item[1])]
    for count in range(len(named), 0, -1):
        rest = f" and {len(named) - count} more" if count < len(named) else ""
        text = "thin: " + ", ".join(named[:count]) + rest
        if text_width(text, 8.5) < inches:
            break
    return text


def _ways(axes: Axes, many: pd.DataFrame, palette: Palette) -> None:
    known = many[many["bytes"].notna()]
    low, high = known["bytes"].min(), known["bytes"].max()
    # Room for half a label at either end.
    room = 10 ** (0.85 * max(math.log10(high / low), 0.5) / (4.75 - 2 * 0.85))
    axes.set(xscale="log", xlim=(low / room, high * room), ylim=(len(WAYS) - 0.45, -0.65))
    axes.xaxis.set_major_formatter(lambda value, _: bytes_label(value))
    axes.minorticks_off()
    for how, way, nbytes in zip(known["how"], known["term"], known["bytes"], strict=True):
        family, marker = HOW_STYLE[how]
        at, below = WAYS.index(way), how == "measured"
        axes.plot([nbytes], [at], marker=marker, ms=7, color=palette.families[family], ls="")
        text = f"{how} {bytes_label(nbytes)}"
        axes.annotate(text, (nbytes, at), (0, -7 if below else 6), textcoords="offset points", ha="center", size=9.5,
                      va="top" if below else "bottom", color=palette.ink)  # fmt: skip
    axes.set_yticks(range(len(WAYS)), [way.replace(", ", ",\n") for way in WAYS])
    axes.tick_params(axis="y", length=0)


def _by_way(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """``(how, way, lines)`` of what is drawn: a maximum has no order, so one pool is computed once."""
    require(frame, MULTIPLE_COLUMNS, "pool_by_multiple")
    if frame.duplicated(["width_multiple", "way"]).any():
        raise FigureError("pool_by_multiple: two lines of one width multiple and way")
    for how in ("computed", "simulated"):
        for way in WAYS:
            part = frame[frame["way"] == way].sort_values("shapes")
            if len(part) < 2:
                raise FigureError(f"pool_by_multiple: wanted {way} for two width multiples or more, saw {len(part)}")
            if how == "simulated" or way != WAYS[1]:
                yield how, way if how == "simulated" else way.partition(",")[0], part


def _multiple_alt(frame: pd.DataFrame) -> str:
    ends = [(how, way, part[f"{how}_bytes"].iloc[[0, -1]].map(bytes_label)) for how, way, part in _by_way(frame)]
    lines = [f"{how}, {way}: from {low} to {high}" for how, way, (low, high) in ends]
    first, *_, last = sorted(frame["shapes"])
    return (
        f"Bytes of recordings against the number of shapes, {first} to {last}, both axes logarithmic, with the width "
        f"multiple above. {'; '.join(lines)}. The lines of one pool, largest first, are level; all others rise."
    )


@figure(
    name="pool_by_multiple",
    data="pool-simulated.csv",
    caption=(
        "A pool that is shared costs its largest shape, however fine the set; private pools, or a bad order, cost the "
        "sum."
    ),
    alt=_multiple_alt,
    size=(7.0, 4.2),
)
def pool_by_multiple(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Bytes over the number of shapes: computed from scores, and simulated; in one pool and in a pool each.

    ``frame`` is that of `bench.pool.by_multiple`; lines with ``measured_bytes`` get a triangle.
    """
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    axes = picture.add_axes((0.9 / width, 0.78 / height, 3.35 / width, 2.75 / height))
    lines = list(_by_way(frame))
    sizes = frame.drop_duplicates("shapes").sort_values("shapes")
    values = pd.concat([frame["computed_bytes"], frame["simulated_bytes"]])
    axes.set(xscale="log", yscale="log", xlim=(sizes["shapes"].min() / 1.3, sizes["shapes"].max() * 1.1),
             ylim=(values.min() / 2.5, values.max() * 3))  # fmt: skip
    marks = dict(zip(WAYS, ("-", ":", "--"), strict=True)) | {"one pool": "-"}
    ends = []
    for how, way, part in lines:
        family, marker = HOW_STYLE[how]
        xs, ys = part["shapes"].to_numpy(), part[f"{how}_bytes"].to_numpy()
        axes.plot(xs, ys, color=palette.families[family], marker=marker, ls=marks[way], lw=2)
        ends.append((float(ys[-1]), f"{how}, {way}", palette.families[family]))
        if "measured_bytes" in part and how == "simulated":
            axes.plot(xs, part["measured_bytes"], color=palette.families["elementwise"], marker="^", ls="")
    _end_labels(axes, ends)
    axes.set_xticks(sizes["shapes"], [f"{shapes}" for shapes in sizes["shapes"]])
    axes.set_xlabel("shapes in the list")
    axes.set_ylabel("bytes")
    axes.yaxis.set_major_formatter(lambda value, _: bytes_label(value))
    axes.minorticks_off()
    above = axes.secondary_xaxis("top")
    above.set_xticks(sizes["shapes"], [f"{multiple}" for multiple in sizes["width_multiple"]], size=9)
    above.set_xticks([], minor=True)
    above.set_xlabel("width multiple", size=10)
    above.spines["top"].set_visible(False)


def _end_labels(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write ``(y, text, colour)`` beside the right end of ``axes``, from the lowest up, each clear of the one below."""
    lowest = -math.inf
    tall = axes.bbox.height / axes.figure.dpi
    for y, text, colour in sorted(ends):
        at = axes.transAxes.inverted().transform(axes.transData.transform((axes.get_xlim()[1], y)))[1]
        at = max(at, lowest)
        axes.annotate(text, (1, at), (6, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                      size=9.5, color=colour, weight="bold", annotation_clip=False)  # fmt: skip
        lowest = at + 0.19 / tall


def _costs(frame: pd.DataFrame) -> tuple[pd.Series, dict[int, float]]:
    """The line that is drawn, the last, and the steps until a list of so many shapes has paid."""
    require(frame, LAUNCH_COLUMNS, "breakeven_curve")
    line = frame.iloc[-1]
    if line.record_ms <= 0:
        raise FigureError(f"breakeven_curve: record_ms must be positive, saw {line.record_ms}")
    costs = {count: capture_cost_s([(1, 1)] * count, line.record_ms / 1e3) for count in LISTS}
    return line, {count: capture_breakeven_steps(cost, line.saving_ms / 1e3) for count, cost in costs.items()}


def _steps(count: float) -> str:
    return "never" if math.isinf(count) else f"after {count:,.0f} steps"


def _rows(line: pd.Series) -> str:
    return f"{line.rows} row" + ("s" if line.rows > 1 else "")


def _curve_alt(frame: pd.DataFrame) -> str:
    line, pays = _costs(frame)
    parts = ", ".join(f"{count} shape{'s' * (count > 1)} {_steps(steps)}" for count, steps in pays.items())
    return (
        f"Seconds saved against decode steps for {line.step} of {_rows(line)}: one recording takes "
        f" {line.record_ms:.3g} ms, a replay saves {line.saving_ms:.3g} ms. Parallel straight lines, one for "
        f"each list, start below zero at what its recordings cost, and pay: {parts}. A line for shapes that are met "
        "once each falls steeply, and never pays."
    )


@figure(
    name="breakeven_curve",
    data="launch.csv",
    caption=(
        "A list of recordings starts with a debt and pays it back a replay at a time. Shapes that are met once only "
        "add to it."
    ),
    alt=_curve_alt,
    size=(7.0, 3.8),
)
def breakeven_curve(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
    """Seconds saved over decode steps, for lists of `LISTS` shapes and for shapes that are met once each.

    ``frame`` is that of `bench.launch.measure`; its last line is drawn.
    """
    line, pays = _costs(frame)
    picture.set_layout_engine("none")
    width, height = picture.get_size_inches()
    axes = picture.add_axes((0.95 / width, 0.8 / height, 3.6 / width, 2.75 / height))
    record, saving = line.record_ms / 1e3, line.saving_ms / 1e3
    finite = [steps for steps in pays.values() if math.isfinite(steps)]
    until = max(finite, default=1000.0) * 1.35
    debt = LISTS[-1] * record
    low = min(-debt, saving * until - debt) * 1.3
    axes.set(xlim=(0, until), ylim=(low, max(saving * until * 1.1, debt * 0.15)))
    axes.axhline(0, color=palette.muted, lw=1.2)
    ends = []
    colours = [palette.families[name] for name in ("matmul", "norm", "elementwise")]
    for (count, steps), colour, style in zip(pays.items(), colours, ("-", "--", "-."), strict=True):
        last = saving * until - count * record
        axes.plot([0, until], [-count * record, last], color=colour, ls=style, marker="", lw=2)
        if math.isfinite(steps):
            axes.plot([steps], [0], marker="o", ms=7, color=colour)
        ends.append((last, f"{count} shape{'s' * (count > 1)}: {_steps(steps)}", colour))
    _end_labels(axes, ends)
    # Every step records and replays once: it loses what a recording costs, and saves nothing.
    once = -low / record
    axes.plot([0, once], [0, low], color=palette.warn, ls=":", marker="", lw=2)
    axes.annotate("each shape met once: never", (once, low), (8, 5), textcoords="offset points", va="bottom", size=10,
                  color=palette.warn, weight="bold")  # fmt: skip
    axes.set_xlabel(f"decode steps ({line.step}, {_rows(line)})")
    axes.set_ylabel("seconds saved so far")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.locator_params(axis="x", nbins=5)
