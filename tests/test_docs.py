"""The pages of docs/: what they name exists, their code runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import notebook_rules as rules
import pytest

from nanoserve_lab import EngineConfig, cli
from nanoserve_lab.engine.config import EngineStats

ROOT = Path(__file__).resolve().parents[1]
DAYS = ("compiled", "plan", "slots", "buckets", "inputs", "captured")
PAGES = sorted((ROOT / "docs").glob("*.md"))
SYMPTOMS = (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", SYMPTOMS, re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")

pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def unknown_names(text: str) -> list[str]:
    """What ``text`` names in code and this package does not have: gates, benches, switches and counts, files."""
    code = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    problems = []
    for piece in code:
        for module, name in re.findall(rf"(?<![\w/])({'|'.join(DAYS)})\.(\w+)", piece):
            if not hasattr(importlib.import_module(f"nanoserve_lab.{module}"), name):
                problems.append(f"{module}.{name}")
        problems += [f"bench {name}" for name in re.findall(r"bench (\w+)", piece) if name not in cli.BENCHES]
        counts = {field.name for field in fields(EngineStats)}
        problems += [f"stats {name}" for name in re.findall(r"stats(?:\(\))?\.(\w+)", piece) if name not in counts]
        switches = {field.name for field in fields(EngineConfig)}
        given = [*re.findall(r"EngineConfig\.(\w+)", piece), *_keywords(piece)]
        problems += [f"EngineConfig {name}" for name in given if name not in switches]
        files = re.findall(r"^nanoserve_lab/[\w/.]+", piece)
        problems += [name for name in files if not (ROOT / name).exists()]
    return problems


def _keywords(piece: str) -> list[str]:
    called = re.search(r"EngineConfig\(.*?\)", piece)
    if called is None:
        return []
    call = ast.parse(called.group(), mode="eval").body
    assert isinstance(call, ast.Call)
    return [keyword.arg for keyword in call.keywords if keyword.arg]


@pages
def test_what_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert unknown_names(text) == []
    assert rules.dead_links(text, path.parent) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`slots.check_rows`", "slots.check_rows"),
        ("`nanoserve-lab bench pools`", "bench pools"),
        ("`engine.stats().graphs_made`", "stats graphs_made"),
        ("`EngineConfig.bucket`", "EngineConfig bucket"),
        ("`EngineConfig(capture=True)`", "EngineConfig capture"),
        ("`nanoserve_lab/slot.py`", "nanoserve_lab/slot.py"),
    ],
)
def test_a_name_that_is_gone_is_found(text: str, problem: str) -> None:
    assert unknown_names(text) == [problem]


def test_every_symptom_has_its_gate_its_lesson_and_what_to_run() -> None:
    assert len(ENTRIES) >= 20
    for title, body in ENTRIES:
        labels = [re.sub("s$", "", label) for label in re.findall(r"^- (\w+):", body, re.MULTILINE)]
        assert labels == ["Gate", "Lesson", "Run"], title
        assert re.search(r"\(\.\./notebooks/\d\d_\w+\.ipynb\)", body), title
    listed = re.findall(r"\]\((#[\w-]+)\)", SYMPTOMS.partition("## First")[0])
    assert len(listed) == len(set(listed)) == len(ENTRIES), "each symptom is in the list at the top, once"


def test_every_gate_of_the_readme_has_a_symptom() -> None:
    gates = set(re.findall(r"check_\w+", "".join(line for line in README.splitlines() if line.startswith("| `"))))
    by_hand = {"check_inputs_fit", "check_one_set_covers", "check_capture_preconditions"}  # sizes; the gates in order
    assert gates - by_hand == set(re.findall(r"check_\w+", SYMPTOMS))


def test_the_first_steps_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SYMPTOMS, re.DOTALL)
    exec(compile(code, "symptoms", "exec"), {})
    recorded, failed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"recorded [1-9]\d* replayed [1-9]\d* eager, by reason \{\}", recorded)
    assert failed == "not recorded, and why {}"


def test_the_field_map_says_where_each_project_was_read() -> None:
    text = (ROOT / "docs" / "field-map.md").read_text(encoding="utf-8")
    body, _, sources = text.partition("## Sources")
    projects = {"vLLM", "SGLang", "TensorRT-LLM", "nano-vllm", "PyTorch"}
    assert projects <= set(re.findall(r"^- \*\*(.+?)\*\*: ", body, re.MULTILINE))
    for project in projects:
        assert re.search(rf"^\| {project}.*(\d\.\d|commit)", sources, re.MULTILINE), project
    sections = re.findall(r"^## (.+)$", body, re.MULTILINE)
    assert len(sections) == len(re.findall(r"\]\(#", body.partition("## ")[0])) - 1, "each is in the list at the top"
