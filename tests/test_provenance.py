"""Recorded CSVs: where the numbers come from is in every row, and the same frame gives the same bytes."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from nanoserve_lab import device as module
from nanoserve_lab.bench import provenance as provenance_module
from nanoserve_lab.bench.provenance import (
    PROVENANCE,
    ProvenanceMissing,
    provenance,
    provenance_line,
    read_csv,
    with_provenance,
    write_csv,
    write_files,
)

MEASURED = pd.DataFrame(
    {
        "step": [0, 1, 2],
        "token": ["None", 'a "b",\n c', "\r"],
        "seconds": [0.1 + 0.2, float("nan"), 1e-300],
        "kept": [True, False, True],
    }
)
RECORDED = {
    "machine": "AMD EPYC, 2 cores, 24 GB",
    "device": "cpu",
    "torch": "2.13.0+cpu",
    "triton": "3.7.1",
    "commit": "12e4567",
    "command": "nanoserve-lab bench step",
    "date": "2026-11-29",
}


def test_machine_name_is_a_description() -> None:
    name = module.machine_name()
    assert re.fullmatch(r"[^,/]+, \d+ cores?, \d+ GB", name), name
    assert platform.node().lower() not in name.lower().split()


@pytest.mark.parametrize(
    ("cpuinfo", "wanted"),
    [
        ("model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz\n", "Intel Xeon Platinum 8481C"),
        ("model name\t: AMD Ryzen 7 7840U w/ Radeon 780M Graphics\n", "AMD Ryzen 7 7840U"),
        ("model name\t: AMD EPYC 9654 96-Core Processor\n", "AMD EPYC 9654"),
        ("processor\t: 0\n", platform.machine()),
    ],
)
def test_processor_names_are_plain(cpuinfo: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.Path, "read_text", lambda *_, **__: cpuinfo)
    assert module._processor() == wanted


def test_provenance_columns() -> None:
    row = provenance("cpu", "nanoserve-lab bench step")
    assert tuple(row) == PROVENANCE
    assert row["device"] == "cpu"
    assert row["command"] == "nanoserve-lab bench step"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    assert re.fullmatch(r"unknown|[0-9a-f]{7,}(\+dirty)?", row["commit"])


def test_commit_says_dirty_and_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance_module, "repository_root", lambda: tmp_path)
    assert provenance_module._commit() == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert provenance_module._commit() == "unknown"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    clean = provenance_module._commit()
    assert re.fullmatch(r"[0-9a-f]{9,}", clean)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "just-recorded.csv").write_text("")
    assert provenance_module._commit() == clean
    (tmp_path / "new").write_text("")
    assert provenance_module._commit() == clean + "+dirty"
    monkeypatch.setattr(provenance_module, "repository_root", lambda: None)
    assert provenance_module._commit() == "unknown"


def test_a_frame_comes_back_as_it_was_written(tmp_path: Path) -> None:
    frame = MEASURED.assign(**RECORDED)
    path = write_csv(frame, tmp_path / "deep" / "a.csv")
    again = read_csv(path)
    pd.testing.assert_frame_equal(again, frame)
    assert write_csv(again, tmp_path / "b.csv").read_bytes() == path.read_bytes()


def test_recorded_provenance_is_kept_and_missing_is_added(tmp_path: Path) -> None:
    kept = with_provenance(MEASURED.assign(**RECORDED), command="another")
    assert set(kept["command"]) == {"nanoserve-lab bench step"}
    added = read_csv(write_csv(MEASURED, tmp_path / "a.csv", "cpu", "here"))
    assert list(added.columns) == [*MEASURED.columns, *PROVENANCE]
    assert set(added["command"]) == {"here"}


def test_a_csv_without_provenance_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("steps,machine\n1,x\n")
    with pytest.raises(ProvenanceMissing, match=r"bare\.csv: no provenance column device, torch, .*date"):
        read_csv(path)
    path.write_text("")
    with pytest.raises(ProvenanceMissing, match=r"bare\.csv: an empty file"):
        read_csv(path)
    path.write_text(",".join(["steps", *PROVENANCE]) + "\n1,m,,t,t,c,c,d\n")
    with pytest.raises(ProvenanceMissing, match=r"bare\.csv: provenance column device has an empty value"):
        read_csv(path)
    with pytest.raises(ProvenanceMissing, match=r"none\.csv: no rows"):
        write_csv(MEASURED.head(0), tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()


def test_the_line_for_a_corner() -> None:
    cpu = pd.DataFrame([{"x": 1, **RECORDED}])
    assert provenance_line(cpu) == "AMD EPYC, 2 cores, 24 GB · torch 2.13.0 · 2026-11-29"
    gpu = cpu.assign(device="NVIDIA H200", torch="2.11.0")
    both = pd.concat([cpu, cpu.assign(commit="other"), gpu])
    assert provenance_line(both) == (
        "AMD EPYC, 2 cores, 24 GB · torch 2.13.0 · 2026-11-29; "
        "NVIDIA H200 · AMD EPYC, 2 cores, 24 GB · torch 2.11.0 · 2026-11-29"
    )


def test_a_failed_write_leaves_the_old_files(tmp_path: Path) -> None:
    old = tmp_path / "a"
    old.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_files([(old, b"new"), (tmp_path / "b", "text")])  # type: ignore[list-item]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old"}
    write_files([(old, b"new")])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"new"}
