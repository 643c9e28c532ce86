"""Day 52: a closed set of shapes; every step is padded to the smallest that covers it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from nanoserve_lab.plan import DecodePlan
from nanoserve_lab.unsound import Unsound


class BucketsUnsound(Unsound):
    """A shape outside the closed set, padding that does something, or a set too large to record."""

    lesson: ClassVar[str] = "04_bucketing"


class BucketSet:
    """The shapes ``(rows, width)`` that decode steps of at most ``max_rows`` x ``max_context`` are padded to.

    ``rows`` are the powers of two below ``max_rows`` and ``max_rows`` itself; ``widths`` the multiples of
    ``width_multiple`` below ``max_context`` and ``max_context`` itself. Raises `ValueError` for a size below 1.
    """

    def __init__(self, max_rows: int, max_context: int, width_multiple: int) -> None:
        sizes = {"max_rows": max_rows, "max_context": max_context, "width_multiple": width_multiple}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: wanted 1 or more, got {value}")
        self.max_rows, self.max_context, self.width_multiple = max_rows, max_context, width_multiple
        self.rows = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows] + [max_rows]
        self.widths = [*range(width_multiple, max_context, width_multiple), max_context]

    def shapes(self) -> list[tuple[int, int]]:
        """Every shape, by rows and then by width."""
        return [(rows, width) for rows in self.rows for width in self.widths]

    def fit(self, rows: int, context: int) -> tuple[int, int]:
        """The smallest shape of the set that covers ``rows`` and ``context``, both 1 or more.

        Raises `BucketsUnsound` where none does.
        """
        if not (1 <= rows <= self.max_rows and 1 <= context <= self.max_context):
            raise BucketsUnsound(
                f"shape {rows} x {context}: no bucket covers it, they go from 1 x 1 to "
                f"{self.max_rows} x {self.max_context}"
            )
        return self.rows[bisect_left(self.rows, rows)], self.widths[bisect_left(self.widths, context)]


def check_shape_in_set(plan: DecodePlan, buckets: BucketSet) -> None:
    """The plan's shape is one of the set, and the smallest that covers its live rows and longest context.

    Without snapshots it reads ``context_lens``: on a device that is a synchronisation. Raises `BucketsUnsound`.
    """
    rows, width = plan.shape
    if rows not in buckets.rows or width not in buckets.widths:
        raise BucketsUnsound(
            f"shape {rows} x {width}: outside the set of {len(buckets.rows)} numbers of rows and "
            f"{len(buckets.widths)} widths"
        )
    smallest = buckets.fit(plan.live, max(plan.context_list[: plan.live]))
    if (rows, width) != smallest:
        raise BucketsUnsound(
            f"shape {rows} x {width}: {plan.live} live rows of this batch fit into {smallest[0]} x {smallest[1]}"
        )


def check_pad_inert(plan: DecodePlan) -> None:
    """The padded rows read and write the sink and nothing else: position 0, slot 0, a context of one.

    Reads the values of all four tensors: on a device that is a synchronisation. Raises `BucketsUnsound`.
    """
    for row in range(plan.live, len(plan.rows)):
        wanted = {
            "write_slots": (int(plan.write_slots[row]), 0),
            "context_lens": (int(plan.context_lens[row]), 1),
            "positions": (int(plan.positions[row, 0]), 0),
            "slot_mapping": (int(plan.slot_mapping[row].abs().max()), 0),
        }
        for name, (seen, legal) in wanted.items():
            if seen != legal:
                raise BucketsUnsound(
                    f"{name}: padded row {row} holds {seen}, wanted {legal}; {plan.live} of {len(plan.rows)} rows are "
                    "live, and a padded row may touch the sink only"
                )


def check_capture_budget(shapes: Sequence[tuple[int, int]], limit: int = 64) -> None:
    """A list of shapes that is short enough to be recorded one by one. Raises `BucketsUnsound`."""
    if len(shapes) > limit:
        rows, widths = (len(set(axis)) for axis in zip(*shapes, strict=True))
        raise BucketsUnsound(
            f"capture list: {len(shapes)} shapes ({rows} numbers of rows x {widths} widths), the limit is {limit}; a "
            "larger width_multiple makes it shorter"
        )
