"""Lesson 04: the smallest shape of a set, and the width multiple that a number of graphs can pay for."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from nanoserve_lab.bench.padding import padding, simulate
from nanoserve_lab.buckets import BucketSet

#: Rows a power of two and off it; contexts a multiple of the width multiple and off it.
SETS = [(rows, context, multiple) for rows in (6, 8, 13, 2, 1) for context in (16, 20) for multiple in (8, 32)]
#: Two of them leave a last width that is no multiple, and as many graphs as their neighbours.
MULTIPLES = (128, 512, 1024, 2000, 2048, 4096, 5000, 8192)
LIMITS = (1000, 64, 36, 20, 9, 8)

Fit = Callable[[list[int], list[int], int, int], tuple[int, int]]


def check_fit(fit: Fit) -> str:
    """Lesson 04: ``fit(bucket_rows, bucket_widths, rows, context)`` against the smallest shape that covers, for every
    number of rows and every context of 20 sets; the lists rise. Where nothing covers it must raise."""
    for size in SETS:
        buckets = BucketSet(*size)
        for rows in range(1, buckets.max_rows + 1):
            for context in range(1, buckets.max_context + 1):
                told = _fit_problem(fit, buckets, rows, context)
                if told:
                    return told
        for rows, context in ((buckets.max_rows + 1, 1), (1, buckets.max_context + 1)):
            try:
                said = fit(list(buckets.rows), list(buckets.widths), rows, context)
            except Exception:
                continue
            return f"{_case(buckets, rows, context)}: nothing covers it, and {said} came back; an error was wanted"
    return f"right for every batch of {len(SETS)} sets, and an error past their ends"


def _case(buckets: BucketSet, rows: int, context: int) -> str:
    return f"{rows} rows x {context} in rows {buckets.rows}, widths {buckets.widths}"


def _fit_problem(fit: Fit, buckets: BucketSet, rows: int, context: int) -> str:
    case, wanted = _case(buckets, rows, context), buckets.fit(rows, context)
    try:
        said = fit(list(buckets.rows), list(buckets.widths), rows, context)
    except Exception as error:
        return f"{case}: {type(error).__name__}, wanted {wanted}; the last of each list must be found too"
    if not (isinstance(said, tuple) and len(said) == 2):
        return f"{case}: {said!r}; a pair (rows, width) was wanted"
    axes = (("rows", said[0], rows, buckets.rows), ("width", said[1], context, buckets.widths))
    for name, value, needed, steps in axes:
        if value not in steps:
            return f"{case}: {name} {value} is not in the list; a shape outside the set was never recorded"
        if value < needed:
            return f"{case}: {name} {value} does not cover {needed}"
        if needed in steps and value != needed:
            return f"{case}: {name} {value}, and {needed} itself is in the list: an exact fit needs no padding"
    return "" if said == wanted else f"{case}: {said} covers it, and so does {wanted}; the smallest was wanted"


def check_multiple(choose: Callable[[pd.DataFrame, int], int | None]) -> str:
    """Lesson 04: ``choose(frame, limit)`` against the width multiple of least waste with at most ``limit`` shapes, for
    a simulated run of two minutes; None where no multiple has so few."""
    frame = padding(simulate(seconds=120, rate_scale=1 / 16), MULTIPLES)
    shapes = dict(zip(MULTIPLES, frame.shapes, strict=True))
    waste = dict(zip(MULTIPLES, frame.waste, strict=True))
    for limit in LIMITS:
        said, fitting = choose(frame.copy(), limit), [multiple for multiple in MULTIPLES if shapes[multiple] <= limit]
        wanted = min(fitting, key=lambda multiple: waste[multiple], default=None)
        if said == wanted:
            continue
        if said is not None and said not in MULTIPLES:
            return f"limit {limit}: {said!r} is none of the width multiples {', '.join(map(str, MULTIPLES))}"
        if wanted is None:
            return f"limit {limit}: no multiple has so few shapes, and {said} came back; None was wanted"
        better = f"{wanted} has {shapes[wanted]} shapes and wastes {waste[wanted]:.1%}"
        if said is None:
            return f"limit {limit}: None came back; {better}"
        if shapes[said] > limit:
            return f"limit {limit}: width multiple {said} has {shapes[said]} shapes"
        return f"limit {limit}: {said} has {shapes[said]} shapes and wastes {waste[said]:.1%}; {better}"
    return f"right for limits of {', '.join(map(str, LIMITS))} graphs"
