"""Lesson 00: the launches of a step, and where bytes and launches take the same time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from nanoserve_lab.bench.step import trace_step
from nanoserve_lab.model.tiny import TINY, tiny_model


def check_launches(predict: Callable[[int], int]) -> str:
    """Lesson 00: ``predict(layers)`` against the launches counted in a two-row step of 1, 2, 3 and 5 layers."""
    if not isinstance(predict(2), int):
        return f"2 layers: {predict(2)!r}; a whole number was wanted"
    wrong = []
    for layers in (1, 2, 3, 5):
        counted = len(trace_step(tiny_model(replace(TINY, num_layers=layers)), rows=2, context=3, repeats=1))
        if predict(layers) != counted:
            wrong.append((layers, predict(layers), counted))
    if not wrong:
        return "right for 1, 2, 3 and 5 layers"
    told = "; ".join(f"{layers} layers: {said}, counted {counted}" for layers, said, counted in wrong)
    off = {said - counted for _, said, counted in wrong}
    if len(wrong) == 4 and len(off) == 1:
        return f"{told}. Always off by {off.pop():+d}: the layers are right, the launches around them are not"
    if all(said == counted - 2 * layers for layers, said, counted in wrong):
        return f"{told}. That is a step of one row, where K and V need no copy into another layout"
    return f"{told}. The difference changes with the layers: count the launches of one layer again"


def check_crossing(crossing: Callable[[int, int, float], float]) -> str:
    """Lesson 00: ``crossing(bytes, launches, host_s_per_launch)`` in GB/s against the bandwidth at which both limits
    take the same time."""
    for size, launches, host_s in ((544_000_000, 763, 10e-6), (1_000_000_000, 100, 1e-3)):
        said, wanted = crossing(size, launches, host_s), size / (launches * host_s) / 1e9
        if not isinstance(said, int | float):
            return f"{said!r}; a number was wanted"
        if math.isclose(said, wanted, rel_tol=1e-6):
            continue
        case = f"{size:,} bytes, {launches} launches of {host_s * 1e6:g} microseconds"
        if math.isclose(said, wanted * 1e9, rel_tol=1e-6):
            return f"{case}: that is bytes per second; 1 GB/s is 1e9 of them"
        if any(math.isclose(said * wanted, 10.0**power, rel_tol=1e-6) for power in (-18, -9, 0, 9)):
            return f"{case}: upside down; the bytes are above the line, the seconds below it"
        bytes_ms, launches_ms = size / said / 1e6 if said else math.inf, launches * host_s * 1e3
        return f"{case}: at {said:,.3g} GB/s the bytes take {bytes_ms:.3g} ms and the launches {launches_ms:.3g} ms"
    return "right: at that bandwidth the bytes and the launches take the same time"
