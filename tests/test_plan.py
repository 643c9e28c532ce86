"""The plan says what the cache says, and one that does not is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.plan import Planner, PlanUnsound, check_plan_current
from nanoserve_lab.slots import SlotTable


def growing_cache(lengths: Sequence[int], table: SlotTable | None = None) -> PagedCache:
    """A cache of four rows of 20 tokens in blocks of 4 whose sequences of ``lengths`` tokens have grown by one."""
    cache = PagedCache(KVPool(TINY, 40, 4, torch.float32, "cpu"), 4, 20, table)
    for length in lengths:
        cache.add(cache.reserve(length), length)
    cache.grow()
    return cache


@pytest.mark.parametrize("with_table", [False, True])
def test_the_plan_by_hand(with_table: bool) -> None:
    table = SlotTable(4, 20) if with_table else None
    # Block 1 holds slots 4 to 7, block 2 8 to 11, block 3 12 to 15: the third is taken by the growth of row 0.
    plan = Planner(growing_cache([4, 2], table), table).plan()
    assert plan.rows == (0, 1)
    assert plan.live == 2
    assert plan.shape == (2, 5)
    assert plan.positions.tolist() == [[4], [2]]
    assert plan.write_slots.tolist() == [12, 10]
    assert plan.context_lens.tolist() == [5, 3]
    assert plan.slot_mapping.tolist() == [[4, 5, 6, 7, 12], [8, 9, 10, 0, 0]]
    assert plan.tensors == (plan.positions, plan.write_slots, plan.context_lens, plan.slot_mapping)
    assert all(tensor.dtype == torch.int64 for tensor in plan.tensors)
    assert (plan.context_list, plan.write_list) == ([5, 3], [12, 10])


def test_padding_by_hand() -> None:
    table = SlotTable(4, 20)
    plan = Planner(growing_cache([4, 2, 1], table), table, BucketSet(4, 20, 8)).plan()
    assert (plan.rows, plan.live, plan.shape) == ((0, 1, 2, 3), 3, (4, 8))
    assert plan.positions.tolist() == [[4], [2], [1], [0]]
    assert plan.write_slots[3] == 0
    assert plan.context_lens.tolist() == [5, 3, 2, 1]
    assert plan.slot_mapping[3].tolist() == [0] * 8


def test_buckets_need_a_table() -> None:
    with pytest.raises(ValueError, match="buckets: a padded rectangle is a window on a slot table"):
        Planner(growing_cache([1]), None, BucketSet(4, 20, 8))
    with pytest.raises(ValueError, match=r"bucket_decode: .*it needs slot_table=True"):
        EngineConfig(bucket_decode=True, slot_table=False)


def test_a_snapshot_is_the_witness_where_there_is_one() -> None:
    plan = Planner(growing_cache([4, 2])).plan()
    shared = dataclasses.replace(plan, context_snapshot=(7, 8), write_snapshot=(1, 2))
    assert (shared.context_list, shared.write_list) == ([7, 8], [1, 2])


def test_a_plan_made_before_another_step_is_refused() -> None:
    cache = growing_cache([4, 2])
    plan = Planner(cache).plan()
    check_plan_current(plan, cache)
    cache.grow()
    with pytest.raises(
        PlanUnsound, match=r"context_lens: the plan has row 0 at 5 tokens, the cache at 6.*02_decode_plan"
    ):
        check_plan_current(plan, cache)
    plan = Planner(cache).plan()
    cache.remove(0)
    with pytest.raises(PlanUnsound, match="made for 2 rows, 1 run now"):
        check_plan_current(plan, cache)
    # Row 0 is another sequence now, of another length; the number of rows alone would not tell.
    cache.add(cache.reserve(6), 6)
    with pytest.raises(PlanUnsound, match="row 0 at 6 tokens, the cache at 4"):
        check_plan_current(plan, cache)


def test_a_plan_for_another_sequence_of_the_same_length_is_refused() -> None:
    cache = growing_cache([4, 2])
    plan = Planner(cache).plan()
    cache.remove(1)
    cache.pool.allocator.take(1)  # its block goes to somebody else
    cache.add(cache.reserve(3), 3)
    with pytest.raises(PlanUnsound, match=r"write_slots: the plan writes row 1's token to slot 10, the cache has slot"):
        check_plan_current(plan, cache)


def strict_engine(**switches: object) -> Engine:
    config = EngineConfig(max_rows=4, max_context=32, block_size=4, num_blocks=33, strict=True, **switches)  # type: ignore[arg-type]
    return Engine.build(tiny_model(), None, config)


def move_no_slots(engine: Engine) -> None:
    """Break ``engine``: the row that fills a gap takes its length along, and leaves its slots behind."""
    assert engine.table is not None
    lengths = engine.table.lengths

    def move_lengths_only(source: int, target: int) -> None:
        lengths[target], lengths[source] = lengths[source], 0

    engine.table.move = move_lengths_only  # type: ignore[method-assign]


def run_to_the_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_an_engine_that_holds_a_plan_is_refused_and_would_overwrite_its_history() -> None:
    engine = strict_engine()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    plans = []
    fresh = engine.planner.plan

    def held() -> object:  # the first plan, whatever the cache says
        plans.append(fresh())
        return plans[0]

    engine.planner.plan = held  # type: ignore[assignment,method-assign]
    engine.step()
    slot = plans[0].write_slots[0]
    before = engine.cache.pool.data[:, :, slot].clone()
    with pytest.raises(PlanUnsound, match="the plan has row 0 at 4 tokens, the cache at 5"):
        engine.step()
    assert torch.equal(engine.cache.pool.data[:, :, slot], before), "the gate looks before anything is written"
    object.__setattr__(engine.config, "strict", False)
    engine.step()
    assert not torch.equal(engine.cache.pool.data[:, :, slot], before), "without the gate the older token is lost"
