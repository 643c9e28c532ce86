"""The doctor where everything is there, and where what it looks for is really hidden from the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoserve_lab import doctor

HIDING = """
import json, sys
from dataclasses import asdict

hidden = set(sys.argv[1].split(","))

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
from nanoserve_lab.doctor import checks
print(json.dumps([asdict(check) for check in checks()]))
"""


def look(hidden: str, **environment: str) -> dict[str, dict[str, Any]]:
    """The checks by name, of a process that cannot import ``hidden``."""
    done = subprocess.run(
        [sys.executable, "-c", HIDING, hidden],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return {check["name"]: check for check in json.loads(done.stdout)}


def status(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: check["status"] for name, check in checks.items()}


def test_nothing_is_missing_where_the_tests_run(default_model_folder: Path) -> None:
    command = [sys.executable, "-m", "nanoserve_lab", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert len(checks) == 17
    assert "missing" not in status(checks).values()
    assert done.returncode == 0
    assert str(default_model_folder) in checks["default model"]["found"]
    if sys.platform == "linux":
        assert "interpreter runs without a GPU" in checks["triton"]["found"]


def test_without_triton(default_model_folder: Path) -> None:
    checks = look("triton")
    assert (checks["triton"]["status"], checks["triton"]["found"]) == ("warn", "not installed")
    assert "missing" not in status(checks).values()


def test_without_anything(tmp_path: Path) -> None:
    packages = "torch,triton,jupyterlab,ipywidgets,transformers,huggingface_hub,matplotlib,psutil,platformdirs"
    checks = look(packages, PATH=str(tmp_path), CXX="", NANOSERVE_LAB_CACHE=str(tmp_path / "cache"))
    assert len(checks) == 17
    assert [name for name, found in status(checks).items() if found == "missing"] == [
        "torch",
        "jupyterlab",
        "ipywidgets",
        "fonts",
    ]
    warned = ("triton", "C++ compiler", "transformers", "huggingface_hub", "default model", "free memory")
    assert {checks[name]["status"] for name in warned} == {"warn"}
    assert all(check["hint"] for check in checks.values() if check["status"] != "ok")
    assert checks["torch"]["found"] == "not installed"
    assert checks["C++ compiler"]["found"] == "none"
    assert (checks["GPU"]["status"], checks["GPU"]["found"]) == ("ok", "none")
    assert not (tmp_path / "cache").exists()


def test_the_command_fails_where_a_needed_part_is_missing() -> None:
    script = HIDING.partition("from nanoserve_lab")[0] + "from nanoserve_lab.cli import app\napp(['doctor'])"
    done = subprocess.run([sys.executable, "-c", script, "torch,triton"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "missing" in done.stdout


def test_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_LAB_CACHE", str(tmp_path / "deep" / "cache"))
    check = doctor.check_model()
    assert (check.status, check.hint) == ("warn", "nanoserve-lab model fetch")
    assert doctor.check_disk().found.endswith(str(tmp_path))


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("2.10.1", "warn"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "warn"), ("3.0.0a0+git", "warn")],
)
def test_torch_outside_its_range(version: str, wanted: str) -> None:
    assert doctor.check_torch(version, "").status == wanted


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CXX", raising=False)
    check = doctor.check_compiler()
    assert (check.status, check.found) == ("warn", f"{compiler} fails: broken")


def test_a_check_that_breaks_says_so() -> None:
    def breaks() -> doctor.Check:
        raise OSError("library not loaded")

    check = doctor._survive("fonts", breaks)
    assert (check.name, check.status) == ("fonts", "warn")
    assert check.found == "could not be read: OSError: library not loaded"
