"""Every figure by name: what draws it, which recorded data it shows, its caption and its alternative text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nanoserve_lab.bench.provenance import provenance_line, read_csv, repository_root
from nanoserve_lab.figures.style import Palette, Picture, style

Words = str | Callable[[Any], str]
Draw = Callable[[Picture, Any, Palette], None]

#: Height in inches, at the foot of a figure, of the line that names the machine.
CORNER = 0.2


class FigureError(RuntimeError):
    """A figure that cannot be drawn or exported. The message names the figure or file, what is wanted and seen."""


@dataclass(eq=False)
class FigureFunction:
    """A registered figure; calling it draws it: ``figure_name(frame) -> Picture``, light unless told otherwise."""

    draw: Draw
    name: str
    data: str | None
    caption: Words
    alt: Words
    size: tuple[float, float]

    def __call__(self, data: pd.DataFrame | None = None, theme: str = "light") -> Picture:
        """The figure of ``data`` (a frame with provenance columns; None for a diagram).

        Raises `FigureError` for a frame the figure cannot show, `ProvenanceMissing` for one without provenance.
        """
        if (data is None) != (self.data is None):
            wanted, seen = ("no data", "some") if self.data is None else ("a frame", "none")
            raise FigureError(f"{self.name}: wanted {wanted}, saw {seen}")
        with style(theme) as palette:
            figure = Picture(figsize=self.size, theme=theme)
            if data is not None:
                foot = CORNER / self.size[1]
                figure.set_layout_engine("constrained", rect=(0, foot, 1, 1 - foot))
                line = provenance_line(data)
                figure.text(0.993, 0.05 / self.size[1], line, ha="right", va="bottom", size=8.5, color=palette.muted)
            self.draw(figure, data, palette)
            figure.caption, figure.alt = self._words("caption", data), self._words("alt", data)
        return figure

    def load(self, folder: Path) -> pd.DataFrame | None:
        """The recorded frame this figure shows, from ``folder``; None for a diagram."""
        if self.data is None:
            return None
        try:
            return read_csv(folder / self.data)
        except FileNotFoundError:
            raise FigureError(f"{self.name}: its data {self.data} is not recorded yet (looked in {folder})") from None

    def _words(self, which: str, data: pd.DataFrame | None) -> str:
        words = getattr(self, which)
        text = " ".join((words(data) if callable(words) else words).split())
        if not text:
            raise FigureError(f"{self.name}: the {which} is empty")
        return text


FIGURES: dict[str, FigureFunction] = {}


def figure(
    *, name: str, data: str | None, caption: Words, alt: Words, size: tuple[float, float] = (7.0, 3.5)
) -> Callable[[Draw], FigureFunction]:
    """Register ``draw(figure, frame, palette)`` as the figure ``name``.

    ``data`` is the CSV in the data folder that the committed figure shows, None for a diagram. ``caption`` and ``alt``
    (what is to be seen, for whoever cannot see it) are texts or functions of the frame. ``size`` is in inches. Raises
    `ValueError` for a name that is taken or unfit for a file, or for empty words.
    """
    if not name.isidentifier():
        raise ValueError(f"figure name: wanted an identifier, saw {name!r}")
    if name in FIGURES:
        raise ValueError(f"figure {name}: registered twice")
    for which, words in (("caption", caption), ("alt", alt)):
        if not callable(words) and not words.strip():
            raise ValueError(f"figure {name}: the {which} is empty")

    def register(draw: Draw) -> FigureFunction:
        FIGURES[name] = FigureFunction(draw, name, data, caption, alt, size)
        functools.update_wrapper(FIGURES[name], draw, updated=())  # its docstring and its source, for a notebook
        return FIGURES[name]

    return register


def figure_names() -> list[str]:
    """The names of all registered figures, sorted."""
    return sorted(FIGURES)


def data_folder() -> Path:
    """The repository's ``data/``; raises `FigureError` where the package runs without its repository."""
    root = repository_root()
    if root is None:
        raise FigureError(
            "the recorded data lies in the repository's data/ folder, and this installed package has no repository "
            "around it: give the folder (--data DIR)"
        )
    return root / "data"


def by_rows(frame: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    """The lines of each number of ``rows``, in rising order."""
    return [(int(rows), frame[frame["rows"] == rows]) for rows in sorted(frame["rows"].unique())]


def require(frame: pd.DataFrame, columns: tuple[str, ...], name: str) -> None:
    """Raise `FigureError` unless ``frame`` has rows, the ``columns``, and no missing value in them."""
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise FigureError(f"{name}: no column {', '.join(missing)}; saw {', '.join(map(str, frame.columns))}")
    if frame.empty:
        raise FigureError(f"{name}: the frame has no rows")
    empty = [column for column in columns if frame[column].isna().any()]
    if empty:
        raise FigureError(f"{name}: a missing value in column {', '.join(empty)}")
