"""The slot table: one storage for every step's rectangle, and gates that see when it is not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_plan import growing_cache, move_no_slots, run_to_the_end, strict_engine

from nanoserve_lab.engine import SamplingParams
from nanoserve_lab.plan import DecodePlan, Planner
from nanoserve_lab.slots import SlotsUnsound, SlotTable, check_mapping_is_window, check_window_intact


def planned(lengths: list[int]) -> tuple[DecodePlan, SlotTable]:
    table = SlotTable(4, 20)
    return Planner(growing_cache(lengths, table), table).plan(), table


def test_the_window_stays_where_it_is_while_rows_and_width_change() -> None:
    table = SlotTable(4, 20)
    cache = growing_cache([4, 2], table)
    planner = Planner(cache, table)
    plans = [planner.plan()]  # all kept alive: an allocator could hand an address out again
    for _ in range(5):
        cache.grow()
        plans.append(planner.plan())
    cache.remove(0)
    plans.append(planner.plan())
    assert {plan.slot_mapping.data_ptr() for plan in plans} == {table.data.data_ptr()}
    assert len({plan.shape for plan in plans}) == 7
    for plan in plans:
        check_mapping_is_window(plan, table)
    gathered = [Planner(cache).plan() for _ in range(3)]
    assert len({plan.slot_mapping.data_ptr() for plan in gathered}) == 3


def test_no_window_is_contiguous() -> None:
    table = SlotTable(3, 5)
    assert table.data.shape == (3, 5)
    assert table.data.nbytes == 3 * 5 * 8
    windows = [table.read(range(rows), width)[0] for rows in (2, 3) for width in (2, 4, 5)]
    assert not any(window.is_contiguous() for window in windows)
    assert len({window.stride() for window in windows}) == 1
    assert SlotTable(256, 8192).data.nbytes == 16_777_216


def test_the_prefix_rule_moves_the_last_row_and_nothing_else() -> None:
    table = SlotTable(4, 6)
    for row, slots in enumerate(([11, 12, 13], [21, 22], [31])):
        table.fill(row, np.array(slots))
    table.move(2, 0)
    assert table.mirror.tolist() == [[31, 0, 0, 0, 0, 0], [21, 22, 0, 0, 0, 0], [0] * 6, [0] * 6]
    assert table.lengths.tolist() == [1, 2, 0, 0]
    table.move(1, 1)
    assert table.mirror[1].tolist() == [0] * 6
    table.extend(np.array([32]))
    assert table.data[0].tolist() == [31, 32, 0, 0, 0, 0]
    # A longer row takes a shorter one's place.
    table.fill(1, np.array([41, 42, 43, 44]))
    table.move(1, 0)
    assert table.data.tolist() == [[41, 42, 43, 44, 0, 0], [0] * 6, [0] * 6, [0] * 6]


def test_lengths_are_fresh_or_written_where_the_caller_says() -> None:
    table = SlotTable(3, 5)
    table.fill(0, np.array([7, 8]))
    window, lengths = table.read((0, 1), 3)
    assert window.tolist() == [[7, 8, 0], [0, 0, 0]]
    assert lengths.tolist() == [2, 1], "a row without a sequence reads one token of the sink"
    table.extend(np.array([9]))
    assert lengths.tolist() == [2, 1], "the lengths are a copy"
    buffer = torch.zeros(3, dtype=torch.int64)

    def write(values: np.ndarray) -> torch.Tensor:
        buffer[: len(values)] = torch.from_numpy(values)
        return buffer[: len(values)]

    _, lengths = table.read((0, 1), 3, write)
    assert lengths.data_ptr() == buffer.data_ptr()
    assert lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("rows", "width", "told"),
    [
        ((0, 2), 3, r"first rows of the table in order, got \[0, 2\]"),
        ((1, 0), 3, r"got \[1, 0\]"),
        ((1,), 3, r"got \[1\]"),
        ((), 3, "window: 0 rows x 3 columns of a table of 3 x 5"),
        ((0, 1, 2, 3), 3, "window: 4 rows x 3"),
        ((0,), 6, "1 rows x 6 columns"),
        ((0,), 0, "1 rows x 0 columns"),
    ],
)
def test_what_is_no_window_is_refused(rows: tuple[int, ...], width: int, told: str) -> None:
    with pytest.raises(SlotsUnsound, match=told + r".*03_slot_table"):
        SlotTable(3, 5).read(rows, width)


@pytest.mark.parametrize("slot", [-1, 0])
def test_no_sequence_owns_a_negative_slot_or_the_sink(slot: int) -> None:
    table = SlotTable(3, 5)
    with pytest.raises(SlotsUnsound, match=rf"slot {slot}; a sequence's tokens lie in slots from 1 on"):
        table.fill(0, np.array([3, slot]))
    table.fill(0, np.array([3]))
    with pytest.raises(SlotsUnsound, match=rf"slot {slot};"):
        table.extend(np.array([slot]))
    assert table.data.tolist() == [[3, 0, 0, 0, 0], [0] * 5, [0] * 5], "a refused write writes nothing"
    assert table.lengths.tolist() == [1, 0, 0]


def test_a_row_ends_at_the_last_column() -> None:
    table = SlotTable(2, 3)
    table.fill(0, np.array([4, 5]))
    table.extend(np.array([6]))
    with pytest.raises(SlotsUnsound, match="column 3 of row 0, the table has columns 0 to 2"):
        table.extend(np.array([7]))
    assert table.data[0].tolist() == [4, 5, 6]
    with pytest.raises(SlotsUnsound, match="4 slots for row 1, the table is 3 columns wide"):
        table.fill(1, np.arange(1, 5))
    with pytest.raises(ValueError, match="max_rows: wanted 1 or more, got 0"):
        SlotTable(0, 3)


def test_a_rectangle_that_is_no_window_is_refused() -> None:
    plan, table = planned([4, 2])
    check_mapping_is_window(plan, table)
    cases = {
        "storage of its own": plan.slot_mapping.clone(),
        "starts at cell 21": table.data[1:3, :5],
        "strides": table.data[0:4:2, :5],
    }
    for told, mapping in cases.items():
        with pytest.raises(SlotsUnsound, match=told) as caught:
            check_mapping_is_window(dataclasses.replace(plan, slot_mapping=mapping), table)
        assert "0x" not in str(caught.value)
    with pytest.raises(SlotsUnsound) as caught:
        check_mapping_is_window(dataclasses.replace(plan, slot_mapping=plan.slot_mapping.clone()), table)
    assert caught.value.facts["table_address"] == table.data.data_ptr()


@pytest.mark.parametrize(
    ("cell", "value", "told"),
    [
        ((0, 4), 9, "row 0 reads its newest token from slot 9, the step writes it to slot 12"),
        ((0, 1), 4, "row 0 reads the sink or one slot twice in its 5 tokens"),
        ((0, 1), 0, "row 0 reads the sink or one slot twice"),
        ((1, 4), 6, "row 1 has 3 tokens, but column 4 still holds slot 6"),
    ],
)
def test_a_window_that_disagrees_with_the_plan_is_refused(cell: tuple[int, int], value: int, told: str) -> None:
    plan, table = planned([4, 2])
    check_window_intact(plan, table)
    table.data[cell] = value
    with pytest.raises(SlotsUnsound, match=told):
        check_window_intact(plan, table)


def test_a_plan_that_is_older_than_the_table_is_refused() -> None:
    table = SlotTable(4, 20)
    cache = growing_cache([4, 2], table)
    plan = Planner(cache, table).plan()
    table.lengths[1] = 9
    with pytest.raises(SlotsUnsound, match=r"context_lens: the plan says \[5, 3\], the slot table \[5, 9\]"):
        check_window_intact(plan, table)
    with pytest.raises(SlotsUnsound, match="row 0: a context of 5 tokens in a window of 2 columns"):
        check_window_intact(dataclasses.replace(plan, slot_mapping=plan.slot_mapping[:, :2]), table)


def test_an_engine_that_forgets_the_table_is_refused() -> None:
    """A row that moves without its table row: the finished request's slots stay in its place."""
    engine = strict_engine()
    short, long = ([1, 2, 3], SamplingParams(max_tokens=2)), ([4, 5, 6, 7, 8], SamplingParams(max_tokens=9))
    for prompt, params in (short, long):
        engine.submit(prompt, params)
    move_no_slots(engine)
    with pytest.raises(SlotsUnsound, match="slot_mapping: row 0 reads token 0 from slot 4, its blocks hold"):
        run_to_the_end(engine)


def test_an_engine_that_gathers_is_refused() -> None:
    engine = strict_engine()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    engine.planner = Planner(engine.cache)  # no table: the rectangle is built anew
    with pytest.raises(SlotsUnsound, match="storage of its own, wanted a window"):
        run_to_the_end(engine)
