"""The figures without data: how the parts of the engine hang together."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from nanoserve_lab.figures.registry import figure
from nanoserve_lab.figures.style import Palette, Picture, text_width


@dataclass(frozen=True)
class Canvas:
    """Boxes, tags and arrows in inches from the lower left corner."""

    axes: Axes
    palette: Palette

    @classmethod
    def over(cls, picture: Picture, palette: Palette) -> Canvas:
        """A canvas that covers ``picture``, without axes to be seen."""
        width, height = picture.get_size_inches()
        picture.set_layout_engine("none")
        axes = picture.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.axis("off")
        return cls(axes, palette)

    def quarters(self, title: str, *titles: str) -> None:
        """A title over four shaded panels of 3.4 x 3.02 with titles of their own, on a canvas of 7 x 6.7."""
        self.text(0.1, 6.48, title, size=12, ha="left", weight="bold")
        for (x, y), own in zip(((0.06, 3.22), (3.54, 3.22), (0.06, 0.06), (3.54, 0.06)), titles, strict=True):
            self.shade(x, y, 3.4, 3.02)
            self.text(x + 0.1, y + 2.94, own, size=10, ha="left", va="top", weight="bold")

    def shade(self, x: float, y: float, width: float, height: float) -> None:
        """A shaded area, behind everything that is drawn later."""
        self.axes.add_patch(Rectangle((x, y), width, height, fc=self.palette.grid, alpha=0.35, ec="none"))

    def box(self, x: float, y: float, width: float, height: float, title: str, *, fill: str = "", top: bool = False,
            edge: str = "") -> None:  # fmt: skip
        """A rounded box with its title in the middle, or at its upper edge when something else goes inside."""
        self.axes.add_patch(
            FancyBboxPatch((x + 0.05, y + 0.05), width - 0.1, height - 0.1, boxstyle="round,pad=0.05",
                           fc=fill or self.palette.paper, ec=edge or self.palette.ink, lw=1.3)
        )  # fmt: skip
        at = y + height - 0.06 if top else y + height / 2
        self.text(x + width / 2, at, title, va="top" if top else "center", weight="bold", size=10)

    def text(self, x: float, y: float, text: str, *, size: float = 9, color: str = "", ha: str = "center",
             va: str = "center", weight: str = "normal") -> None:  # fmt: skip
        self.axes.text(x, y, text, size=size, color=color or self.palette.ink, ha=ha, va=va, weight=weight)

    def tag(self, x: float, y: float, lesson: str, what: str, centred: bool = True) -> None:
        """The number of a lesson and what stands still after it; ``x`` is the middle, or the left end."""
        number, words = text_width("00", 9, bold=True) + 0.08, text_width(what, 9)
        left = x - (number + 0.05 + words) / 2 if centred else x
        self.axes.add_patch(
            FancyBboxPatch((left + 0.03, y - 0.06), number - 0.06, 0.12, boxstyle="round,pad=0.03",
                           fc=self.palette.accent, ec="none")
        )  # fmt: skip
        self.text(left + number / 2, y, lesson, color=self.palette.paper, weight="bold", va="center_baseline")
        self.text(left + number + 0.05, y, what, ha="left", color=self.palette.accent, va="center_baseline")

    def arrow(self, *points: tuple[float, float]) -> None:
        """An arrow through ``points``."""
        self.axes.plot(*zip(*points[:-1], points[-1], strict=False), color=self.palette.ink, lw=1.4, marker="",
                       ls="-", solid_joinstyle="round")  # fmt: skip
        self.axes.annotate("", points[-1], points[-2], arrowprops={
            "arrowstyle": "-|>", "color": self.palette.ink, "lw": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11,
        })  # fmt: skip

    def cells(self, x: float, y: float, fills: list[str], size: float = 0.16) -> None:
        """A row of square cells, one a colour."""
        for index, fill in enumerate(fills):
            self.axes.add_patch(Rectangle((x + index * size, y), size, size, fc=fill, ec=self.palette.ink, lw=0.8))


@figure(
    name="decode_step_path",
    data=None,
    caption="The path of one decode step, and the lesson that makes each part of it stand still.",
    alt=(
        "A diagram of one decode step in two lanes. In the host lane, requests go to the scheduler and on to the plan. "
        "The plan writes five tensors in the device lane: input ids, positions, write slots, context lengths and the "
        "slot mapping. The forward reads them together with the K/V pool, a row of blocks whose block 0 is the sink, "
        "and gives logits; the sampler turns these into tokens, which stay on the device until a deferred readback "
        "brings them to the host as text. Apart from the pool, which is read and written, arrows run one way only. "
        "Tags name the lessons: 10 at the requests and the text; 04, the shape, at the scheduler; 02, the state, at "
        "the plan; 05, the addresses, at four tensors; 03, the slot table, at the slot mapping; 01, one region, at the "
        "forward; 09, the width, at the pool; 07, the memory, at the logits; 00 at the readback. A dashed frame around "
        "forward, pool and logits is recorded and replayed, lesson 06, up front, lesson 08. Lesson 11 covers every "
        "fault of a recorded step."
    ),
    size=(7.0, 5.0),
)
def decode_step_path(picture: Picture, data: None, palette: Palette) -> None:
    """One decode step from requests to text, in a host lane and a device lane, with the lesson that fixes each part."""
    canvas = Canvas.over(picture, palette)
    for low, high, name in ((3.62, 4.94, "host"), (0.36, 3.54, "device")):
        canvas.shade(0.06, low, 6.88, high - low)
        canvas.text(0.15, high - 0.05, name, size=10, color=palette.muted, ha="left", va="top", weight="bold")
    _host(canvas, low=3.84)
    _inputs(canvas)
    _forward(canvas)
    _outputs(canvas)
    canvas.tag(0.15, 0.19, "11", "every fault of a recorded step, and the check that catches it", centred=False)


def _host(canvas: Canvas, low: float) -> None:
    boxes = (
        (0.15, 0.95, "requests", "10", "serving"),
        (1.5, 1.05, "scheduler", "04", "shape"),
        (2.95, 0.9, "plan", "02", "state"),
        (4.95, 1.05, "deferred\nreadback", "00", "step"),
        (6.2, 0.65, "text", "10", "serving"),
    )
    for x, width, title, lesson, what in boxes:
        canvas.box(x, low, width, 0.46, title)
        canvas.tag(x + width / 2, low + 0.62, lesson, what)
    middle = low + 0.23
    canvas.arrow((1.1, middle), (1.5, middle))
    canvas.arrow((2.55, middle), (2.95, middle))
    canvas.arrow((6.0, middle), (6.2, middle))
    canvas.arrow((3.4, low), (3.4, 3.22), (1.05, 3.22), (1.05, 2.98))
    canvas.text(2.25, 3.32, "written in place", color=canvas.palette.muted)


def _inputs(canvas: Canvas) -> None:
    live, padded = canvas.palette.families["elementwise"], canvas.palette.paper
    row = [live, live, live, padded]
    for index, name in enumerate(("input ids", "positions", "write slots", "context lengths")):
        y = 2.72 - index * 0.25
        canvas.cells(0.2, y, row)
        canvas.text(0.93, y + 0.08, name, ha="left", va="center_baseline")
    canvas.tag(0.2, 1.78, "05", "addresses", centred=False)
    for line in range(2):
        canvas.cells(0.2, 1.22 + line * 0.16, row)
    canvas.text(0.93, 1.38, "slot mapping", ha="left", va="center_baseline")
    canvas.tag(0.2, 1.03, "03", "slot table", centred=False)
    canvas.text(0.2, 0.66, "blank: a padded row", color=canvas.palette.muted, ha="left", va="center_baseline")
    canvas.arrow((2.02, 2.1), (2.55, 2.1))


def _forward(canvas: Canvas) -> None:
    palette = canvas.palette
    canvas.axes.add_patch(
        FancyBboxPatch((2.4, 0.52), 2.98, 2.44, boxstyle="round,pad=0.05", fc="none", ec=palette.warn, lw=1.4, ls="--")
    )
    canvas.tag(2.5, 2.82, "06", "recorded, replayed", centred=False)
    canvas.tag(4.35, 2.82, "08", "up front", centred=False)
    canvas.box(2.55, 1.78, 1.5, 0.74, "forward", top=True)
    canvas.tag(3.3, 1.98, "01", "one region")
    canvas.box(2.55, 0.6, 1.8, 0.92, "")
    canvas.text(2.63, 1.37, "K/V pool", weight="bold", size=10, ha="left", va="center_baseline")
    canvas.tag(3.45, 1.37, "09", "width", centred=False)
    first, second = palette.families["copy, index"], palette.families["norm"]
    canvas.cells(2.65, 0.97, [palette.muted, first, first, second, first, second, palette.paper, palette.paper], 0.2)
    canvas.text(2.65, 0.79, "block 0 is the sink", ha="left", va="center_baseline")
    canvas.axes.annotate("", (3.3, 1.78), (3.3, 1.52), arrowprops={
        "arrowstyle": "<|-|>", "color": palette.ink, "lw": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9,
    })  # fmt: skip
    canvas.arrow((4.05, 2.15), (4.5, 2.15))
    canvas.box(4.5, 1.94, 0.78, 0.42, "logits")
    canvas.tag(4.89, 1.78, "07", "memory")


def _outputs(canvas: Canvas) -> None:
    canvas.box(5.72, 1.94, 1.1, 0.42, "sampler")
    canvas.text(6.27, 1.78, "not recorded", color=canvas.palette.muted, va="center_baseline")
    canvas.arrow((5.28, 2.15), (5.72, 2.15))
    canvas.arrow((6.27, 2.36), (6.27, 2.72))
    canvas.box(5.6, 2.72, 1.25, 0.6, "tokens", top=True)
    canvas.text(6.22, 2.9, "stay on the device", size=8.5, va="center_baseline")
    canvas.arrow((5.8, 3.32), (5.8, 3.84))
