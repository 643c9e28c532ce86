"""The look of every figure: two style sheets, the colours by name, and a figure that shows itself in a notebook."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from PIL import Image

#: Each kind of operation and the family whose colour it takes: eight colours can be told apart, twelve cannot.
FAMILY_OF: dict[str, str] = {
    "matmul": "matmul",
    "attention": "attention",
    "norm": "norm",
    "rope": "elementwise",
    "activation": "elementwise",
    "elementwise": "elementwise",
    "reduction": "elementwise",
    "embedding": "embedding",
    "index": "copy, index",
    "copy": "copy, index",
    "sampling": "sampling",
    "other": "other",
}
KINDS = tuple(FAMILY_OF)
FAMILIES = tuple(dict.fromkeys(FAMILY_OF.values()))


@dataclass(frozen=True)
class Palette:
    """The named colours of one theme, as ``#rrggbb``. Text colours have at least 4.5:1 on ``paper``, fills 3:1."""

    paper: str
    ink: str
    muted: str
    line: str
    grid: str
    accent: str
    warn: str
    memory: str
    launch: str
    families: dict[str, str] = field(default_factory=dict)

    def kind(self, kind: str) -> str:
        """The colour of an operation's kind (see `KINDS`); raises `KeyError` for another."""
        return self.families[FAMILY_OF[kind]]

    def text_on(self, fill: str) -> str:
        """``ink`` or ``paper``, whichever stands out more on ``fill``."""
        return max(self.ink, self.paper, key=lambda colour: contrast(colour, fill))


PALETTES: dict[str, Palette] = {
    "light": Palette(
        paper="#ffffff",
        ink="#1b1f27",
        muted="#586172",
        line="#8a93a1",
        grid="#dfe3e9",
        accent="#244684",
        warn="#a71402",
        memory="#e3ebf7",
        launch="#f8e6df",
        families=dict(
            zip(
                FAMILIES,
                ("#244684", "#a71402", "#358442", "#0e99f7", "#c1810d", "#ab86c4", "#73133d", "#6b7280"),
                strict=True,
            )
        ),
    ),
    "dark": Palette(
        paper="#10141a",
        ink="#e8ebf0",
        muted="#a3adba",
        line="#7f8a9a",
        grid="#2b323c",
        accent="#56b0f7",
        warn="#ff9a7a",
        memory="#14212f",
        launch="#2b1c18",
        families=dict(
            zip(
                FAMILIES,
                ("#069aff", "#c78137", "#06e19a", "#c4e9f7", "#dcd54a", "#9b70b9", "#f03869", "#8b95a5"),
                strict=True,
            )
        ),
    ),
}
THEMES = tuple(PALETTES)


@contextmanager
def style(theme: str = "light") -> Iterator[Palette]:
    """Draw in ``theme`` (one of `THEMES`) whatever the reader's own settings are; yields its `Palette`."""
    if theme not in PALETTES:
        raise ValueError(f"theme: wanted one of {', '.join(THEMES)}, saw {theme!r}")
    with mpl.rc_context():
        mpl.rc_file(Path(__file__).with_name(f"{theme}.mplstyle"))  # Matplotlib's defaults, then the sheet
        yield PALETTES[theme]


class Picture(Figure):
    """A Matplotlib figure that displays itself in a notebook, once and with its alternative text, without pyplot."""

    def __init__(self, *args: Any, theme: str = "light", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.theme = theme
        self.caption = ""
        self.alt = ""

    def rendered(self, format: str, dpi: int = 200, salt: str = "", metadata: dict[str, Any] | None = None) -> bytes:
        """The file's bytes in ``format`` (``png`` or ``svg``), in the figure's own theme; ``dpi`` counts for PNG."""
        buffer = io.BytesIO()
        with style(self.theme), mpl.rc_context({"svg.hashsalt": salt}):
            self.savefig(buffer, format=format, dpi=dpi, metadata=metadata)
        return buffer.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # Not a representation method: the one that pyplot registers for every Figure would come first.
        bundle = {"image/png": base64.b64encode(self._small_png()).decode("ascii"), "text/plain": repr(self)}
        width = round(self.get_figwidth() * 100)
        about = {"width": width, "alt": self.alt, "caption": self.caption}  # the caption is for nanoserve_lab.post
        display(bundle, raw=True, metadata={"image/png": about})

    def _small_png(self) -> bytes:
        # Sharper than it is shown, and in 256 colours (no value off by more than about 5): a notebook stays small.
        with Image.open(io.BytesIO(self.rendered("png", dpi=150))) as image:
            reduced = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        reduced.save(buffer, format="png", optimize=True)
        return buffer.getvalue()


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours after WCAG 2: from 1 to 21."""
    bright, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@functools.cache
def text_width(text: str, size: float, bold: bool = False) -> float:
    """The width of ``text`` in inches at ``size`` points in the figures' font."""
    if not text.strip():
        return 0.0
    font = font_manager.FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72


def fitted(text: str, width: float, size: float) -> str:
    """``text``, cut with an ellipsis to at most ``width`` inches at ``size`` points; empty if 3 letters do not fit."""
    if text_width(text, size) <= width:
        return text
    for length in range(len(text) - 1, 2, -1):
        if text_width(cut := text[:length].rstrip("_ .") + "…", size) <= width:
            return cut
    return ""


def printable(text: str) -> str:
    """``text`` in one line of glyphs that the figures' font has: spaces as ``␣``, line ends as ``↵``."""
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    shown = text.replace("\r", "").replace("\n", "↵").replace("\t", "→").replace(" ", "␣")
    return "".join(c if font.get_char_index(ord(c)) else "\ufffd" for c in shown)
