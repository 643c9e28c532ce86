"""What the reader can move in a lesson. Each has a static twin: the figure it draws, for a page without a kernel."""

from __future__ import annotations

import base64
from html import escape
from typing import Any

import ipywidgets  # type: ignore[import-untyped]
import pandas as pd
import torch

from nanoserve_lab.bench.pool import LOGS, OURS, Heads, priced
from nanoserve_lab.figures.buckets import choose, padding_against_graphs
from nanoserve_lab.figures.pool import pool_priced
from nanoserve_lab.figures.style import Picture

#: How a slider looks, and when it speaks: each change draws a figure anew.
_SLIDER = {"continuous_update": False, "style": {"description_width": "110px"}, "layout": {"width": "420px"}}


class Drawing(ipywidgets.HTML):
    """A figure in a box of widgets, with its alternative text."""

    def show(self, picture: Picture) -> None:
        """Put ``picture`` in place of what is shown now."""
        data = base64.b64encode(picture.rendered("png", dpi=150)).decode("ascii")
        width = round(picture.get_figwidth() * 100)
        self.value = f'<img src="data:image/png;base64,{data}" width="{width}" alt="{escape(picture.alt)}">'

    def __repr__(self) -> str:
        return "Drawing()"  # the figure itself would go into the notebook as text


def padding_explorer(frame: pd.DataFrame) -> ipywidgets.VBox:
    """`padding_against_graphs` of ``frame`` with two sliders, the load and the width multiple, that move its ring."""
    rows = frame.groupby("rate_scale")["mean_rows"].first()
    loads = [(f"{mean:.0f} rows", scale) for scale, mean in rows.items()]
    multiples = sorted(frame["width_multiple"].unique().tolist())
    load = ipywidgets.SelectionSlider(options=loads, value=loads[-1][1], description="load", **_SLIDER)
    multiple = ipywidgets.SelectionSlider(
        options=multiples, value=multiples[len(multiples) // 2], description="width multiple", **_SLIDER
    )
    drawing = Drawing()

    def draw(_: object = None) -> None:
        drawing.show(padding_against_graphs(choose(frame, load.value, multiple.value)))

    load.observe(draw, "value")
    multiple.observe(draw, "value")
    draw()
    return ipywidgets.VBox([load, multiple, drawing])


def pool_explorer() -> ipywidgets.VBox:
    """`pool_priced`, computed and simulated, with sliders for rows, context, heads, dtype and width multiple; at first
    at the values of `bench.pool.priced`."""

    def slider(description: str, options: list[Any], value: Any) -> ipywidgets.SelectionSlider:
        return ipywidgets.SelectionSlider(options=options, value=value, description=description, **_SLIDER)

    pairs = [(OURS.heads, OURS.kv_heads), (16, 8), (LOGS.heads, LOGS.kv_heads), (32, 32), (64, 8)]
    rows = slider("rows", [1 << power for power in range(10)], 256)
    context = slider("context", [1 << power for power in range(9, 15)], 8192)
    heads = slider("heads", [(f"{q} heads, {kv} K/V", (q, kv)) for q, kv in pairs], pairs[0])
    dtype = slider("dtype", ["float32", "bfloat16"], "float32")
    multiple = slider("width multiple", [512, 1024, 2048, 4096, 8192], 2048)
    sliders, drawing = [rows, context, heads, dtype, multiple], Drawing()

    def draw(_: object = None) -> None:
        shape = Heads(heads.value[0], heads.value[1], dtype=dtype.value)
        # On a GPU a measurement takes as much memory as it finds out: here it is left alone.
        drawing.show(pool_priced(priced(rows.value, context.value, multiple.value, shape, torch.device("cpu"))))

    for each in sliders:
        each.observe(draw, "value")
    draw()
    return ipywidgets.VBox([*sliders, drawing])
