"""`bench all`, the folder of a machine, and the recordings that lessons show side by side."""

from __future__ import annotations

import inspect
import shutil
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest

from nanoserve_lab.bench import all as bench_all
from nanoserve_lab.bench.provenance import machine_folder, read_csv, recordings, write_csv
from nanoserve_lab.bench.timing import BenchFailed, BenchRefused
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.captured import pool_sharing_ratio
from nanoserve_lab.cli import BENCHES
from nanoserve_lab.device import machine_name

REPO = Path(__file__).resolve().parents[1]


def test_no_bench_is_forgotten() -> None:
    assert set(bench_all.SHORT) == set(BENCHES) - {"all"}


@pytest.mark.parametrize("bench", bench_all.SHORT)
def test_a_short_run_has_options_that_the_bench_knows_and_does_not_have_already(bench: str) -> None:
    known = inspect.signature(import_module(f"nanoserve_lab.bench.{bench}").run).parameters
    for name, value in bench_all.SHORT[bench].items():
        assert isinstance(value, type(known[name].default))
        assert value != known[name].default


def test_what_a_short_run_leaves_out_is_said() -> None:
    assert bench_all.left_out("inputs", {"rows": "3", "repeats": 2}) == "rows 3 of 3,32,256; repeats 2 of 9"
    assert bench_all.left_out("inputs", {}) == ""


def test_benches_run_apart_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {"launch": {"models": "nothing"}, "inputs": {"rows": "3", "steps": "8", "repeats": 1}}
    monkeypatch.setattr(bench_all, "SHORT", short)
    with pytest.raises(BenchFailed, match="1 of 2 benches failed: launch"):
        bench_all.run(tmp_path)
    printed = capfd.readouterr()
    assert "--models: wanted some of tiny" in printed.err
    assert "launch: failed: exit code 1" in printed.out
    assert "inputs: rows 3 of 3,32,256; steps 8 of 8,64,128,512; repeats 1 of 9" in printed.out
    frame = read_csv(tmp_path / "day-53-inputbench.csv")
    assert set(frame.command) == {"nanoserve-lab bench inputs --rows 3 --steps 8 --repeats 1"}


def test_a_bench_without_time_is_named_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_all, "SHORT", {"soak": {}, "inputs": {}})
    assert bench_all.run(tmp_path, minutes=0.01) == []
    printed = capfd.readouterr().out
    assert "soak: left out: not done when the 0 minutes were over" in printed
    assert "inputs: left out: the 0 minutes are over" in printed
    with pytest.raises(BenchRefused, match="--minutes"):
        bench_all.run(tmp_path, minutes=-1)


def test_a_full_run_has_the_defaults() -> None:
    assert bench_all.options_of("decode", full=True) == {}
    assert bench_all.options_of("decode", full=False) == bench_all.SHORT["decode"]
    words = bench_all.command_of("compile", Path("here"), {"repeats": 5})
    assert words[1:] == ["-m", "nanoserve_lab", "bench", "compile", "--out", "here", "--repeats=5"]


def test_a_machines_folder_is_named_after_it() -> None:
    folder = machine_folder("cpu")
    assert folder.parent == REPO / "data" / "machines"
    assert folder.name.replace("-", "") == "".join(c for c in machine_name().lower() if c.isascii() and c.isalnum())


def test_a_new_machines_folder_is_picked_up(tmp_path: Path) -> None:
    shutil.copytree(REPO / "data" / "log", tmp_path / "log")
    shutil.copy(REPO / "data" / "day-54-pool.csv", tmp_path)
    assert recordings("day-54-pool.csv", tmp_path).source.tolist() == ["log"] * 4 + ["recorded"] * 4
    here = read_csv(REPO / "data" / "day-54-pool.csv").assign(device="a new one")
    write_csv(here, tmp_path / "machines" / "a-new-one" / "day-54-pool.csv")
    frame = recordings("day-54-pool.csv", tmp_path)
    assert frame.columns[0] == "source"
    assert frame.source.tolist()[8:] == ["a-new-one"] * 4
    assert set(frame[frame.source == "a-new-one"].device) == {"a new one"}
    with pytest.raises(FileNotFoundError, match=r"absent\.csv: not recorded"):
        recordings("absent.csv", tmp_path)


def test_the_logs_figures_stand_as_they_were_printed() -> None:
    pool = read_csv(REPO / "data" / "log" / "day-54-pool.csv")
    for multiple, ratio in zip(pool.width_multiple, pool.ratio, strict=True):
        assert ratio == round(pool_sharing_ratio(BucketSet(256, 8192, multiple).shapes(), 32), 1)
    inputs, captured = (read_csv(REPO / "data" / "log" / f"day-5{n}bench.csv") for n in ("3-input", "4-capture"))
    assert inputs.fresh_allocations.tolist() == [24, 192, 384, 1536]
    ratios = pd.concat([inputs.buffered_plan_ms / inputs.fresh_plan_ms, captured.replayed_ms / captured.eager_ms])
    assert (ratios.min().round(2), ratios.max().round(2)) == (1.03, 1.24)
    assert (captured.reuse * 100).round().tolist() == [88, 97, 98, 98]
