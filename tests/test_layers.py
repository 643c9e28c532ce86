"""The import direction of the package and the size of its modules, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanoserve_lab"
MODULE_LINES, TEST_LINES = 400, 450

DAYS = ("compiled", "plan", "slots", "buckets", "inputs", "captured", "warmup")
GROUND = ("unsound", "device", "folders")

#: Room -> the rooms it may import, itself aside. A day sees earlier days only; the engine sees all of them.
ALLOWED: dict[str, frozenset[str]] = {
    "unsound": frozenset(),
    "device": frozenset(),
    "folders": frozenset(),
    "recorders": frozenset({"unsound"}),
    "kernels": frozenset({"folders"}),
    "model": frozenset({*GROUND, "kernels"}),
    "cache": frozenset({*GROUND, "model"}),
    **{day: frozenset({"unsound", "recorders", *DAYS[:index]}) for index, day in enumerate(DAYS)},
}
_STEP = frozenset({*GROUND, "recorders", "kernels", "cache", "model", *DAYS})
ALLOWED |= {
    "instruments": frozenset({*GROUND, "recorders"}),
    "lint": frozenset({*GROUND, "recorders", *DAYS}),
    "engine": _STEP,
    "faults": _STEP | {"lint", "engine"},
    "server": _STEP | {"engine"},
}
_BELOW = _STEP | {"instruments", "engine", "server", "lint", "faults"}
ALLOWED |= {
    "__init__": _BELOW,
    "bench": _BELOW | {"__init__"},
    "figures": _BELOW | {"__init__", "bench"},
    "ledger": _BELOW | {"__init__"},
    "exercises": _BELOW | {"__init__", "bench", "ledger"},
    "widgets": _BELOW | {"__init__", "bench", "figures"},
    "doctor": _BELOW | {"__init__"},
    "post": frozenset({"bench"}),
    "terminal": frozenset({"__init__", "model"}),
    "cli": _BELOW | {"__init__", "bench", "figures", "widgets", "doctor", "post", "terminal"},
    "__main__": frozenset({"cli"}),
}


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a dotted name below the package: ``cache`` of ``("cache", "pool")``, ``__init__`` of ``()``."""
    return parts[0] if parts else "__init__"


def imported_rooms(source: str, module: tuple[str, ...], rooms: set[str]) -> list[tuple[int, str]]:
    """Line and room of every import of the package in ``source``, wherever it stands (functions, TYPE_CHECKING)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["nanoserve_lab", *module[: len(module) - node.level]] if node.level else []
            base += [node.module] if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "nanoserve_lab":
                # `from nanoserve_lab import Engine` asks the package itself, `... import device` that room.
                found.append((node.lineno, room_of(tuple(parts)) if parts and parts[0] in rooms else "__init__"))
    return found


def layer_problems(sources: dict[str, str]) -> list[str]:
    """What is wrong with the imports of ``sources``: path below the package -> source text."""
    rooms = {Path(path).parts[0].removesuffix(".py") for path in sources} | set(ALLOWED)
    problems = []
    for path, source in sorted(sources.items()):
        parts = Path(path).with_suffix("").parts
        room = room_of(parts)
        if room not in ALLOWED:
            problems.append(f"{path}: no room for {room!r} in the table of tests/test_layers.py")
            continue
        module = parts[:-1] + (() if parts[-1] == "__init__" else parts[-1:])
        level_base = (*module, "") if parts[-1] == "__init__" else module
        for line, target in imported_rooms(source, level_base, rooms):
            if target != room and target not in ALLOWED[room]:
                problems.append(f"{path}:{line}: {room} imports {target}")
    return problems


def package_sources() -> dict[str, str]:
    paths = PACKAGE.rglob("*.py")
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_imports_go_one_way() -> None:
    assert layer_problems(package_sources()) == []


def test_the_table_has_no_cycle() -> None:
    settled: set[str] = set()
    while len(settled) < len(ALLOWED):
        ready = {room for room, below in ALLOWED.items() if room not in settled and below <= settled}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - settled)}"
        settled |= ready


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("plan.py", "from nanoserve_lab.inputs import InputBuffer", "plan.py:1: plan imports inputs"),
        ("plan.py", "from nanoserve_lab import inputs", "plan.py:1: plan imports inputs"),
        ("plan.py", "from .inputs import InputBuffer", "plan.py:1: plan imports inputs"),
        ("plan.py", "from . import inputs", "plan.py:1: plan imports inputs"),
        ("cache/pool.py", "from ..plan import DecodePlan", "cache/pool.py:1: cache imports plan"),
        ("cache/__init__.py", "from ..plan import DecodePlan", "cache/__init__.py:1: cache imports plan"),
        ("model/rope.py", "def late():\n    import nanoserve_lab.cache.pool", "model/rope.py:2: model imports cache"),
        ("slots.py", "from nanoserve_lab import Engine", "slots.py:1: slots imports __init__"),
        ("engine/engine.py", "import nanoserve_lab.cli", "engine/engine.py:1: engine imports cli"),
        ("engine/engine.py", "from nanoserve_lab.figures import export", "engine/engine.py:1: engine imports figures"),
        ("bench/step.py", "from ..figures.style import style", "bench/step.py:1: bench imports figures"),
        ("attic.py", "import torch", "attic.py: no room for 'attic' in the table of tests/test_layers.py"),
    ],
)
def test_a_wrong_import_is_caught(path: str, source: str, problem: str) -> None:
    assert layer_problems({path: source}) == [problem]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("inputs.py", "from nanoserve_lab.plan import DecodePlan\nfrom .unsound import Unsound\nimport torch"),
        ("cache/pool.py", "from .paged import PagedCache\nfrom nanoserve_lab.device import describe_device"),
        ("cache/__init__.py", "from .pool import Pool"),
        ("model/__init__.py", "from . import fetch\nfrom ..device import describe_device"),
        ("cache/attention.py", "from ..model.config import ModelConfig"),
        ("__init__.py", "from .engine.engine import Engine\nfrom .model import load_model"),
        ("bench/step.py", "from nanoserve_lab import Engine, load_model"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert layer_problems({path: source}) == []


def size_problems(lines: dict[str, int]) -> list[str]:
    """The files of ``lines`` (path below the repository -> line count) that are longer than their kind may be."""
    limits = {path: TEST_LINES if path.startswith("tests/") else MODULE_LINES for path in lines}
    return [f"{path}: {count} lines, at most {limits[path]}" for path, count in lines.items() if count > limits[path]]


def test_no_module_is_too_long() -> None:
    paths = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert len(lines) > 10
    assert size_problems(lines) == []


def test_a_long_module_is_caught() -> None:
    lines = {"nanoserve_lab/plan.py": 401, "nanoserve_lab/slots.py": 400, "tests/test_plan.py": 450, "tests/x.py": 451}
    assert size_problems(lines) == [
        "nanoserve_lab/plan.py: 401 lines, at most 400",
        "tests/x.py: 451 lines, at most 450",
    ]
