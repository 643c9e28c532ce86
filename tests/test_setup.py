"""The set-up files: the README's commands, ``.ci/run``, the agreement of versions, linters and types."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from nanoserve_lab import doctor

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "nanoserve-lab"
COMMAND = re.compile(r"^<!-- command: (\w+) -->\n```sh\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def readme_commands() -> dict[str, str]:
    return dict(COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def test_the_readme_has_two_commands_of_one_line() -> None:
    commands = readme_commands()
    assert list(commands) == ["lab", "test"]
    assert not [command for command in commands.values() if "\n" in command or "\\" in command]
    environment = 'python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e ".[{}]" && '
    assert commands["lab"] == environment.format("lab") + ".venv/bin/nanoserve-lab lab"
    assert commands["test"] == environment.format("test") + ".venv/bin/pytest --nbval"


def run_ci(folder: Path, command: str | None) -> subprocess.CompletedProcess[str]:
    """``.ci/run`` in a tree of its own whose README holds ``command``, and which has an old .venv."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / ".venv").mkdir()
    block = f"<!-- command: test -->\n```sh\n{command}\n```\n" if command else "nothing\n"
    (folder / "README.md").write_text(f"# A\n\n```sh\nexit 9\n```\n\n{block}\n```sh\nexit 8\n```\n", encoding="utf-8")
    return subprocess.run([folder / ".ci" / "run"], cwd="/", capture_output=True, text=True, check=False, timeout=60)


def test_ci_runs_the_readme_command_in_a_tree_without_venv(tmp_path: Path) -> None:
    done = run_ci(tmp_path, 'test ! -e .venv && echo "here: $PWD"')
    assert (done.returncode, done.stderr) == (0, "")
    assert f"here: {tmp_path.resolve()}" in done.stdout
    assert re.search(r"^\d+ s in total, exit code 0$", done.stdout.splitlines()[-1])


def test_ci_ends_with_the_exit_code_of_the_tests(tmp_path: Path) -> None:
    done = run_ci(tmp_path, "true && sh -c 'exit 3'")
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1].endswith("exit code 3")


def test_ci_without_a_marked_command_refuses_and_deletes_nothing(tmp_path: Path) -> None:
    done = run_ci(tmp_path, None)
    assert done.returncode == 2
    assert "README.md has no block marked" in done.stderr
    assert (tmp_path / ".venv").exists()


def disagreements(project: dict[str, Any], constraints: list[str], environment: dict[str, Any]) -> list[str]:
    """Where pyproject.toml, the lines of constraints.txt and environment.yml contradict each other, by name."""
    problems = []
    pins: dict[str, Requirement] = {}
    for line in constraints:
        pin = Requirement(line)
        name = canonicalize_name(pin.name)
        if name in pins:
            problems.append(f"constraints.txt: {name} twice")
        if not re.fullmatch(r"==[^=,*]+", str(pin.specifier)):
            problems.append(f"constraints.txt: {name}{pin.specifier} is not one release")
        pins[name] = pin
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name == PROJECT:
            problems += [f"pyproject.toml: no extra {extra}" for extra in requirement.extras if extra not in extras]
        elif name not in pins:
            problems.append(f"constraints.txt: {name} is not pinned")
        elif not all(requirement.specifier.contains(pin.version) for pin in pins[name].specifier):
            problems.append(f"constraints.txt: {name}{pins[name].specifier} is outside {requirement.specifier}")
        elif pins[name].marker != requirement.marker:
            problems.append(f"constraints.txt: {name} for {pins[name].marker}, pyproject.toml for {requirement.marker}")
    return problems + environment_problems(project, environment)


def environment_problems(project: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    """Where environment.yml installs something else than pyproject.toml with constraints.txt."""
    problems = []
    plain = [line for line in environment["dependencies"] if isinstance(line, str)]
    python = [line.partition("=")[2] for line in plain if line.startswith("python=")]
    if not python or not SpecifierSet(project["requires-python"]).contains(python[0]):
        problems.append(f"environment.yml: python {python}, pyproject.toml wants {project['requires-python']}")
    pip = [line for entry in environment["dependencies"] if isinstance(entry, dict) for line in entry["pip"]]
    if pip[:1] != ["-c constraints.txt"]:
        problems.append("environment.yml: pip does not use -c constraints.txt")
    editable = re.fullmatch(r"-e \.\[([\w,]+)\]", pip[-1]) if pip else None
    names = [line.partition("=")[0] for line in plain]
    if not editable or len(pip) != 2 or names != ["python", "pip"]:
        problems.append(f"environment.yml: wanted python, pip and -e .[extras] alone, saw {[*plain, *pip]}")
    else:
        problems += [
            f"environment.yml: pyproject.toml has no extra {extra}"
            for extra in editable.group(1).split(",")
            if extra not in project["optional-dependencies"]
        ]
    return problems


def set_up() -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = [line for line in lines if line.strip() and not line.startswith("#")]
    return project, constraints, yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def test_the_set_up_files_agree() -> None:
    assert disagreements(*set_up()) == []


def pin(name: str, line: str | None) -> Callable[[Any, list[str], Any], None]:
    def change(_: Any, constraints: list[str], __: Any) -> None:
        (at,) = [index for index, have in enumerate(constraints) if have.startswith(f"{name}==")]
        constraints[at : at + 1] = [line] if line else []

    return change


def environment(line: int, value: Any) -> Callable[[Any, Any, dict[str, Any]], None]:
    return lambda _project, _constraints, environment: environment["dependencies"].__setitem__(line, value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (pin("numpy", None), "numpy is not pinned"),
        (pin("nbval", None), "nbval is not pinned"),
        (pin("numpy", "numpy==1.26.4"), "numpy==1.26.4 is outside >=2.0"),
        (pin("torch", "torch==2.14.0"), "torch==2.14.0 is outside"),
        (pin("numpy", "numpy>=2.1"), "numpy>=2.1 is not one release"),
        (pin("triton", "triton==3.7.1"), "triton for None"),
        (lambda _, constraints, __: constraints.append("NumPy==2.0"), "numpy twice"),
        (environment(0, "python=3.10"), "environment.yml: python ['3.10']"),
        (environment(2, {"pip": ["-e .[lab,test]"]}), "pip does not use -c constraints.txt"),
        (environment(2, {"pip": ["-c constraints.txt", "-e .[lab,docs]"]}), "pyproject.toml has no extra docs"),
        (environment(1, "numpy"), "saw ['python=3.12', 'numpy', "),
        (lambda project, *_: project.update({"requires-python": ">=3.13"}), "pyproject.toml wants >=3.13"),
        (lambda project, *_: project["optional-dependencies"].pop("lab"), "pyproject.toml: no extra lab"),
    ],
)
def test_a_disagreement_is_named(change: Callable[..., Any], problem: str) -> None:
    files = set_up()
    change(*files)
    found = disagreements(*files)
    assert any(problem in line for line in found), found


def test_the_project_does_not_pin_itself() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in set_up()[1]}
    assert PROJECT not in names
    assert len(names) > 100


def test_the_doctor_knows_the_ranges_of_pyproject() -> None:
    project, _, _ = set_up()
    (torch,) = [line for line in project["dependencies"] if line.startswith("torch")]
    (low, high) = [".".join(map(str, release)) for release in doctor.TORCH_RANGE]
    assert torch == f"torch>={low},<{high}"
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.PYTHON_FROM))


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_linters_and_types_are_clean(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
