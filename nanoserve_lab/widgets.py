"""What the reader can move in a lesson. Each has a static twin: the figure it draws, for a page without a kernel."""

from __future__ import annotations

import base64
from html import escape

import ipywidgets  # type: ignore[import-untyped]
import pandas as pd

from nanoserve_lab.figures.buckets import choose, padding_against_graphs
from nanoserve_lab.figures.style import Picture


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
    slider = {"continuous_update": False, "style": {"description_width": "110px"}, "layout": {"width": "420px"}}
    load = ipywidgets.SelectionSlider(options=loads, value=loads[-1][1], description="load", **slider)
    multiple = ipywidgets.SelectionSlider(
        options=multiples, value=multiples[len(multiples) // 2], description="width multiple", **slider
    )
    drawing = Drawing()

    def draw(_: object = None) -> None:
        drawing.show(padding_against_graphs(choose(frame, load.value, multiple.value)))

    load.observe(draw, "value")
    multiple.observe(draw, "value")
    draw()
    return ipywidgets.VBox([load, multiple, drawing])
