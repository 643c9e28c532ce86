"""What lesson 05 leans on: its checkers, the bench of planning in place, its figures, and the ledger's row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from figure_frames import inputs

from nanoserve_lab.bench import inputs as bench
from nanoserve_lab.bench.provenance import PROVENANCE, read_csv
from nanoserve_lab.bench.timing import BenchRefused
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.exercises import check_reaches, check_write, four_steps
from nanoserve_lab.figures import FigureError, allocations_over_steps, persistent_decode_inputs
from nanoserve_lab.figures.inputs import inputs_run
from nanoserve_lab.inputs import fresh_allocations, fresh_cells, per_shape_bytes
from nanoserve_lab.ledger import ledger


def right(buffer: Any, mirror: Any, values: Any) -> Any:
    mirror.numpy()[: len(values)] = values
    buffer[: len(values)].copy_(mirror[: len(values)])
    return buffer[: len(values)]


def fresh(buffer: Any, mirror: Any, values: Any) -> Any:
    return torch.tensor(values)


def fresh_source(buffer: Any, mirror: Any, values: Any) -> Any:
    buffer[: len(values)] = torch.tensor(values)
    return buffer[: len(values)]


def one_by_one(buffer: Any, mirror: Any, values: Any) -> Any:
    for row, value in enumerate(values):
        buffer[row] = value
    return buffer[: len(values)]


def mirror_alone(buffer: Any, mirror: Any, values: Any) -> Any:
    mirror.numpy()[: len(values)] = values
    return buffer[: len(values)]


def whole_mirror(buffer: Any, mirror: Any, values: Any) -> Any:
    mirror.numpy()[: len(values)] = values
    return buffer.copy_(mirror)[: len(values)]


def whole_buffer(buffer: Any, mirror: Any, values: Any) -> Any:
    right(buffer, mirror, values)
    return buffer


def twice(buffer: Any, mirror: Any, values: Any) -> Any:
    right(buffer, mirror, values)
    return right(buffer, mirror, values)


def renamed(buffer: Any, mirror: Any, values: Any) -> Any:
    buffer = mirror
    return right(buffer, mirror, values)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (right, "right in 4 writes"),
        (fresh, "[3, 1, 2]: what was returned does not lie at the buffer's address"),
        (renamed, "what was returned does not lie at the buffer's address"),
        (fresh_source, "address and values are right, but 1 tensor was allocated on the way"),
        (one_by_one, "address and values are right, but 3 tensors were allocated on the way"),
        (mirror_alone, "the buffer holds [77, 77, 77]; did the values go down to it?"),
        (whole_mirror, "[3, 1, 2]: cell 3 of the buffer was 77 and is 55 now"),
        (whole_buffer, "a window of shape (6,); wanted 3 rows"),
        (twice, "2 copies to the device; one is enough"),
        (lambda buffer, mirror, values: None, "None was returned; the window, a tensor, was wanted"),
        (lambda buffer, mirror: None, "[3, 1, 2]: TypeError"),
    ],
)
def test_the_checker_of_a_write_in_place_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_write(answer)


def held_window(step: Any, buffer: Any, values: Any) -> bool:
    held = buffer[: len(values)]
    step(buffer, values)
    return bool(held.tolist() == values)


def values_alone(step: Any, buffer: Any, values: Any) -> bool:
    return bool(step(buffer, values)[: len(values)].tolist() == values)


def address_after(step: Any, buffer: Any, values: Any) -> bool:
    return bool(step(buffer, values).data_ptr() == buffer.data_ptr())


def same_object(step: Any, buffer: Any, values: Any) -> bool:
    return step(buffer, values) is buffer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (held_window, "right: B and D reach a replay"),
        (values_alone, "step A: True, wanted False; the values are right, but in another storage"),
        (address_after, "step C: True, wanted False; it is the same Python object, but it lies elsewhere now"),
        (same_object, "step B: False, wanted True; the values were written into the buffer's own storage"),
        (lambda step, buffer, values: step.__name__ == "_step_b", "step D: False, wanted True; a tensor is allocated"),
        (lambda step, buffer, values: None, "step A: None; True or False was wanted"),
        (lambda step, buffer: None, "step A: TypeError"),
    ],
)
def test_the_checker_of_what_a_replay_reads_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_reaches(answer)


def test_all_four_steps_return_the_values() -> None:
    for step in four_steps().values():
        assert step(torch.zeros(4, dtype=torch.int64), [5, 7])[:2].tolist() == [5, 7]


def test_the_inputs_bench_counts_and_writes(tmp_path: Path) -> None:
    (path,) = bench.run(tmp_path, rows="1,3", steps="4,20", repeats=1)
    frame = read_csv(path)
    assert path.name == "day-53-inputbench.csv"
    assert set(PROVENANCE) <= set(frame.columns)
    assert set(frame.command) == {"nanoserve-lab bench inputs --rows 1,3 --steps 4,20 --repeats 1"}
    assert frame[["rows", "steps"]].to_numpy().tolist() == [[1, 4], [1, 20], [3, 4], [3, 20]]
    if not torch.cuda.is_available():
        assert frame.fresh_allocations.tolist() == [fresh_allocations(steps) for steps in frame.steps]
    assert frame.writes.tolist() == [fresh_allocations(steps) for steps in frame.steps]
    assert frame.cells.tolist() == [
        fresh_cells(rows, steps) for rows, steps in zip(frame.rows, frame.steps, strict=True)
    ]
    assert set(frame.buffered_allocations) == {0}
    assert (frame[["fresh_plan_ms", "buffered_plan_ms", "ratio"]] > 0).all(axis=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "0"}, "--rows: wanted positive integers"),
        ({"steps": "x"}, "--steps: wanted positive integers"),
        ({"repeats": 0}, "--repeats: wanted 1 or more, got 0"),
    ],
)
def test_the_inputs_bench_refuses_before_it_runs(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchRefused, match=message):
        bench.run(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_drawn_run_is_that_of_the_words() -> None:
    run = inputs_run()
    assert run.fresh_addresses == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert run.buffered_addresses == [[1, 2, 3, 4]] * 3
    assert run.lengths == [[4, 4, 3], [5, 5, 4], [6, 6, 5]]
    assert run.snapshot[:3] == [4, 4, 3]
    held = run.buffered[0]
    assert held.context_lens.tolist() == [6, 6, 5, 1]
    assert held.live == 3
    assert {name: int(buffer.buffer[3]) for name, buffer in run.inputs.buffers.items()} == {
        "input_ids": 42,
        "positions": 0,
        "write_slots": 0,
        "context_lens": 1,
    }
    assert run.verdicts == {False: [False, False], True: [True, True]}


def test_the_diagram_shows_the_run_and_the_bytes() -> None:
    picture = persistent_decode_inputs()
    (axes,) = picture.axes
    texts = [text.get_text() for text in axes.texts]
    run = inputs_run()
    cells = [str(value) for buffer in run.inputs.buffers.values() for value in buffer.buffer.flatten().tolist()]
    assert all(texts.count(cell) >= cells.count(cell) for cell in set(cells))
    assert (texts.count("agrees, always"), texts.count("refuses")) == (2, 2)
    shapes = BucketSet(256, 8192, 2048).shapes()
    for value in (8_192, per_shape_bytes(shapes), 256 * 8192 * 8):
        assert f"{value:,}" in texts
        assert f"{value:,}" in picture.alt
    assert {"8.0x", "2,048x"} <= set(texts)


def test_the_lines_are_the_frame() -> None:
    picture = allocations_over_steps(inputs().sample(frac=1, random_state=0))
    counts, ratios = picture.axes
    lines = [line.get_ydata().tolist() for line in counts.lines]  # type: ignore[union-attr]
    assert lines == [[24, 192, 1536], [0, 0, 0]]
    lines = [line.get_ydata() for line in ratios.lines[1:]]
    assert [[round(float(value), 3) for value in line] for line in lines] == [[0.903] * 3, [0.932] * 3, [1.156] * 3]
    assert "rises to 1,536 at 512 steps for fresh tensors; the line for buffers lies at 0" in picture.alt
    assert "3 rows 0.90 to 0.90, 32 rows 0.93 to 0.93, 256 rows 1.16 to 1.16" in picture.alt
    low, high = ratios.get_ylim()
    assert low < 0.903 < 1.156 < high


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 8}, "two lines for one number of rows and steps"),
        ({"ratio": 0.0}, "a ratio of times must be positive"),
        ({"rows": range(9)}, "at most 3 numbers of rows, saw 9"),
        ({"fresh_allocations": range(9)}, "fresh_allocations and buffered_allocations differ between rows"),
    ],
)
def test_a_frame_that_is_no_inputs_bench_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FigureError, match=message):
        allocations_over_steps(inputs().assign(**changes))
    with pytest.raises(FigureError, match="no column ratio"):
        allocations_over_steps(inputs().drop(columns="ratio"))


def test_the_ledger_after_this_lesson() -> None:
    frame: pd.DataFrame = ledger("05_persistent_inputs")
    before, after = frame.loc["04_bucketing"], frame.loc["05_persistent_inputs"]
    assert after.moving_addresses == 1, "the logits alone"
    assert before.allocations - after.allocations == 3
    assert after.launches - before.launches == 1, "the copy of the sampled tokens"
    assert after.bytes_moved - before.bytes_moved == 2 * 2 * 8
    assert after.host_syncs == 0
