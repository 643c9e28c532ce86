"""Labels beside points of a chart, each put where it covers neither a line nor another label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes

from nanoserve_lab.figures.style import text_width

Box = tuple[float, float, float, float]

#: Where a label may stand around its point: the side it lies on in x and in y, nearest first.
SIDES = ((1, 1), (-1, -1), (-1, 1), (1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))


class Labels:
    """Places labels in ``axes``, whose position and limits must be final, clear of ``obstacles`` (data points)."""

    def __init__(self, axes: Axes, obstacles: Iterable[tuple[float, float]], size: float = 10) -> None:
        self.axes, self.size = axes, size
        self.extent = np.array([axes.bbox.width, axes.bbox.height]) / axes.figure.dpi
        self.points = np.array([self._inches(point) for point in obstacles])
        self.boxes: list[Box] = []

    def add(self, text: str, points: Sequence[tuple[float, float]], color: str, weight: str = "normal") -> None:
        """Write ``text`` beside the first of ``points`` where it fits, or where it collides least."""
        width, height = text_width(text, self.size, weight == "bold") + 0.06, self.size / 72 * 1.3
        candidates = (
            self._beside(point, distance, side, width, height)
            for distance in (0.1, 0.2, 0.32)
            for point in points
            for side in SIDES
        )
        best: tuple[float, Box] | None = None
        for box in candidates:
            cost = self._cost(box)
            if best is None or cost < best[0]:
                best = cost, box
            if cost == 0:
                break
        if best is None:
            raise ValueError(f"label {text!r}: no point to stand beside")
        box = best[1]
        self.boxes.append(box)
        x, y = np.array([box[0] + box[2], box[1] + box[3]]) / 2 / self.extent
        self.axes.text(x, y, text, transform=self.axes.transAxes, ha="center", va="center", size=self.size,
                       color=color, weight=weight)  # fmt: skip

    def _beside(
        self, point: tuple[float, float], distance: float, side: tuple[int, int], width: float, height: float
    ) -> Box:
        x, y = self._inches(point)
        left = x + side[0] * distance - width * (1 - side[0]) / 2
        low = y + side[1] * distance - height * (1 - side[1]) / 2
        return left, low, left + width, low + height

    def _inches(self, point: tuple[float, float]) -> np.ndarray:
        return self.axes.transAxes.inverted().transform(self.axes.transData.transform(point)) * self.extent

    def _cost(self, box: Box) -> float:
        left, low, right, high = box
        outside = max(0, -left) + max(0, -low) + max(0, right - self.extent[0]) + max(0, high + 0.3 - self.extent[1])
        x, y = self.points.T
        covered = int(((x > left - 0.04) & (x < right + 0.04) & (y > low - 0.04) & (y < high + 0.04)).sum())
        shared = sum(
            max(0.0, min(right, b[2]) - max(left, b[0])) * max(0.0, min(high, b[3]) - max(low, b[1]))
            for b in self.boxes
        )
        return 1000 * outside + 100 * shared + covered
