"""What lesson 03 leans on: its checkers, the planning bench, its figures, and the gate that knows a row's history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from nanoserve_lab.bench import plan as bench
from nanoserve_lab.bench.provenance import PROVENANCE, provenance, read_csv
from nanoserve_lab.bench.timing import BenchRefused
from nanoserve_lab.exercises import check_bytes, check_move
from nanoserve_lab.figures import FigureError, finished_row, planning_time
from nanoserve_lab.slots import SlotsUnsound, check_window_intact


def whole_rows(table: Any, lengths: Any, source: int, target: int) -> None:
    table[target] = table[source]
    lengths[target] = lengths[source]
    table[source] = 0
    lengths[source] = 0


def nothing(table: Any, lengths: Any, source: int, target: int) -> None:
    pass


def stale_tail(table: Any, lengths: Any, source: int, target: int) -> None:
    new = lengths[source]
    table[target, :new] = table[source, :new]
    table[source] = 0
    lengths[[target, source]] = new, 0


def source_kept(table: Any, lengths: Any, source: int, target: int) -> None:
    table[target] = table[source]
    lengths[[target, source]] = lengths[source], 0


def shifted(table: Any, lengths: Any, source: int, target: int) -> None:
    table[target:-1] = table[target + 1 :]
    lengths[target:-1] = lengths[target + 1 :]


def lengths_kept(table: Any, lengths: Any, source: int, target: int) -> None:
    table[target] = table[source]
    table[source] = 0


def itself_kept(table: Any, lengths: Any, source: int, target: int) -> None:
    if source != target:
        whole_rows(table, lengths, source, target)


def ones(table: Any, lengths: Any, source: int, target: int) -> None:
    table[target] = 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (whole_rows, "right in 5 cases"),
        (nothing, "rows of 4, 3, 4 tokens, row 0 finishes: row 0 still holds the slots of the sequence that finished"),
        (stale_tail, "rows of 6, 3, 2 tokens, row 0 finishes: row 0, column 2 still holds slot 6: a stale tail"),
        (source_kept, "row 2 moved away and still holds [20, 21, 22, 23, 0, 0, 0, 0]"),
        (shifted, "row 1 is [20, 21, 22, 23, 0, 0, 0, 0], it was [12, 13, 14, 0, 0, 0, 0, 0] and had no part in this"),
        (lengths_kept, "lengths [4, 3, 4, 0], wanted [4, 3, 0, 0]"),
        (itself_kept, "row 1 is the last row itself; it ends empty"),
        (ones, "row 0 is [1, 1, 1, 1, 1, 1, 1, 1], wanted [20, 21, 22, 23, 0, 0, 0, 0]"),
        (lambda table, lengths, source: None, "row 0 finishes: TypeError"),
    ],
)
def test_the_checker_of_the_prefix_rule_says_what_is_off(answer: Callable[..., None], told: str) -> None:
    assert told in check_move(answer)


def gather(rows: int, context: int, steps: int) -> int:
    return sum(8 * rows * (context + step) for step in range(1, steps + 1))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda r, c, s: (gather(r, c, s), 8 * r * s), "right for three runs"),
        (lambda r, c, s: (gather(r, c, s) // 8, 8 * r * s), "gather 8, counted 64: those are cells"),
        (lambda r, c, s: (gather(r, c - 1, s), 8 * r * s), "gather 48, counted 64: the token that a step writes"),
        (lambda r, c, s: (8 * r * s * (c + 1), 8 * r * s), "gather 256, counted 352: the rectangle is a column wider"),
        (lambda r, c, s: (8 * r * (c + s), 8 * r * s), "gather 112, counted 352: that is one rectangle"),
        (lambda r, c, s: (gather(r, c, s), r * s), "window 2, counted 16: those are cells"),
        (lambda r, c, s: (gather(r, c, s), 8 * s), "window 8, counted 16: that is one row"),
        (lambda r, c, s: (gather(r, c, s), 8 * r), "2 rows from 3 tokens, 4 steps: window 16, counted 64: that is one"),
        (lambda r, c, s: (gather(r, c, s), 8 * r * (c + s)), "window 64, counted 16: the prompt's cells"),
        (lambda r, c, s: gather(r, c, s), "a pair of whole numbers was wanted"),
        (lambda r, c, s: (float(gather(r, c, s)), 8 * r * s), "a pair of whole numbers was wanted"),
    ],
)
def test_the_checker_of_the_bytes_says_what_is_off(answer: Callable[[int, int, int], Any], told: str) -> None:
    assert told in check_bytes(answer)


@pytest.mark.parametrize("rows", [[3], [5, 1, 8]])
def test_both_arms_of_the_bench_plan_the_same_step(rows: list[int]) -> None:
    gathered, window = (bench.planning(rows, 24, on, block_size=4) for on in (False, True))
    held = window.step()
    gathered.step()
    for _ in range(9):
        plan, other = gathered.step(), window.step()
        for one, two in zip(plan.tensors, other.tensors, strict=True):
            assert torch.equal(one, two)
        assert other.slot_mapping.data_ptr() == held.slot_mapping.data_ptr()
    assert gathered.table is None


def test_a_planning_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="context: 9 tokens, at most 8"):
        bench.planning([3, 9], 8, window=True)
    with pytest.raises(ValueError, match="rows: 2, at most 1"):
        bench.planning([3, 3], 8, window=True, max_rows=1)


def test_the_plan_bench_counts_bytes(tmp_path: Path) -> None:
    (path,) = bench.run(tmp_path, rows="1,3", contexts="21,40", repeats=1)
    frame = read_csv(path)
    assert path.name == "plan.csv"
    assert set(PROVENANCE) <= set(frame.columns)
    assert set(frame.command) == {"nanoserve-lab bench plan --rows 1,3 --contexts 21,40 --repeats 1"}
    assert frame[["rows", "context"]].to_numpy().tolist() == [[1, 21], [1, 40], [3, 21], [3, 40]]
    assert frame.gather_bytes.tolist() == [8 * 21, 8 * 40, 8 * 3 * 21, 8 * 3 * 40]
    assert frame.window_bytes.tolist() == [8, 8, 24, 24]
    assert frame.table_bytes.tolist() == [320, 320, 960, 960]
    assert (frame[["gather_us", "window_us"]] > 0).all(axis=None)


def test_the_last_step_of_a_cell_has_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = bench.Planning.step

    def watched(rows: bench.Planning) -> Any:
        plan = step(rows)
        seen.append((rows.table is not None, int(plan.context_lens.max())))
        return plan

    monkeypatch.setattr(bench.Planning, "step", watched)
    bench.measure([2], [64], repeats=2)
    for window in (False, True):
        contexts = [context for on, context in seen if on is window]
        assert contexts == list(range(64 - bench.tokens_written(2) + 1, 65))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "0"}, "--rows: wanted positive integers"),
        ({"contexts": "128,20", "repeats": 1}, "--contexts: wanted 21 or more, got 20"),
        ({"repeats": 0}, "--repeats: wanted 1 or more, got 0"),
    ],
)
def test_the_plan_bench_refuses_before_it_runs(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchRefused, match=message):
        bench.run(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_three_rows_are_those_of_the_page() -> None:
    rows = bench.three_rows()
    assert rows.table is not None
    before = rows.table.mirror.copy()
    assert [before[row, : rows.cache.lengths[row]].tolist() for row in range(3)] == [
        [4, 5, 6, 7, 12, 13],
        [8, 9, 10, 11, 16, 17],
        [20, 21, 22],
    ]
    rows.cache.remove(0)
    assert rows.table.mirror[0].tolist() == [20, 21, 22, *[0] * 9]
    assert np.array_equal(rows.table.mirror[1], before[1])
    assert not rows.table.mirror[2:].any()


def test_the_strip_shows_the_table_and_its_window() -> None:
    (axes,) = finished_row().axes
    numbers = [
        text.get_text()
        for text in axes.texts
        if text.get_text().isdigit() and text.get_horizontalalignment() == "center"
    ]
    rows = bench.three_rows()
    assert rows.table is not None
    wanted = rows.table.mirror.ravel().tolist()
    rows.cache.remove(0)
    assert numbers == [str(slot) for slot in wanted + rows.table.mirror.ravel().tolist()]
    frames = [patch for patch in axes.patches if not patch.get_fill()]
    sizes = [(round(f.get_height() / 0.34), round(f.get_width() / 0.232)) for f in frames]  # type: ignore[attr-defined]
    assert sizes == [(3, 6), (2, 6)]


def plan_frame(**changes: Any) -> pd.DataFrame:
    cells = [(1, 128, 60.0, 61.0), (1, 8192, 90.0, 62.0), (32, 128, 70.0, 63.0), (32, 8192, 800.0, 64.0)]
    frame = pd.DataFrame(cells, columns=["rows", "context", "gather_us", "window_us"])
    return frame.assign(**{**provenance(), **changes})


def test_the_curves_are_the_frame() -> None:
    picture = planning_time(plan_frame().sample(frac=1, random_state=0))
    (axes,) = picture.axes
    lines = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    assert lines == [[60, 90], [61, 62], [70, 800], [63, 64]]
    assert "with 1 row, gather from 60 to 90 microseconds and window from 61 to 62" in picture.alt
    assert "with 32 rows, gather from 70 to 800 microseconds and window from 63 to 64" in picture.alt
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert len(heights) == 4
    assert np.diff(heights).min() > 0.05, "labels of lines that end close together are moved apart"
    low, high = np.log(axes.get_ylim())
    assert heights[0] == pytest.approx((np.log(62) - low) / (high - low)), "the lowest stands at its line's end"


def test_the_names_of_lines_that_end_high_stay_inside() -> None:
    frame = plan_frame(rows=[1, 2, 3, 3], context=[128, 128, 64, 128], gather_us=[50_000.0, 50_001.0, 60.0, 50_002.0])
    (axes,) = planning_time(frame).axes
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert len(heights) == 6
    assert heights[-1] <= 1
    assert np.diff(heights).min() > 0.05


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (plan_frame(window_us=0.0), "both times must be positive"),
        (plan_frame(context=128), "two lines for one number of rows and context"),
        (plan_frame(rows=[1, 2, 3, 4]), "at most 3 numbers of rows, saw 4"),
        (plan_frame().drop(columns="gather_us"), "no column gather_us"),
    ],
)
def test_a_frame_that_is_no_planning_is_refused(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(FigureError, match=message):
        planning_time(frame)


def test_a_row_of_another_history_is_seen_with_the_cache_alone() -> None:
    """Two rows of one length: newest slot, length, distinct slots and tail are right, the history is another's."""
    rows = bench.planning([3, 3], 12, window=True, block_size=4)
    assert rows.table is not None
    table = rows.table

    def lengths_alone(source: int, target: int) -> None:
        table.lengths[[target, source]] = table.lengths[source], 0

    table.move = lengths_alone  # type: ignore[method-assign]
    rows.cache.remove(0)
    plan = rows.step()
    check_window_intact(plan, table)
    with pytest.raises(SlotsUnsound, match="row 0 reads token 0 from slot 4, its blocks hold that token in slot 8"):
        check_window_intact(plan, table, rows.cache)


def test_a_sound_table_passes_with_the_cache() -> None:
    rows = bench.three_rows()
    assert rows.table is not None
    for row in (0, 0):
        check_window_intact(rows.step(), rows.table, rows.cache)
        rows.cache.remove(row)
    check_window_intact(rows.step(), rows.table, rows.cache)
