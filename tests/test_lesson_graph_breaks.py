"""Lesson 01: its checkers, its bench, and what its figures refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from figure_frames import compiled, graphs
from torch import Tensor

from nanoserve_lab.bench import compile as bench
from nanoserve_lab.bench.provenance import PROVENANCE, read_csv
from nanoserve_lab.bench.timing import BenchRefused
from nanoserve_lab.compiled import CompiledDecode, eager_compiler
from nanoserve_lab.exercises import check_graphs, check_grown
from nanoserve_lab.figures import FigureError, compiled_step, graphs_against_steps
from nanoserve_lab.model.tiny import tiny_model

DATA = Path(__file__).parents[1] / "data"
Shapes = Sequence[tuple[int, int]]


def loop(context_lens: Tensor, stopped: Tensor) -> Tensor:
    for row in range(len(context_lens)):
        if not stopped[row]:
            context_lens[row] += 1
    return context_lens


def asking(context_lens: Tensor, stopped: Tensor) -> Tensor:
    return context_lens + ~stopped + 0 * context_lens.sum().item()


def by_size(context_lens: Tensor, stopped: Tensor) -> Tensor:
    return context_lens + ~stopped if len(context_lens) == 3 else torch.add(context_lens, ~stopped)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda lens, stopped: lens + ~stopped, "right"),
        (lambda lens, stopped: torch.where(stopped, lens, lens + 1), "right"),
        (loop, "the graph breaks in line"),
        (asking, "`return context_lens + ~stopped + 0 * context_lens.sum().item()"),
        (by_size, "3, 2 and 1 rows make 3 graphs"),
        (lambda lens, stopped: lens + 1, "stopped [True, True, False]: [5, 6, 3], wanted [4, 5, 3]"),
        (lambda lens, stopped: (lens + ~stopped).float(), "torch.float32 [3]; wanted torch.int64 [3]"),
        (lambda lens, stopped: None, "a tensor was wanted"),
    ],
)
def test_the_checker_of_a_grown_row_says_what_is_off(answer: Callable[[Tensor, Tensor], Tensor], told: str) -> None:
    assert told in check_grown(answer)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda shapes: len({(rows == 1, context == 1) for rows, context in shapes}), "right for 4 lists"),
        (lambda shapes: len(set(shapes)), "3, counted 1. That is a graph for each shape"),
        (lambda shapes: 1, "1, counted 2. A size of 1 has a graph of its own"),
        (lambda shapes: len({rows == 1 for rows, _ in shapes}), "2, counted 4. The context can be 1 as well"),
        (lambda shapes: 2, "2, counted 1. Ask of each shape"),
        (lambda shapes: 1.0, "a whole number was wanted"),
    ],
)
def test_the_checker_of_shapes_says_what_is_off(answer: Callable[[Shapes], int], told: str) -> None:
    assert told in check_graphs(answer)


def test_the_mean_step_is_the_mean() -> None:
    step = bench.MeanStep(rows=2, block=8)
    step.pool[8:11], step.pool[16:19] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    _, slots, lens, window = step.args(2, 4)
    tokens = torch.tensor([4.0, 40.0])
    assert step.forward(tokens, slots, lens, window).tolist() == [2.5, 25.0]
    assert step.by_int(tokens, slots, step.table, 4).tolist() == [2.5, 25.0]
    assert step.forward(tokens, slots, torch.tensor([4, 2]), window).tolist() == [2.5, 15.0], "behind its end masked"


def test_the_graphs_that_growing_contexts_make() -> None:
    frame = bench.graphs_made(steps=12)
    last = frame.groupby("way").last()
    limit = torch._dynamo.config.recompile_limit
    assert (last.graphs["fixed sizes"], last.step["fixed sizes"]) == (limit, limit + 1)
    assert last.refused.to_dict() == {"fixed sizes": True, "a Python int": False, "dynamic sizes": False}
    assert (last.graphs["a Python int"], last.graphs["dynamic sizes"]) == (2, 1)
    assert last.step["dynamic sizes"] == 12
    recorded = read_csv(DATA / "graphs.csv")
    assert recorded.groupby("way").graphs.max().to_dict() == last.graphs.to_dict()
    assert recorded.step.max() > limit + 1


def test_what_is_compiled_is_what_is_timed_beside_it() -> None:
    model = tiny_model()
    forward = bench.decode_forward(model, rows=3, context=5)
    args = bench.step_args(3, 5, model.device)
    assert args[4].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    assert (args[2].tolist(), args[3].tolist(), args[1].tolist()) == ([5, 10, 15], [5, 5, 5], [[4]] * 3)
    with torch.inference_mode():
        assert torch.equal(CompiledDecode(forward, eager_compiler)(*args), forward(*args))


def test_the_bench_counts_and_times() -> None:
    frame = bench.measure(tiny_model(), "tiny", rows=[2, 3, 1], context=4, repeats=3, compiler=eager_compiler)
    assert frame.rows.tolist() == [2, 3, 1]
    assert frame.graphs.tolist() == [1, 1, 2]
    assert frame.compile_s[0] > 10 * frame.compile_s[1], "a graph is there already for three rows"
    assert (frame.eager_ms_low <= frame.eager_ms).all()
    assert (frame.compiled_ms <= frame.compiled_ms_high).all()
    assert frame.speedup.tolist() == (frame.eager_ms / frame.compiled_ms).tolist()


def test_options_are_refused_by_name(tmp_path: Path) -> None:
    for options, told in (
        ({"rows": "0"}, "--rows"),
        ({"context": 1}, "--context: wanted 2 to 2048, got 1"),
        ({"repeats": 1}, "--repeats"),
    ):
        with pytest.raises(BenchRefused, match=told):
            bench.run(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_recorded_steps_name_two_models() -> None:
    frame = read_csv(DATA / "compile.csv")
    assert set(PROVENANCE) <= set(frame.columns)
    for _, one in frame.groupby("model"):
        assert one.rows.tolist() == [1, 8, 32]
        assert one.graphs.tolist() == [1, 2, 2]
    assert frame.model.nunique() == 2


def test_the_figure_of_graphs_says_who_was_refused() -> None:
    picture = graphs_against_steps(graphs())
    assert "fixed sizes: ends with a cross in step 9, 8 graphs, refused" in picture.alt
    assert "dynamic sizes: runs to step 24, 1 graph" in picture.alt
    with pytest.raises(FigureError, match="wanted the ways fixed sizes, a Python int, dynamic sizes, saw other"):
        graphs_against_steps(graphs(way="other"))
    with pytest.raises(FigureError, match="fixed sizes: graphs become fewer"):
        graphs_against_steps(graphs(graphs=-graphs().graphs))


def test_the_figure_of_the_compiled_step() -> None:
    picture = compiled_step(compiled())
    assert "random, 8 layers: 1 row: 4 ms eager, 2 ms compiled; 8 rows: 32 ms eager, 16 ms compiled" in picture.alt
    assert "2 graphs, compiled in 6 s" in picture.alt
    assert [text.get_text() for text in picture.axes[1].texts] == ["2.00x"] * 3
    with pytest.raises(FigureError, match="a time must be positive"):
        compiled_step(compiled(compiled_ms=0.0))
    with pytest.raises(FigureError, match="wanted one or two models"):
        compiled_step(compiled(model=list("aabbcc")))
    with pytest.raises(FigureError, match="one number of rows twice"):
        compiled_step(compiled(rows=1))
