"""What a recording costs and when it has paid: counts and arithmetic; no test asserts a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nanoserve_lab.bench import breakeven, launch
from nanoserve_lab.bench.provenance import read_csv
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.captured import capture_breakeven_steps
from nanoserve_lab.figures import pool_and_breakeven
from nanoserve_lab.ledger import LESSONS


def test_bench_launch_counts_launches_and_derives_the_rest(tmp_path: Path) -> None:
    [path] = launch.run(tmp_path, models="tiny", chain="3,20", repeats=1)
    frame = read_csv(path)
    assert frame.step.tolist() == ["3 additions", "20 additions", "tiny decode"]
    assert frame.launches.tolist()[:2] == [3, 20]
    assert frame.launches.tolist()[2] > 20
    for line in frame.itertuples():
        assert line.launch_us == pytest.approx(line.eager_ms * 1e3 / line.launches)
        assert line.saving_ms == pytest.approx(line.eager_ms - line.replay_ms)
        assert line.breakeven_steps == capture_breakeven_steps(line.record_ms, line.saving_ms)
    assert set(frame.command) == {"nanoserve-lab bench launch --models tiny --chain 3,20 --repeats 1"}


def test_a_step_is_run_as_often_as_it_is_timed() -> None:
    """Replays run the recorded additions, recordings and eager steps the function: the sum says how often."""
    x = torch.zeros(1)
    calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.add_(1)

    launch.costs_of(step, (x,), repeats=2)
    rounds = 3
    assert calls == 2 + rounds * (launch.INNER + 1), (
        "the trace, the recording, and each round's eager steps and recording"
    )
    assert x.item() == calls + rounds * launch.INNER


def test_every_lesson_has_a_list_and_an_open_one_never_pays() -> None:
    assert list(breakeven.WIDTH_MULTIPLES) == list(LESSONS)
    frame = breakeven.lesson_costs("03_slot_table")
    assert frame.lessons.tolist() == ["00 to 03"]
    assert frame.shapes.tolist() == [256 * 8192]
    assert frame.private_bytes.tolist() == [4 * 32 * (256 * 257 // 2) * (8192 * 8193 // 2)]
    assert frame.breakeven_steps.tolist() == [math.inf]


def test_the_bill_is_the_arithmetic_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"record_ms": 50.0, "replay_ms": 1.0, "launch_us": 30.0, "launches": 100}
    monkeypatch.setattr(breakeven, "_tiny_costs", lambda repeats: costs)
    frame = breakeven.lesson_costs("07_pool_and_breakeven")
    assert frame.lessons.tolist() == ["00 to 03", "04 to 06", "07"]
    assert frame.shapes.tolist()[1:] == [len(BucketSet(256, 8192, multiple).shapes()) for multiple in (128, 2048)]
    assert frame.saving_ms.tolist() == pytest.approx([0, 2, 2])
    assert frame.breakeven_steps.tolist() == [math.inf, 576 * 25, 36 * 25]
    assert frame.shared_bytes.nunique() == 1
    alt = pool_and_breakeven(frame).alt
    assert "lessons 00 to 03, 2,097,152 shapes: 268 MB shared, 141 TB private, never pays" in alt
    assert "lesson 07, 36 shapes: 268 MB shared, 1.34 GB private, pays after 900 steps" in alt
    costs["launch_us"] = 10.0
    assert breakeven.lesson_costs("07_pool_and_breakeven").breakeven_steps.tolist() == [math.inf] * 3


def test_an_unknown_lesson_has_no_list() -> None:
    with pytest.raises(ValueError, match="12_nothing"):
        breakeven.lesson_costs("12_nothing")
