"""The closed set of shapes: every batch has the smallest shape that covers it, and padding touches the sink only."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_plan import growing_cache

from nanoserve_lab.buckets import (
    BucketSet,
    BucketsUnsound,
    check_capture_budget,
    check_pad_inert,
    check_shape_in_set,
)
from nanoserve_lab.plan import DecodePlan, Planner
from nanoserve_lab.slots import SlotTable


@pytest.mark.parametrize("max_context", [1, 7, 128, 129, 1000])
def test_every_batch_has_the_smallest_covering_shape(max_context: int) -> None:
    contexts = [c for c in (1, 2, max_context // 2, max_context - 1, max_context) if 1 <= c <= max_context]
    for max_rows in range(1, 601):
        buckets = BucketSet(max_rows, max_context, 64)
        assert min(buckets.rows) == 1
        assert max(buckets.rows) == max_rows
        assert max(buckets.widths) == max_context
        for rows in range(1, max_rows + 1):
            # Written out: the least of all that cover, whatever order the set is in.
            wanted = min(n for n in buckets.rows if n >= rows)
            assert buckets.fit(rows, 1)[0] == wanted
        for context in contexts:
            assert buckets.fit(max_rows, context) == (max_rows, min(w for w in buckets.widths if w >= context))


def test_the_set_is_what_it_says() -> None:
    assert BucketSet(6, 20, 8).shapes() == [(r, w) for r in (1, 2, 4, 6) for w in (8, 16, 20)]
    assert BucketSet(8, 16, 8).rows == [1, 2, 4, 8]
    assert BucketSet(1, 1, 128).shapes() == [(1, 1)]
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="wanted 1 or more, got 0"):
            BucketSet(*bad)


@pytest.mark.parametrize(("multiple", "shapes"), [(128, 576), (512, 144), (2048, 36), (8192, 9)])
def test_shape_counts_of_the_large_set(multiple: int, shapes: int) -> None:
    assert len(BucketSet(256, 8192, multiple).shapes()) == shapes


@pytest.mark.parametrize("shape", [(0, 1), (5, 1), (1, 0), (1, 21), (-1, 3)])
def test_a_batch_that_no_bucket_covers_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BucketsUnsound, match=rf"shape {shape[0]} x {shape[1]}: no bucket covers it.*04_bucketing"):
        BucketSet(4, 20, 8).fit(*shape)


def padded_plan() -> tuple[DecodePlan, BucketSet]:
    """Three live rows in a bucket of four."""
    buckets = BucketSet(4, 20, 8)
    table = SlotTable(4, 20)
    cache = growing_cache([3, 9, 1], table)
    return Planner(cache, table, buckets).plan(), buckets


def test_a_padded_plan_is_inert_and_in_the_set() -> None:
    plan, buckets = padded_plan()
    assert plan.shape == (4, 16)
    assert plan.live == 3
    check_pad_inert(plan)
    check_shape_in_set(plan, buckets)


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [("write_slots", (3,), 7), ("context_lens", (3,), 2), ("positions", (3, 0), 5), ("slot_mapping", (3, 2), 9)],
)
def test_a_padded_row_that_does_something_is_refused(name: str, cell: tuple[int, ...], value: int) -> None:
    plan, _ = padded_plan()
    getattr(plan, name)[cell] = value
    with pytest.raises(BucketsUnsound, match=rf"{name}: padded row 3 holds {value}.*3 of 4 rows are live"):
        check_pad_inert(plan)


def test_a_shape_outside_the_set_is_refused() -> None:
    plan, buckets = padded_plan()
    open_plan = dataclasses.replace(plan, slot_mapping=plan.slot_mapping[:, :11])
    with pytest.raises(BucketsUnsound, match="shape 4 x 11: outside the set of 3 numbers of rows and 3 widths"):
        check_shape_in_set(open_plan, buckets)
    too_wide = dataclasses.replace(plan, slot_mapping=torch.zeros(4, 20, dtype=torch.int64))
    with pytest.raises(BucketsUnsound, match="shape 4 x 20: 3 live rows of this batch fit into 4 x 16"):
        check_shape_in_set(too_wide, buckets)


def test_a_long_capture_list_is_refused() -> None:
    check_capture_budget(BucketSet(256, 8192, 2048).shapes())
    with pytest.raises(BucketsUnsound, match=r"576 shapes \(9 numbers of rows x 64 widths\), the limit is 64"):
        check_capture_budget(BucketSet(256, 8192, 128).shapes())
    check_capture_budget([(1, 1)] * 3, limit=3)
    check_capture_budget([], limit=0)
    with pytest.raises(BucketsUnsound, match="the limit is 2"):
        check_capture_budget([(1, 1)] * 3, limit=2)
