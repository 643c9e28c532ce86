"""What lesson 06 leans on: its checkers, its figures, the symptoms it shows, and the ledger's row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from figure_frames import captures
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve_lab.bench.capture import pool_table
from nanoserve_lab.bench.provenance import read_csv
from nanoserve_lab.captured import CaptureUnsound
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.exercises import check_agrees, check_record
from nanoserve_lab.figures import FigureError, captured_decode_replay, captures_over_steps, data_folder
from nanoserve_lab.figures.captured import WINDOWS, Window, capture_run, sampler_inside
from nanoserve_lab.ledger import forward_tensors, ledger
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.recorders import tape_recorder

SIZES = EngineConfig(
    max_rows=4,
    max_context=32,
    block_size=4,
    optimize_cpu=False,
    bucket_decode=True,
    width_multiple=16,
    persist_inputs=True,
    capture_decode=True,
)


def running(*prompts: list[int], **switches: Any) -> Engine:
    config = replace(SIZES, **switches)
    engine = Engine.build(tiny_model(dtype=torch.float64), None, config, recorder=tape_recorder)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=9))
    engine.step()
    return engine


def cloned(replayed: Any, eager: Any, inputs: Any) -> bool:
    return all(torch.equal(replayed(values).clone(), eager(values)) for values in inputs)


def eager_first(replayed: Any, eager: Any, inputs: Any) -> bool:
    return all(torch.equal(eager(values).clone(), replayed(values)) for values in inputs)


def with_itself(replayed: Any, eager: Any, inputs: Any) -> bool:
    return all(torch.equal(replayed(values), eager(values)) for values in inputs)


def kept_late(replayed: Any, eager: Any, inputs: Any) -> bool:
    kept = [replayed(values) for values in inputs]
    wanted = [eager(values).clone() for values in inputs]
    return all(torch.equal(one, other) for one, other in zip(kept, wanted, strict=True))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (cloned, "right: one recording agrees with its step, two do not"),
        (with_itself, "a recording over a clone of the input: True, wanted False; its replays go on reading the clone"),
        (eager_first, "a replay that does nothing: True, wanted False; the output held the right answer already"),
        (kept_late, "a right recording: False, wanted True; its replays compute what the step computes. Are answers"),
        (lambda replayed, eager, inputs: None, "a right recording: None; True or False was wanted"),
        (lambda replayed, eager: True, "a right recording: TypeError"),
    ],
)
def test_the_checker_of_a_comparison_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_agrees(answer)


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result


def recorded(write_back: bool = True, in_place: bool = True) -> Callable[..., Any]:
    def record(step: Any, args: Any) -> Any:
        with torch.no_grad(), Tape() as tape:
            output = step(*args)

        def replay() -> None:
            for operation, args, kwargs, result in tape.calls:
                if not in_place and operation._schema.is_mutable:
                    continue
                again = operation(*args, **kwargs)
                if write_back and again.data_ptr() != result.data_ptr():
                    result.copy_(again)

        return replay, output

    return record


def stand_in(step: Any, args: Any) -> Any:
    output = step(*args)
    return lambda: output.copy_(step(*args)), output


def wants_arguments(step: Any, args: Any) -> Any:
    return step, step(*args)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (recorded(), "right in 2 replays"),
        (stand_in, "replay with [3, 4] in the input: the step's Python ran again"),
        (recorded(in_place=False), "the step writes [30, 40] into a tensor of its own, which holds [10, 20]"),
        (recorded(write_back=False), "an operation that writes in place has to run again, too"),
        (lambda step, args: step(*args), "was returned; wanted (replay, output)"),
        (wants_arguments, "TypeError"),
        (lambda step, args: (lambda: None, step(*args)), "which holds [10, 20]"),
    ],
)
def test_the_checker_of_a_recorder_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_record(answer)


def output_alone(step: Any, args: Any) -> Any:
    """Runs everything again, and puts the intermediates nowhere but the last."""
    made = tape_recorder(step, args)
    stale = made.output.clone()
    return made.replay, stale


def test_an_output_that_is_not_the_replays_is_told() -> None:
    assert "the output holds [11, 22], wanted [33, 44]" in check_record(output_alone)


def test_the_drawn_run_is_that_of_the_words() -> None:
    run = capture_run()
    assert run.graph.rows == (0, 1)
    assert run.graph.replays == 3
    assert set(run.first) == set(WINDOWS)
    assert (run.first["write_slots"], run.later["write_slots"]) == ([7, 11], [13, 17])
    assert (run.first["positions"], run.later["positions"]) == ([[3], [3]], [[5], [5]])
    assert (run.first["context_lens"], run.later["context_lens"]) == ([4, 4], [6, 6])
    assert run.first["input_ids"] != run.later["input_ids"]
    assert run.first["slot_mapping"] != run.later["slot_mapping"]
    assert {gate for gate, calls in run.once.items() if calls} == {"check_window_intact", "check_pad_inert"}
    assert len(run.once) == 6
    assert run.always == {"check_replay_rows": 0, "check_addresses_stable": 0}
    assert run.kept == {False: ([45, 50, 44], [1, 2, 3]), True: ([44, 44, 44], [1, 1, 1])}


def test_the_diagram_shows_the_run_and_the_bytes() -> None:
    picture = captured_decode_replay()
    (axes,) = picture.axes
    texts = [text.get_text() for text in axes.texts]
    run = capture_run()
    assert texts.count(str(run.graph.rows)) == 2
    for gate in (*run.once, *run.always):
        assert gate in texts
    assert (texts.count("address 1"), texts.count("values")) == (4, 2)
    for line in pool_table().itertuples():
        for value in (f"{line.private_bytes / 1e6:,.1f}", f"{line.ratio:.1f}"):  # type: ignore[operator]
            assert value in picture.alt
            assert any(value in text for text in texts)
    for size in (268_435_456, 16_777_216, 8_192):
        assert f"{size:,}" in texts
        assert f"{size:,}" in picture.alt


def test_the_lines_are_the_frame() -> None:
    picture = captures_over_steps(captures().sample(frac=1, random_state=0))
    counts, ratios = picture.axes
    lines = [line.get_ydata().tolist() for line in counts.lines]  # type: ignore[union-attr]
    assert lines == [[8, 64, 128], [1, 1, 2]]
    lines = [line.get_ydata() for line in ratios.lines[1:]]
    assert [[round(float(value), 3) for value in line] for line in lines] == [[0.802] * 3, [0.832] * 3, [1.056] * 3]
    assert "rises to 128 at 128 steps; with a closed set the line stays low and ends at 2" in picture.alt
    assert "2 rows 0.80 to 0.80, 32 rows 0.83 to 0.83, 256 rows 1.06 to 1.06" in picture.alt
    low, high = ratios.get_ylim()
    assert low < 0.802 < 1.056 < high


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 8}, "two lines for one number of rows and steps"),
        ({"ratio": 0.0}, "a ratio of times must be positive"),
        ({"rows": range(9)}, "at most 3 numbers of rows, saw 9"),
        ({"captures_closed": range(9)}, "captures_open and captures_closed differ between rows"),
    ],
)
def test_a_frame_that_is_no_capture_bench_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FigureError, match=message):
        captures_over_steps(captures().assign(**changes))
    with pytest.raises(FigureError, match="no column ratio"):
        captures_over_steps(captures().drop(columns="ratio"))


def test_the_recorded_run_has_the_logs_counts() -> None:
    recorded_here = read_csv(data_folder() / "day-54-capturebench.csv")
    log = read_csv(data_folder() / "log" / "day-54-capturebench.csv")
    counts = ["steps", "rows", "captures_open", "captures_closed", "replays"]
    two = recorded_here[recorded_here.rows == 2].reset_index(drop=True)
    assert two[counts].equals(log[counts])
    assert (two.reuse - log.reuse).abs().max() <= 0.005001


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_a_window_over_one_output_says_the_newest_token_many_times(lag: int) -> None:
    said = {}
    for inside in (False, True):
        engine = running()
        engine.readback = Window(lag)  # type: ignore[assignment]
        if inside:
            sampler_inside(engine)
        (said[inside],) = (c.token_ids for c in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9)))
    first, *rest = said[False]
    assert said[True] == [first, *rest[lag:], *rest[-1:] * lag]
    assert len(set(rest[-3:])) == 3, "tokens that can be told apart"


def test_a_sampler_inside_the_recording_is_refused() -> None:
    engine = running([1, 2, 3], strict=True)
    sampler_inside(engine)
    with pytest.raises(CaptureUnsound, match=r"output: tensor 0 of shape \(1,\)"):
        engine.step()


@torch.inference_mode()
def test_a_step_of_other_rows_would_answer_for_the_recorded_ones() -> None:
    """The first of three rows has ended and its place is not filled: equal shape, equal buffers, other rows."""
    engine = running([1, 2, 3], [4, 5, 6])
    engine.step()
    (graph,) = engine.decode_graphs.graphs.values()
    engine.submit([7, 8, 9], SamplingParams(max_tokens=9))
    engine.step()
    engine.cache.grow()
    whole, cut = engine.planner.plan(), slice(1, 3)
    names = ("positions", "write_slots", "context_lens", "slot_mapping", "context_snapshot", "write_snapshot")
    plan = replace(whole, rows=(1, 2), live=2, **{name: getattr(whole, name)[cut] for name in names})
    tokens = engine._input_tensor(engine._tokens, whole)[cut]
    pool, newest = engine.cache.pool.data, engine.cache.newest_slots[:3].tolist()
    start = pool.clone()

    def written() -> list[int]:
        return [row for row, slot in enumerate(newest) if not torch.equal(pool[:, :, slot], start[:, :, slot])]

    wanted = engine.forward(tokens, *plan.tensors).argmax(-1).tolist()
    assert written() == [1, 2]
    pool.copy_(start)
    graph.replay()
    said = graph.output.argmax(-1).tolist()
    assert written() == [0, 1]
    assert said[1] == wanted[0], "row 1's token in row 2's place"
    assert said != wanted
    with pytest.raises(CaptureUnsound, match=r"rows: the plan covers rows \[1, 2\]"):
        engine.decode_graphs(plan, tokens)


def test_what_a_replay_was_handed() -> None:
    engine = running([1, 2, 3], [4, 5, 6])
    first, second = forward_tensors(engine), forward_tensors(engine)
    assert set(first) == {*WINDOWS, "logits"}
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)
    assert "decode" not in vars(engine), "the engine's own method must be back"


def test_the_ledger_after_this_lesson() -> None:
    frame = ledger("06_graph_capture")
    before, after = frame.loc["05_persistent_inputs"], frame.loc["06_graph_capture"]
    assert after.moving_addresses == 0
    assert after.launches == 1 + 3, "a replay, and beside it the copy in, the sampler, the copy home"
    assert after.allocations == 1, "the sampler's tokens"
    assert after.host_syncs == 0
    assert after.bytes_moved - before.bytes_moved == 2 * (2 * 64 * 4), "logits read and written once more"
