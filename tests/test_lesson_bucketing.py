"""Lesson 04: its checkers, the bench behind its figures, the figures, and the widget that moves one."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nanoserve_lab.bench.load import CODE, CONVERSATION
from nanoserve_lab.bench.padding import OPEN, by_load, decode_steps, padding, run, seen_over_run, simulate
from nanoserve_lab.bench.provenance import read_csv, with_provenance
from nanoserve_lab.bench.timing import BenchRefused
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.exercises import check_fit, check_multiple
from nanoserve_lab.figures import FigureError, padded_rectangle, padding_against_graphs, shapes_over_run
from nanoserve_lab.figures.buckets import choose

DATA = Path(__file__).parents[1] / "data"

Lists = list[int]


def least(steps: Lists, value: int) -> int:
    return min(step for step in steps if step >= value)


@pytest.mark.parametrize(
    ("fit", "told"),
    [
        (lambda rs, ws, r, c: (least(rs, r), least(ws, c)), "right for every batch of 20 sets"),
        (lambda rs, ws, r, c: (rs[-1], ws[-1]), "1 itself is in the list: an exact fit needs no padding"),
        (lambda rs, ws, r, c: (least(rs, r), ws[-1]), "(1, 16) covers it, and so does (1, 8); the smallest was wanted"),
        (lambda rs, ws, r, c: (rs[0], least(ws, c)), "rows 1 does not cover 2"),
        (lambda rs, ws, r, c: (r, c), "width 1 is not in the list; a shape outside the set was never recorded"),
        (lambda rs, ws, r, c: (least(rs, r), least(ws[:-1], c)), "ValueError, wanted (1, 16); the last of each list"),
        (lambda rs, ws, r, c: (least([*rs, 99], r), least([*ws, 99], c)), "nothing covers it, and (99, 8) came back"),
        (lambda rs, ws, r, c: [least(rs, r), least(ws, c)], "[1, 8]; a pair (rows, width) was wanted"),
        (lambda rs, ws, r, c: None, "None; a pair (rows, width) was wanted"),
    ],
)
def test_the_fit_checker_says_what_is_off(fit: Callable[..., Any], told: str) -> None:
    assert told in check_fit(fit)


def cheapest(frame: pd.DataFrame, limit: int) -> int | None:
    fitting = frame[frame.shapes <= limit]
    return None if fitting.empty else int(fitting.loc[fitting.waste.idxmin()].width_multiple)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (cheapest, "right for limits of 1000, 64, 36, 20, 9, 8 graphs"),
        (lambda frame, limit: 128, "limit 64: width multiple 128 has 576 shapes"),
        (lambda frame, limit: 8192, "limit 1000: 8192 has 9 shapes and wastes"),
        (lambda frame, limit: cheapest(frame, limit) or 8192, "limit 8: no multiple has so few shapes, and 8192 came"),
        (lambda frame, limit: 5000 if limit == 20 else cheapest(frame, limit), "4096 has 18 shapes and wastes"),
        (lambda frame, limit: 129, "129 is none of the width multiples 128, 512"),
        (lambda frame, limit: None, "limit 1000: None came back; 128 has 576 shapes"),
    ],
)
def test_the_multiple_checker_says_what_is_off(answer: Callable[[pd.DataFrame, int], int | None], told: str) -> None:
    assert told in check_multiple(answer)


def requests(*lines: tuple[float, int, int]) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=["at_s", "prompt_tokens", "output_tokens"])


def served(frame: pd.DataFrame, max_rows: int = 8) -> list[list[int]]:
    # The run ends with the last arrival: one comes late, and has no decode step of its own.
    return decode_steps(pd.concat([frame, requests((100.0, 1, 1))]), step_s=1.0, max_rows=max_rows).to_numpy().tolist()


def test_decode_steps_by_hand() -> None:
    # A prompt of 3 and 4 outputs: one from the prefill, three from steps over 4, 5 and 6 tokens.
    assert served(requests((0.0, 3, 4))) == [[1, 4, 4], [1, 5, 5], [1, 6, 6]]
    # Another of 7 tokens comes in while the first runs, and decodes from the step after its prefill on.
    assert served(requests((0.0, 3, 4), (1.5, 7, 3))) == [[1, 4, 4], [1, 5, 5], [2, 8, 6 + 8], [1, 9, 9]]
    # One row: the second waits until the first has left, and takes its place in the same step.
    assert served(requests((0.0, 3, 2), (0.0, 7, 2)), max_rows=1) == [[1, 4, 4], [1, 8, 8]]
    # An output of one token never decodes; a gap without requests has no steps.
    assert served(requests((0.0, 3, 1), (50.5, 3, 2))) == [[1, 4, 4]]


def test_the_simulation_keeps_to_its_limits() -> None:
    steps = simulate(CONVERSATION, seconds=60, rate_scale=4.0, max_rows=16, max_context=512)
    assert steps.rows.max() == 16
    assert steps.longest.max() == 512
    assert (steps.live_cells <= steps.rows * steps.longest).all()
    assert steps.equals(simulate(CONVERSATION, seconds=60, rate_scale=4.0, max_rows=16, max_context=512))
    other = simulate(CONVERSATION, seconds=60, rate_scale=4.0, seed=1, max_rows=16, max_context=512)
    assert not steps.equals(other)
    busy, quiet = (simulate(CONVERSATION, seconds=60, rate_scale=scale).rows.mean() for scale in (1.0, 0.25))
    assert busy > 2 * quiet
    assert not simulate(CODE, seconds=60).empty


def test_padding_by_hand() -> None:
    steps = pd.DataFrame({"rows": [3, 4], "longest": [11, 8], "live_cells": [22, 32]})
    line = padding(steps, [8], max_rows=4, max_context=16).iloc[0]
    assert (line.shapes, line.seen, line.steps, line.tokens) == (6, 2, 2, 7)
    assert line.live_cells == 22 + 32
    assert line.ragged_cells == 3 * 11 - 22
    assert line.row_cells == 11
    assert line.width_cells == 4 * (16 - 11)
    assert line.padded_cells == 11 + 11 + 20
    assert line.padded_rows == 1
    assert line.waste == pytest.approx(42 / 96)
    assert line.captures_per_1000_tokens == pytest.approx(1000 * 2 / 7)


def test_cells_add_up_and_the_sets_have_their_sizes() -> None:
    steps = simulate(seconds=30)
    frame = padding(steps)
    shapes = dict(zip(frame.width_multiple, frame.shapes, strict=True))
    assert [shapes[multiple] for multiple in (128, 512, 2048, 8192)] == [576, 144, 36, 9]
    assert (frame.ragged_cells + frame.row_cells + frame.width_cells == frame.padded_cells).all()
    for line in frame.itertuples():
        buckets = BucketSet(256, 8192, line.width_multiple)
        fitted = [buckets.fit(rows, longest) for rows, longest in zip(steps.rows, steps.longest, strict=True)]
        assert line.padded_cells + line.live_cells == sum(rows * width for rows, width in fitted)
        assert line.seen == len(set(fitted)) <= line.shapes
    assert frame.waste.is_monotonic_increasing


def test_shapes_over_a_run() -> None:
    steps = pd.DataFrame({"rows": [1] * 200, "longest": range(1, 201), "live_cells": range(1, 201)})
    frame = seen_over_run(steps, [64], max_rows=4, max_context=256)
    first, closed = (frame[frame.width_multiple == multiple] for multiple in (OPEN, 64))
    assert (first.seen == first.step).all()
    assert (closed.seen == np.ceil(closed.step / 64)).all()
    assert closed.seen.iloc[-1] == 4


def test_the_bench_writes_what_it_counts(tmp_path: Path) -> None:
    paths = run(tmp_path, multiples="512,128", seconds=20)
    assert [path.name for path in paths] == ["padding.csv", "padding-shapes.csv"]
    frame = read_csv(paths[0])
    assert frame.width_multiple.tolist() == [512, 128] * 3
    assert frame.rate_scale.unique().tolist() == [1 / 16, 1 / 4, 1.0]
    assert set(frame["command"]) == {"nanoserve-lab bench padding --multiples 512,128 --seconds 20"}
    assert frame.padded_cells.tolist() == by_load(seconds=20, multiples=[512, 128]).padded_cells.tolist()
    assert read_csv(paths[1]).max_rows.unique().tolist() == [256]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"trace": "poems"}, "--trace: wanted one of conversation, code, got 'poems'"),
        ({"multiples": "0"}, "--multiples: wanted positive integers"),
        ({"seconds": 0}, "--seconds: wanted 1 or more"),
        ({"step_s": 0}, "--step-s: wanted 0.001 or more"),
        ({"seed": -1}, "--seed: wanted 0 or more"),
        ({"seconds": 1}, "1 at 0.0625 times the trace's rate have no decode step"),
    ],
)
def test_a_bench_option_that_cannot_be_meant(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(BenchRefused, match=re.escape(told)):
        run(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_recorded_run_is_the_simulation() -> None:
    """Counts: whoever runs the bench must get the numbers of the committed file."""
    frame = read_csv(DATA / "padding.csv")
    quiet = frame[frame.rate_scale == 1 / 16].reset_index(drop=True)
    here = padding(simulate(seconds=600, rate_scale=1 / 16))
    for column in ("shapes", "seen", "live_cells", "padded_cells", "steps"):
        assert quiet[column].tolist() == here[column].tolist(), column


def recorded(multiples: Sequence[int] = (128, 1024, 8192)) -> pd.DataFrame:
    return with_provenance(by_load(seconds=20, multiples=multiples), command="test")


def texts(picture: Any) -> list[str]:
    return [text.get_text() for axes in picture.axes for text in axes.texts]


def test_the_ring_is_where_it_was_chosen() -> None:
    frame = recorded()
    wanted = frame[(frame.rate_scale == 0.25) & (frame.width_multiple == 8192)].iloc[0]
    picture = padding_against_graphs(choose(frame, 0.25, 8192))
    left, right = picture.axes
    ring = next(line for line in left.lines if line.get_markersize() == 15)
    assert ring.get_xydata().tolist() == [[9, pytest.approx(100 * wanted.waste)]]
    heights = [bar.get_height() for bars in right.containers for bar in bars]
    assert sum(heights) == pytest.approx(1)
    assert heights[0] == pytest.approx(1 - wanted.waste)
    assert f"live {1 - wanted.waste:.0%}" in texts(picture)
    assert f"live {1 - wanted.waste:.0%}" in picture.alt
    assert "width multiple 8192" in picture.alt
    # Without a choice: the middle multiple of the busiest load.
    assert "width multiple 1024" in padding_against_graphs(frame).alt


def test_the_run_figure_names_the_open_set_and_the_sets() -> None:
    steps = simulate(seconds=20)
    frame = with_provenance(seen_over_run(steps).assign(max_rows=256, max_context=8192), command="test")
    picture = shapes_over_run(frame)
    ends = frame[frame.step == frame.step.max()].set_index("width_multiple").seen
    assert f"128: {ends[128]} of 576" in texts(picture)
    assert f"8192: {ends[8192]} of 9" in picture.alt or f"{ends[8192]} of 9 at width multiple 8192" in picture.alt
    assert f"to {ends[OPEN]:,} shapes after {len(steps):,} steps" in picture.alt


def test_the_rectangle_counts_as_the_bench_does() -> None:
    line = padding(pd.DataFrame({"rows": [3], "longest": [11], "live_cells": [22]}), [8], 4, 16).iloc[0]
    shown = [text for text in texts(padded_rectangle()) if text[-1].isdigit() and not text[0].isdigit()]
    kinds = (line.live_cells, line.ragged_cells, line.row_cells, line.width_cells)
    assert [int(text.split()[-1]) for text in shown if not text.startswith("row ")] == [int(kind) for kind in kinds]
    assert len(padded_rectangle().axes[0].patches) == 4 * 16 + 4


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda frame: choose(frame, 9.0, 128), "0 lines with rate_scale 9 and width_multiple 128, wanted one"),
        (lambda frame: frame.assign(chosen=True), "9 chosen lines, wanted one"),
        (lambda frame: pd.concat([frame, frame]), "two lines of one load and width multiple"),
        (lambda frame: frame.drop(columns="waste"), "no column waste"),
    ],
)
def test_a_padding_frame_that_cannot_be_shown(spoil: Callable[[pd.DataFrame], pd.DataFrame], told: str) -> None:
    frame = recorded()
    with pytest.raises(FigureError, match=told):
        padding_against_graphs(spoil(frame))


def test_a_run_without_an_open_set_is_refused() -> None:
    frame = seen_over_run(simulate(seconds=20)).assign(max_rows=256, max_context=8192)
    with pytest.raises(FigureError, match="wanted an open set"):
        shapes_over_run(with_provenance(frame[frame.width_multiple != OPEN]))


def test_the_explorer_draws_again_when_a_slider_moves() -> None:
    pytest.importorskip("ipywidgets")
    from nanoserve_lab.widgets import padding_explorer

    frame = recorded()
    load, multiple, drawing = padding_explorer(frame).children
    twin = padding_against_graphs(frame)
    before = drawing.value
    assert f'alt="{twin.alt}"' in before, "at its defaults the widget shows what its static twin shows"
    assert base64.b64decode(re.findall('base64,([^"]+)', before)[0]).startswith(b"\x89PNG")
    multiple.value = 8192
    assert drawing.value != before
    assert "width multiple 8192" in drawing.value
    load.value = 1 / 16
    assert f"with {frame.mean_rows.iloc[0]:.0f} rows on average. Right" in drawing.value
    assert len(repr(drawing)) < 20, "a notebook keeps the text of a widget"
