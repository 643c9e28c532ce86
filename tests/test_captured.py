"""The recorded step: recorded once a shape, replayed after that, and refused when what it froze has moved."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
import torch
from test_plan import move_no_slots, run_to_the_end
from torch import Tensor

from nanoserve_lab.buckets import BucketSet, BucketsUnsound
from nanoserve_lab.captured import (
    CapturedDecode,
    CaptureUnsound,
    capture_breakeven_steps,
    capture_cost_s,
    check_all_shapes_captured,
    check_capture_ready,
    check_output_not_held,
    check_pool_budget,
    check_pool_shared,
    check_replay_rows,
    check_replays_dominate,
    eager_recorder,
    launch_saving_s,
    pool_sharing_ratio,
    private_pool_bytes,
    score_cells,
    shared_pool_bytes,
    tape_recorder,
    workspace_bytes,
)
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.inputs import InputsUnsound
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.recorders import Recorder, RecordingRefused
from nanoserve_lab.slots import SlotsUnsound

CAPTURE: dict[str, Any] = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True}
RECORDERS = [
    pytest.param(eager_recorder, id="eager"),
    pytest.param(tape_recorder, id="tape"),
]


def build(recorder: Recorder = tape_recorder, dtype: torch.dtype = torch.float64, **switches: Any) -> Engine:
    sizes = {"max_rows": 4, "max_context": 64, "block_size": 4, "width_multiple": 16}
    config = EngineConfig(**(sizes | CAPTURE | switches))
    return Engine.build(tiny_model(dtype=dtype), None, config, recorder=recorder)


def started(recorder: Recorder = tape_recorder, **switches: Any) -> Engine:
    """Two rows in the middle of decoding, in a shape that has been recorded and replayed."""
    engine = build(recorder, **switches)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.submit(prompt, SamplingParams(max_tokens=40))
    for _ in range(4):
        engine.step()
    assert engine.stats().captures == 1
    assert engine.stats().replays == 3
    return engine


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_shape_is_recorded_once_and_replayed_after_that(recorder: Recorder) -> None:
    engine = build(recorder)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    params = [SamplingParams(max_tokens=n, temperature=t, seed=1) for n, t in ((30, 0.0), (9, 1.0), (20, 0.7))]
    said = engine.generate(prompts, params)
    plain = Engine.build(tiny_model(dtype=torch.float64), None, EngineConfig(max_rows=4, max_context=64, block_size=4))
    assert [c.token_ids for c in said] == [c.token_ids for c in plain.generate(prompts, params)]
    stats = engine.stats()
    assert stats.replays == stats.decode_steps, "the recording step's own replay counts"
    assert stats.captures == len(engine.decode_graphs.graphs) < stats.replays
    assert stats.eager_steps == {}
    for shape, graph in engine.decode_graphs.graphs.items():
        assert graph.shape == shape
        assert graph.output.data_ptr() == next(iter(engine.decode_graphs.graphs.values())).output.data_ptr()
    check_all_shapes_captured(engine.decode_graphs, engine.decode_graphs.graphs)
    check_replays_dominate(engine.decode_graphs, 1.0)
    check_pool_shared(engine.decode_graphs.graphs.values())


@pytest.mark.parametrize(("steps", "closed"), [(8, 1), (32, 1), (64, 1), (128, 2)])
def test_captures_of_a_run_are_counted(steps: int, closed: int) -> None:
    """Two rows from a 16-token prompt, width multiple 128: the run of 128 steps crosses one bucket's edge."""
    open_shapes = set()
    engine = build(eager_recorder, max_rows=2, max_context=256, width_multiple=128)
    for row in range(2):
        engine.submit([1 + row] * 16, SamplingParams(max_tokens=steps + 1))
    plan = engine.planner.plan

    def watched() -> Any:
        made = plan()
        open_shapes.add((made.live, max(made.context_list)))
        return made

    engine.planner.plan = watched  # type: ignore[method-assign]
    run_to_the_end(engine)
    stats = engine.stats()
    assert (len(open_shapes), stats.captures, stats.replays) == (steps, closed, steps)


def test_the_recording_step_returns_the_replays_output() -> None:
    class Half:
        """A recorder whose recording run computes nothing worth reading, as on a GPU."""

        def __call__(self, step: Any, args: tuple[Any, ...], pool: Any = None) -> Any:
            recording = tape_recorder(step, args, pool)
            recording.output.fill_(float("nan"))
            return recording

    engine = build(Half())
    said = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    assert [c.token_ids for c in said] == [
        c.token_ids for c in build().generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    ]


def test_a_replay_runs_no_python_of_the_step() -> None:
    engine = started()
    engine.decode_graphs.forward = None  # type: ignore[assignment]
    engine.model.forward = None  # type: ignore[method-assign,assignment]
    before = engine.stats().replays
    for _ in range(5):
        engine.step()
    assert engine.stats().replays == before + 5


@pytest.mark.parametrize("recorder", RECORDERS)
def test_the_output_lives_one_step(recorder: Recorder) -> None:
    engine = started(recorder)
    kept, copies = [], []
    call = engine.decode_graphs.__class__.__call__

    def keep(decode: CapturedDecode, plan: Any, input_ids: Tensor) -> Tensor:
        out = call(decode, plan, input_ids)
        kept.append(out)
        copies.append(out.clone())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedDecode, "__call__", keep)
        engine.step()
        engine.step()
    assert not torch.equal(copies[0], copies[1])
    assert torch.equal(kept[0], copies[1]), "the first step's logits hold the second's"
    (graph,) = engine.decode_graphs.graphs.values()
    check_output_not_held(graph, [copies[0], engine._tokens])
    with pytest.raises(CaptureUnsound, match=r"output: tensor 1 of shape \(2,\) lies in the recorded step's output"):
        check_output_not_held(graph, [copies[0], kept[0][:, 3]])


def test_an_engine_that_samples_into_the_output_is_refused() -> None:
    engine = started(strict=True)
    engine._sample = lambda sampler, logits: logits[:, 0]  # type: ignore[method-assign,assignment]
    with pytest.raises(CaptureUnsound, match="output: tensor 0"):
        engine.step()


def swap_buffer(engine: Engine) -> None:
    assert engine.inputs is not None
    engine.inputs.positions.buffer = engine.inputs.positions.buffer.clone()


def swap_table(engine: Engine) -> None:
    assert engine.table is not None
    engine.table.data = engine.table.data.clone()


def swap_pool(engine: Engine) -> None:
    engine.cache.pool.data = engine.cache.pool.data.clone()


def swap_layer(engine: Engine) -> None:
    keys, values = engine.cache.pool.layers[1]
    engine.cache.pool.layers[1] = keys, values.clone()


def swap_weight(engine: Engine) -> None:
    mlp = engine.model.layers[0].mlp
    mlp.down.weight = torch.nn.Parameter(mlp.down.weight.clone())


def reload_weight(engine: Engine) -> None:
    norm = engine.model.norm
    norm.weight.data = norm.weight.data.clone()


@pytest.mark.parametrize(
    ("swap", "name"),
    [
        (swap_buffer, "positions"),
        (swap_table, "slot table"),
        (swap_pool, "K/V pool"),
        (swap_layer, "K/V pool, values of layer 1"),
        (swap_weight, r"weights layers\.0\.mlp\.down\.weight"),
        (reload_weight, r"weights norm\.weight"),
    ],
)
@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_moved_after_recording_is_refused_by_name(recorder: Recorder, swap: Any, name: str) -> None:
    engine = started(recorder)
    swap(engine)
    with pytest.raises(InputsUnsound, match=rf"^{name}( \(and \d+ more\))?: moved since the step was recorded"):
        engine.step()


def test_a_weight_without_storage_is_followed_by_identity() -> None:
    """As oneDNN's packed weights are, which an engine may be handed."""
    engine = started(dtype=torch.float32)
    held = {"packed": torch.ones(4, 4).to_mkldnn()}
    addresses, graph = engine.decode_graphs.parts.addresses, next(iter(engine.decode_graphs.graphs.values()))
    addresses.add("packed weight", lambda: held["packed"])
    graph.addresses = addresses.read()
    engine.step()
    held["packed"] = torch.ones(4, 4).to_mkldnn()
    with pytest.raises(InputsUnsound, match=r"^packed weight: moved"):
        engine.step()


def test_without_the_gate_a_moved_buffer_is_read_where_it_was() -> None:
    """The symptom: the replay goes on with the numbers of the step before the move."""
    engine = started()
    assert engine.decode_graphs.parts is not None
    wanted = started()
    swap_pool_and_layers(engine)
    engine.decode_graphs.parts.addresses._fetch.clear()
    for graph in engine.decode_graphs.graphs.values():
        graph.addresses = ()
    said = [_tokens_after(e, 6) for e in (engine, wanted)]
    assert said[0] != said[1]


def swap_pool_and_layers(engine: Engine) -> None:
    """K and V re-allocated; the prefilled history goes along, and the recorded step writes the old place."""
    pool = engine.cache.pool
    old = pool.data
    pool.data = old.clone()
    pool.layers = [(layer[0], layer[1]) for layer in pool.data]
    old.zero_()


def _tokens_after(engine: Engine, steps: int) -> list[int | None]:
    return [event.token_id for _ in range(steps) for event in engine.step()]


def test_other_rows_are_refused() -> None:
    engine = started()
    (graph,) = engine.decode_graphs.graphs.values()
    plan = engine.planner.plan()
    check_replay_rows(graph, plan)
    other = dataclasses.replace(plan, rows=(1, 2))
    with pytest.raises(
        CaptureUnsound, match=r"rows: the plan covers rows \[1, 2\], the recording of 2 x 16 rows \[0, 1\]"
    ):
        check_replay_rows(graph, other)
    fresh = engine.planner.plan
    engine.planner.plan = lambda: dataclasses.replace(fresh(), rows=(1, 2))  # type: ignore[method-assign]
    with pytest.raises(CaptureUnsound, match="would read and write the other sequences"):
        engine.step()


def test_a_row_that_moved_without_its_table_row_is_refused_before_recording() -> None:
    """Two rows of equal length: only the blocks that each owns tell them apart."""
    engine = build()
    for prompt, tokens in (([1, 2, 3], 3), ([4, 5, 6], 30)):
        engine.submit(prompt, SamplingParams(max_tokens=tokens))
    move_no_slots(engine)
    with pytest.raises(SlotsUnsound, match="slot_mapping: row 0 reads token 0 from slot 4, its blocks hold"):
        run_to_the_end(engine)


def test_padding_that_writes_is_refused_before_it_is_recorded() -> None:
    engine = build()
    for row in range(3):
        engine.submit([1 + row, 2], SamplingParams(max_tokens=9))
    fresh = engine.planner.plan

    def stale() -> Any:
        plan = fresh()
        plan.write_slots[plan.live :] = 5  # a live sequence's
        return plan

    engine.planner.plan = stale  # type: ignore[method-assign]
    with pytest.raises(BucketsUnsound, match="write_slots: padded row 3 holds 5"):
        run_to_the_end(engine)
    assert engine.stats().captures == 0


def test_a_shape_outside_the_set_is_refused_before_it_is_recorded() -> None:
    engine = build()
    engine.submit([1, 2], SamplingParams(max_tokens=9))
    engine.planner._buckets = BucketSet(4, 64, 7)
    with pytest.raises(BucketsUnsound, match="shape 1 x 7: outside the set"):
        run_to_the_end(engine)


def syncing(engine: Engine) -> None:
    """The engine's forward asks the device for a value."""
    forward = engine.decode_graphs.forward

    def forward_with_sync(*tensors: Tensor) -> Tensor:
        logits = forward(*tensors)
        return logits if logits.sum().item() > 0 else logits * 1

    engine.decode_graphs.forward = forward_with_sync


def test_a_failed_recording_leaves_an_engine_that_goes_on_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    engine = build()
    syncing(engine)
    with caplog.at_level(logging.WARNING):
        said = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30))
    assert [c.token_ids for c in said] == [
        c.token_ids for c in build(eager_recorder).generate([[1, 2, 3]], SamplingParams(max_tokens=30))
    ]
    stats = engine.stats()
    assert (stats.captures, stats.replays) == (0, 0)
    assert stats.eager_steps == {"recording failed": stats.decode_steps}
    assert len(engine.decode_graphs.failed) == 2
    (warning,) = caplog.records
    assert "decode steps stay eager, shape 1 x 16 could not be recorded" in warning.getMessage()
    assert "logits.sum().item()" in warning.getMessage()
    with pytest.raises(CaptureUnsound, match=r"0 of 29 steps were replays, wanted 50%; eager: .'recording failed': 29"):
        check_replays_dominate(engine.decode_graphs, 0.5)
    with pytest.raises(CaptureUnsound, match="1 of 1 shapes are not recorded, the first 1 x 16: "):
        check_all_shapes_captured(engine.decode_graphs, [(1, 16)])
    with pytest.raises(CaptureUnsound, match="the first 4 x 64: it has not been seen yet"):
        check_all_shapes_captured(engine.decode_graphs, [(4, 64)])


def test_in_strict_mode_a_failed_recording_is_raised() -> None:
    engine = build(strict=True)
    syncing(engine)
    engine.submit([1, 2, 3])
    with pytest.raises(RecordingRefused, match=r"logits\.sum\(\)\.item\(\)"):
        run_to_the_end(engine)

    def broken(step: Any, args: Any, pool: Any = None) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = build(broken, strict=True)
    engine.submit([1, 2, 3])
    with pytest.raises(CaptureUnsound, match="shape 1 x 16: could not be recorded: operation not permitted"):
        run_to_the_end(engine)


@pytest.mark.parametrize(
    ("switches", "missing"),
    [
        ({}, "bucket_decode and persist_inputs"),
        ({"bucket_decode": True}, "persist_inputs"),
        ({"persist_inputs": True}, "bucket_decode"),
    ],
)
def test_the_missing_switches_are_named(switches: dict[str, bool], missing: str) -> None:
    config = EngineConfig(capture_decode=True, **switches)  # type: ignore[arg-type]
    with pytest.raises(CaptureUnsound, match=rf"capture_decode: needs {missing};"):
        Engine.build(tiny_model(), None, config)
    check_capture_ready(EngineConfig(**CAPTURE))


def test_decode_graphs_is_an_object_when_it_is_off() -> None:
    engine = Engine.build(tiny_model(), None, EngineConfig(max_rows=2, max_context=32))
    engine.generate([[1, 2]], SamplingParams(max_tokens=5))
    assert isinstance(engine.decode_graphs, CapturedDecode)
    assert engine.decode_graphs.graphs == {}
    assert engine.stats().eager_steps == {"off": 4}
    with pytest.raises(ValueError, match="a recorder needs the step's parts"):
        CapturedDecode(engine.forward, eager_recorder)


def test_a_step_without_a_plan_is_eager_and_counted() -> None:
    engine = started()
    plan = engine.planner.plan()
    ids = torch.tensor([[1], [2]])
    with torch.inference_mode():
        logits = engine.decode_graphs(plan.tensors, ids)
        torch.testing.assert_close(logits, engine.forward(ids, *plan.tensors))
    assert engine.stats().eager_steps == {"no plan": 1}


@pytest.mark.parametrize("recorder", RECORDERS)
def test_the_recorded_loop_waits_for_nothing(recorder: Recorder) -> None:
    engine = started(recorder)
    with StepTrace() as trace:
        for _ in range(8):
            engine.step()
    assert trace.syncs == []
    assert engine.stats().captures == 1, "no recording in the traced part"


def test_random_state_moves_on_and_repeats() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    runs = [build(recorder).generate([[1, 2, 3]], params)[0].token_ids for recorder in (tape_recorder, eager_recorder)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3, "each replay is sampled anew"


def test_separate_pools_are_refused() -> None:
    (graph,) = started(eager_recorder).decode_graphs.graphs.values()
    alone = [dataclasses.replace(graph, pool=(0, at)) for at in range(3)]
    with pytest.raises(CaptureUnsound, match="3 recordings in 3 pools, wanted one"):
        check_pool_shared(alone)
    check_pool_shared([alone[0], dataclasses.replace(graph, pool=(0, 0))])
    check_pool_shared([])


@pytest.mark.parametrize(
    ("multiple", "shapes", "shared", "private", "ratio"),
    [
        (128, 576, 268.4, 17414.2, 64.9),
        (512, 144, 268.4, 4554.5, 17.0),
        (2048, 36, 268.4, 1339.6, 5.0),
        (8192, 9, 268.4, 535.8, 2.0),
    ],
)
def test_the_pool_table(multiple: int, shapes: int, shared: float, private: float, ratio: float) -> None:
    listed = BucketSet(256, 8192, multiple).shapes()
    assert len(listed) == shapes
    assert round(shared_pool_bytes(listed, 32) / 1e6, 1) == shared
    assert round(private_pool_bytes(listed, 32) / 1e6, 1) == private
    assert round(pool_sharing_ratio(listed, 32), 1) == ratio
    with pytest.raises(CaptureUnsound, match="take 268,435,456 bytes, 268,435,455 are left"):
        check_pool_budget(listed, 32, 268_435_455)
    check_pool_budget(listed, 32, 268_435_456)


def test_the_arithmetic() -> None:
    assert score_cells(2, 3, 4) == 24
    assert workspace_bytes(256, 8192, 32) == 268_435_456
    assert workspace_bytes(2, 3, 4, itemsize=2) == 48
    assert capture_cost_s([(1, 1)] * 4, 0.5) == 2.0
    assert launch_saving_s(100, 0.25, 5.0) == 20.0
    assert capture_breakeven_steps(2.0, 20.0) == 1
    assert capture_breakeven_steps(41.0, 20.0) == 3
    assert capture_breakeven_steps(40.0, 20.0) == 2
    assert isinstance(capture_breakeven_steps(41.0, 20.0), int)
    assert capture_breakeven_steps(1.0, 0.0) == capture_breakeven_steps(1.0, -1.0) == math.inf
