"""The README's code runs as printed, and its table of gates is complete."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
DAYS = ("compiled", "plan", "slots", "buckets", "inputs", "captured")


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[0], "README", "exec"), {})
    told = capsys.readouterr().out
    assert "Paris" in told
    assert "100" in told


def test_the_tape_examples_run_and_refuse_as_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(BLOCKS[1], "README", "exec"), names)
    told = capsys.readouterr().out
    assert "aten.mm.default" in told
    assert re.search(r"item\(\).* at line \d+", told)
    exec(compile(BLOCKS[2], "README", "exec"), names)
    assert (tmp_path / "recording.png").stat().st_size > 10_000
    exec(compile(BLOCKS[3], "README", "exec"), names)
    small, both = map(int, capsys.readouterr().out.splitlines()[-2:])
    assert small == 2 << 20, "three small results lie in one small segment"
    assert both == (2 << 20) + 2 * (65536 * 65536 * 4)
    assert len(BLOCKS) == 4, "another block needs another test"


def test_the_figures_are_shown_in_light_and_dark() -> None:
    pictures = re.findall(r"<picture>\n(.*?)</picture>", TEXT, re.S)
    shown = [re.findall(r'(?:srcset|src)="figures/(\w+)\.(\w+)\.png"', picture) for picture in pictures]
    assert len(shown) == 2
    for dark, light in shown:
        assert (dark[1], light[1]) == ("dark", "light")
        assert dark[0] == light[0]


def test_the_lessons_that_are_there_are_linked() -> None:
    there = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
    assert re.findall(r"^\| \[`(\w+)`\]\(notebooks/\1\.ipynb\)", TEXT, re.M) == there


def test_the_table_of_gates_is_complete() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `") and "check_" in line]
    told = {}
    for row in rows:
        names, arguments, _, _, raises = (cell.strip() for cell in row.strip("|").split("|"))
        module = names.split(".")[0].lstrip("`")
        for name in re.findall(r"check_\w+", names):
            told[module, name] = (re.findall(r"\w+", arguments), raises.strip("`"))
    wanted = {}
    for day in DAYS:
        module = importlib.import_module(f"nanoserve_lab.{day}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("check_") and function.__module__ == module.__name__:
                wanted[day, name] = list(inspect.signature(function).parameters)
    assert set(told) == set(wanted)
    for key, parameters in wanted.items():
        arguments, raises = told[key]
        assert set(parameters) <= set(arguments), f"{key}: takes {parameters}"
        if raises != "theirs":
            assert hasattr(importlib.import_module(f"nanoserve_lab.{key[0]}"), raises)
