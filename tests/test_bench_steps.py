"""The benches of days 53 and 54: counts from instruments, times side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoserve_lab.bench import capture, inputs
from nanoserve_lab.bench.provenance import read_csv
from nanoserve_lab.inputs import DecodeInputs, fresh_allocations, fresh_cells


def test_bench_inputs_counts_what_it_ran(tmp_path: Path) -> None:
    [path] = inputs.run(tmp_path, rows="3,32", steps="8,64", repeats=1)
    frame = read_csv(path)
    for line in frame.itertuples():
        assert line.fresh_allocations == line.writes == fresh_allocations(line.steps)
        assert line.buffered_allocations == 0
        assert line.cells == fresh_cells(line.rows, line.steps)
        assert line.fresh_plan_ms > 0
        assert line.buffered_plan_ms > 0
    assert frame[frame.rows == 3].fresh_allocations.tolist() == [24, 192]
    assert frame[frame.rows == 3].cells.tolist() == [72, 576]
    assert set(frame.command) == {"nanoserve-lab bench inputs --rows 3,32 --steps 8,64 --repeats 1"}


def test_bench_inputs_sees_a_tensor_that_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoserve_lab.inputs import InputBuffer

    write = InputBuffer.write
    monkeypatch.setattr(InputBuffer, "write", lambda self, values, window=None: write(self, values, window).clone())
    assert inputs.count(3, 8, 8)["buffered_allocations"] == 3 * 8


def test_the_two_planners_plan_the_same_step() -> None:
    cache, fresh, in_place, buffers = inputs.two_planners(3, 8, 4)
    assert isinstance(buffers, DecodeInputs)
    cache.grow()
    assert [t.tolist() for t in fresh.plan().tensors] == [t.tolist() for t in in_place.plan().tensors]


def test_bench_capture_counts_what_it_ran(tmp_path: Path) -> None:
    paths = capture.run(tmp_path, rows="2", steps="8,32,128", repeats=1)
    frame, pools, launches = (read_csv(path) for path in paths)
    assert frame.captures_open.tolist() == frame.replays.tolist() == frame.steps.tolist() == [8, 32, 128]
    assert frame.captures_closed.tolist() == [1, 1, 2]
    assert [round(100 * reuse) for reuse in frame.reuse] == [88, 97, 98]
    assert (frame[["eager_ms", "replayed_ms", "record_ms"]] > 0).all().all()
    assert (frame.ratio == frame.replayed_ms / frame.eager_ms).all(), "one run: its own ratio"
    assert pools.shapes.tolist() == [576, 144, 36, 9]
    assert [round(ratio, 1) for ratio in pools.ratio] == [64.9, 17.0, 5.0, 2.0]
    assert launches.module.str.extract(r"layers\.(\d)")[0].dropna().unique().tolist() == ["0", "1", "2", "3"]
    assert (launches.seconds > 0).all()
    assert launches.order.tolist() == list(range(len(launches)))


def test_recording_is_not_in_the_replays_time() -> None:
    from nanoserve_lab.model.tiny import tiny_model

    engine, watched = capture.engine_of(tiny_model(capture.MODEL), rows=2, steps=3, capture=True)
    engine.step()
    (graph,) = watched.graphs.values()
    assert watched.seconds < graph.seconds
