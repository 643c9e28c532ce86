"""Inputs written in place: one address each, no allocation, and witnesses that can still fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_plan import growing_cache, run_to_the_end, strict_engine

from nanoserve_lab.buckets import BucketSet, BucketsUnsound, check_pad_inert
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.inputs import (
    Addresses,
    DecodeInputs,
    InputBuffer,
    InputsUnsound,
    check_addresses_stable,
    check_inputs_fit,
    check_one_set_covers,
    check_plan_inputs_persistent,
    check_snapshots_present,
    check_step_inputs_persistent,
    fresh_allocations,
    fresh_cells,
    input_bytes,
    input_cells,
    per_shape_bytes,
    sharing_ratio,
)
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.plan import DecodePlan, Planner, PlanUnsound, check_plan_current
from nanoserve_lab.slots import SlotsUnsound, SlotTable, check_window_intact

POISON = -77


def buffered(lengths: Sequence[int] = (4, 2), multiple: int = 8) -> tuple[Planner, object, DecodeInputs, SlotTable]:
    """A bucketed planner with buffers over sequences of ``lengths``; the planner, its cache, the buffers, the table."""
    table, inputs = SlotTable(4, 20), DecodeInputs(4)
    cache = growing_cache(lengths, table)
    return Planner(cache, table, BucketSet(4, 20, multiple), inputs), cache, inputs, table


def test_a_buffer_is_written_in_place() -> None:
    buffer = InputBuffer(4, 1)
    assert buffer.window(3).tolist() == [[0]] * 3, "an untouched buffer is legal everywhere"
    address = buffer.buffer.data_ptr()
    for values in ([5, 6], np.array([7, 8, 9]), torch.tensor([1, 2]), torch.tensor([[3], [4]])):
        written = buffer.write(values)
        assert written.data_ptr() == address
        assert written.flatten().tolist() == torch.as_tensor(values).flatten().tolist()
    assert (buffer.writes, buffer.cells) == (4, 9)
    assert buffer.window(2) is buffer.window(2)


@pytest.mark.parametrize("optimize_cpu", [False, True])
def test_a_context_length_of_zero_reaches_no_other_row(optimize_cpu: bool) -> None:
    switches = {"bucket_decode": True, "persist_inputs": True, "width_multiple": 16, "optimize_cpu": optimize_cpu}
    config = EngineConfig(max_rows=4, max_context=32, block_size=4, num_blocks=33, **switches)  # type: ignore[arg-type]
    logits = []
    for length in (1, 0):
        engine = Engine.build(tiny_model(), None, config)
        for prompt in ([1, 2, 3], [4, 5], [6]):
            engine.submit(prompt, SamplingParams(max_tokens=9))
        engine.step()
        engine.cache.grow()
        plan = engine.planner.plan()
        assert plan.context_lens.tolist() == [4, 3, 2, 1], "the planner gives a padded row one token"
        plan.context_lens[3] = length
        with torch.inference_mode():
            logits.append(engine.decode(plan, torch.zeros(4, 1, dtype=torch.int64)).clone())
    assert torch.equal(logits[0][:3], logits[1][:3])
    assert not logits[0].isnan().any()
    if not optimize_cpu:
        assert logits[1][3].isnan().all()
    with pytest.raises(BucketsUnsound, match="context_lens: padded row 3 holds 0, wanted 1"):
        check_pad_inert(plan)


def test_a_window_may_go_past_what_was_written() -> None:
    buffer = InputBuffer(4, 1)
    buffer.write([1, 2, 3, 4])
    assert buffer.write([9], window=3).tolist() == [[9], [2], [3]], "it inherits"


@pytest.mark.parametrize(
    ("values", "window", "told"),
    [
        ([1, 2, 3, 4, 5], None, "window: 5 rows of a buffer of 4"),
        ([1], 5, "window: 5 rows of a buffer of 4"),
        ([1, 2], 1, "write: 2 values into a window of 1 rows"),
        (torch.arange(5), None, "window: 5 rows"),
        ([], None, "window: 0 rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(values: object, window: int | None, told: str) -> None:
    buffer = InputBuffer(4)
    buffer.write([6, 7, 8, 9])
    with pytest.raises(InputsUnsound, match=told + ".*05_persistent_inputs"):
        buffer.write(values, window)  # type: ignore[arg-type]
    assert buffer.buffer.tolist() == [6, 7, 8, 9]
    assert buffer.writes == 1
    with pytest.raises(ValueError, match="max_rows: wanted 1 or more, got 0"):
        InputBuffer(0)


def test_a_buffer_with_a_tail_counts_rows() -> None:
    buffer = InputBuffer(3, 2)
    assert buffer.write([1, 2, 3, 4]).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(InputsUnsound, match="3 values into a window of 2 rows of 2"):
        buffer.write([1, 2, 3], window=2)


def test_the_plan_lies_in_the_buffers_and_says_what_a_fresh_one_says() -> None:
    planner, cache, inputs, table = buffered([4, 2, 1])
    fresh = Planner(cache, table, BucketSet(4, 20, 8)).plan()
    plan = planner.plan()
    assert plan.shape == fresh.shape == (4, 8)
    for ours, theirs in zip(plan.tensors, fresh.tensors, strict=True):
        assert torch.equal(ours, theirs)
    check_plan_inputs_persistent(plan, inputs)
    check_snapshots_present(plan)
    assert (plan.context_list, plan.write_list) == (fresh.context_list, fresh.write_list)
    with pytest.raises(InputsUnsound, match="positions: a tensor of its own, wanted a window of the input buffer"):
        check_plan_inputs_persistent(fresh, inputs)
    with pytest.raises(InputsUnsound, match="context_snapshot: missing"):
        check_snapshots_present(fresh)


def test_nothing_of_the_last_step_survives_in_what_a_replay_reads() -> None:
    planner, cache, inputs, _ = buffered([4, 2, 1])
    for step in range(6):
        for name, buffer in inputs.buffers.items():
            if name != "input_ids":  # its stale tail does no harm
                buffer.buffer.fill_(POISON)
        plan = planner.plan()
        for name, tensor in zip(
            ("positions", "write_slots", "context_lens", "slot_mapping"), plan.tensors, strict=True
        ):
            assert (tensor != POISON).all(), name
        cache.remove(0) if step == 2 else cache.grow()  # type: ignore[attr-defined]


def test_a_witness_that_shares_storage_is_none_and_the_snapshot_is_one() -> None:
    planner, cache, _, table = buffered()
    held = planner.plan()
    cache.grow()  # type: ignore[attr-defined]
    planner.plan()
    blind = dataclasses.replace(held, context_snapshot=None, write_snapshot=None)
    # The held plan's tensors say what the newest step wrote: without snapshots both gates agree with everything.
    check_plan_current(blind, cache)  # type: ignore[arg-type]
    check_window_intact(blind, table)
    with pytest.raises(PlanUnsound, match="row 0 at 5 tokens, the cache at 6"):
        check_plan_current(held, cache)  # type: ignore[arg-type]
    with pytest.raises(SlotsUnsound):
        check_window_intact(held, table)


def test_snapshots_are_copies() -> None:
    planner, cache, _, _ = buffered()
    plan = planner.plan()
    before = (plan.context_list, plan.write_list)
    for _ in range(3):
        cache.grow()  # type: ignore[attr-defined]
        planner.plan()
    assert (plan.context_list, plan.write_list) == before
    short = dataclasses.replace(plan, write_snapshot=(1,))
    with pytest.raises(InputsUnsound, match="write_snapshot: 1 values for 2 rows"):
        check_snapshots_present(short)


@pytest.mark.parametrize("name", ["positions", "write_slots", "context_lens"])
def test_an_input_of_its_own_is_refused(name: str) -> None:
    planner, _, inputs, _ = buffered()
    plan = planner.plan()
    ids = inputs.input_ids.write([1, 2])
    check_step_inputs_persistent(plan, ids, inputs)
    moved = dataclasses.replace(plan, **{name: getattr(plan, name).clone()})
    with pytest.raises(InputsUnsound, match=f"{name}: a tensor of its own") as caught:
        check_step_inputs_persistent(moved, ids, inputs)
    assert str(caught.value.facts["buffer"]) not in str(caught.value)
    narrow = dataclasses.replace(plan, **{name: getattr(plan, name)[:1]})
    with pytest.raises(InputsUnsound, match=rf"{name}: shape .*wanted the first 2 rows"):
        check_step_inputs_persistent(narrow, ids, inputs)


def test_the_samplers_own_tensor_is_refused_as_input() -> None:
    planner, _, inputs, _ = buffered()
    with pytest.raises(InputsUnsound, match="input_ids: a tensor of its own"):
        check_step_inputs_persistent(planner.plan(), torch.tensor([[1], [2]]), inputs)


def test_one_set_covers_every_shape() -> None:
    inputs = DecodeInputs(8)
    check_one_set_covers(inputs, BucketSet(8, 64, 16).shapes())
    with pytest.raises(InputsUnsound, match="input_ids: a step of 9 rows, the buffer has 8"):
        check_inputs_fit(inputs, 9)
    with pytest.raises(InputsUnsound, match="a step of 16 rows"):
        check_one_set_covers(inputs, BucketSet(16, 64, 16).shapes())


def test_the_arithmetic_of_the_large_set() -> None:
    shapes = BucketSet(256, 8192, 2048).shapes()
    assert len(shapes) == 36
    assert input_bytes(256) == 8_192
    assert input_cells(256) == 1_024
    assert per_shape_bytes(shapes) == 65_408
    assert round(sharing_ratio(shapes, 256), 1) == 8.0
    assert sum(buffer.buffer.nbytes for buffer in DecodeInputs(256).buffers.values()) == input_bytes(256)
    assert SlotTable(256, 8192).data.nbytes == 2048 * input_bytes(256)


@pytest.mark.parametrize("steps", [8, 64, 128])
@pytest.mark.parametrize("lengths", [(16, 16, 16), (16,)])
def test_allocations_and_writes_are_counted_by_instruments(steps: int, lengths: tuple[int, ...]) -> None:
    def run(inputs: DecodeInputs | None) -> StepTrace:
        cache, table = _cache_of(lengths, steps)
        planner = Planner(cache, table, None, inputs)
        for _ in range(2):  # windows are made at first use
            planner.plan()
        if inputs is not None:
            for buffer in inputs.buffers.values():
                buffer.writes = buffer.cells = 0
        with StepTrace() as trace:
            for _ in range(steps):
                cache.grow()
                planner.plan()
        return trace

    inputs = DecodeInputs(8)
    fresh, in_place = run(None), run(inputs)
    assert fresh.allocations == fresh_allocations(steps) == 3 * steps
    assert in_place.allocations == 0
    assert sum(buffer.writes for buffer in inputs.buffers.values()) == fresh.allocations
    cells = sum(buffer.cells for buffer in inputs.buffers.values())
    assert cells == fresh_cells(len(lengths), steps) == 3 * steps * len(lengths)
    assert fresh.syncs == in_place.syncs == []


def _cache_of(lengths: tuple[int, ...], steps: int) -> tuple:  # type: ignore[type-arg]
    from nanoserve_lab.cache.paged import PagedCache
    from nanoserve_lab.cache.pool import KVPool
    from nanoserve_lab.model.tiny import TINY

    table = SlotTable(8, 600)
    cache = PagedCache(KVPool(TINY, 200, 16, torch.float32, "cpu"), 8, 600, table)
    for length in lengths:
        cache.add(cache.reserve(length), length)
    return cache, table


def test_addresses_are_read_again_from_their_owners() -> None:
    model, inputs = tiny_model(), DecodeInputs(2)
    addresses = Addresses()
    addresses.add("input_ids", lambda: inputs.input_ids.buffer)
    addresses.add_module("weights", model)
    recorded = addresses.read()
    assert len(recorded) == len(addresses.names) == len(set(addresses.names))
    assert len(recorded) == 1 + len(list(model.parameters())) + len(list(model.buffers()))
    check_addresses_stable(addresses.names, recorded, addresses.read())
    inputs.input_ids.buffer = inputs.input_ids.buffer.clone()
    with pytest.raises(InputsUnsound, match="input_ids: moved since the step was recorded"):
        check_addresses_stable(addresses.names, recorded, addresses.read())
    recorded = addresses.read()
    model.layers[1].mlp.down.weight.data = model.layers[1].mlp.down.weight.data.clone()
    model.norm.weight = torch.nn.Parameter(model.norm.weight.clone())
    with pytest.raises(InputsUnsound, match=r"weights .*weight \(and 1 more\): moved") as caught:
        check_addresses_stable(addresses.names, recorded, addresses.read())
    assert str(caught.value.facts["now"]) not in str(caught.value)


def test_an_engine_whose_buffer_is_replaced_by_fresh_tensors_is_refused() -> None:
    """The first attempt: the address stops moving only if the buffer itself is written."""
    engine = strict_engine(persist_inputs=True, bucket_decode=True, width_multiple=8, capture_decode=True)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    assert engine.inputs is not None
    slots = engine.inputs.write_slots
    slots.write = lambda values, window=None: torch.as_tensor(values).clone()  # type: ignore[method-assign,assignment]
    with pytest.raises(InputsUnsound, match="write_slots: a tensor of its own"):
        run_to_the_end(engine)


def test_an_engine_that_takes_no_snapshots_is_refused() -> None:
    engine = strict_engine(persist_inputs=True, bucket_decode=True, width_multiple=8, capture_decode=True)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    plan = engine.planner.plan

    def blind() -> DecodePlan:
        return dataclasses.replace(plan(), context_snapshot=None, write_snapshot=None)

    engine.planner.plan = blind  # type: ignore[method-assign]
    with pytest.raises(InputsUnsound, match="context_snapshot: missing"):
        run_to_the_end(engine)
