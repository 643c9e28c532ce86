"""What this machine has for the course and what it lacks. Nothing that is looked for needs to be there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

#: Python and torch releases the package is made for: from the first on, before the second.
PYTHON_FROM = (3, 11)
TORCH_RANGE = ((2, 11), (2, 14))

REINSTALL = "pip install -e '.[lab]'"
NVIDIA_DRIVER_FILE = Path("/proc/driver/nvidia/version")
FREE_MEMORY_GB = 2.0
FREE_DISK_GB = 1.0

#: Run as a file of its own: Triton reads a kernel's source from its file, and the interpreter is chosen before import.
INTERPRETER_PROBE = """
import torch, triton
import triton.language as tl

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

x = torch.arange(3.0)
double[(1,)](x, 3, BLOCK=4)
assert x.tolist() == [0.0, 2.0, 4.0], x
"""

Status = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Check:
    """One part of the machine: what was ``found``, and in ``hint`` the command that brings it, or what it is for.

    ``missing``: the README's commands fail without it. ``warn``: only a part of the course needs it.
    """

    name: str
    found: str
    status: Status = "ok"
    hint: str = ""


def checks() -> list[Check]:
    """All checks in reading order. No check raises; one that breaks says so in its own line."""
    torch, torch_error = _import("torch")
    torch_version = str(torch.__version__) if torch else None
    plan: list[tuple[str, Callable[[], Check]]] = [
        ("Python", check_python),
        ("torch", lambda: check_torch(torch_version, torch_error)),
        ("triton", check_triton),
        ("GPU", lambda: check_gpu(torch)),
        ("CUDA runtime", lambda: check_cuda_runtime(torch)),
        ("NVIDIA kernel driver", check_kernel_driver),
        ("C++ compiler", check_compiler),
        ("numba", lambda: check_package("numba", "warn", "fast decoding on a CPU: pip install numba")),
        ("jupyterlab", lambda: check_package("jupyterlab", "missing", REINSTALL)),
        ("ipywidgets", lambda: check_package("ipywidgets", "missing", REINSTALL)),
        ("transformers", lambda: check_package("transformers", "warn", "tests only: pip install -e '.[test]'")),
        (
            "huggingface_hub",
            lambda: check_package("huggingface_hub", "warn", "models by hub id only: pip install -e '.[hub]'"),
        ),
        ("fonts", check_fonts),
        ("default model", check_model),
        ("free memory", check_memory),
        ("CPU", check_cpu),
        ("free disk space", check_disk),
    ]
    return [_survive(name, check) for name, check in plan]


def _survive(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(name, f"could not be read: {_one_line(error)}", "warn", REINSTALL)


def check_python() -> Check:
    """The running Python against `PYTHON_FROM`."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= PYTHON_FROM:
        return Check("Python", found)
    wanted = ".".join(map(str, PYTHON_FROM))
    return Check("Python", found, "missing", f"wanted {wanted} or later: conda env create -f environment.yml")


def check_torch(version: str | None, error: str) -> Check:
    """The version of the imported torch (None where the import failed with ``error``) against `TORCH_RANGE`."""
    if version is None:
        return Check("torch", error, "missing", "pip install -e .")
    low, high = TORCH_RANGE
    if low <= release(version) < high:
        return Check("torch", version)
    return Check("torch", version, "warn", f"pip install 'torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}'")


def check_triton() -> Check:
    """Triton, and whether its interpreter runs a kernel here without a GPU (a process of its own, some seconds)."""
    triton, error = _import("triton")
    if triton is None:
        hint = "pip install -e ." if sys.platform == "linux" else "for Linux only; lesson 09 shows its recorded results"
        return Check("triton", error, "warn", hint)
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.py"
        probe.write_text(INTERPRETER_PROBE, encoding="utf-8")
        environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": folder}
        code, _, stderr = _run([sys.executable, str(probe)], environment)
    if code == 0:
        return Check("triton", f"{triton.__version__}, interpreter runs without a GPU")
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    found = f"{triton.__version__}, interpreter fails: {last}"
    return Check("triton", found, "warn", "pip install -c constraints.txt -e .")


def check_gpu(torch: Any) -> Check:
    """Every CUDA device that torch sees. None is fine, unless the driver is there and torch cannot use it."""
    if torch is not None and torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        lines = [
            f"{device.name}, compute capability {device.major}.{device.minor}, {gigabytes(device.total_memory)}"
            for device in devices
        ]
        return Check("GPU", "; ".join([*lines, f"driver {_driver_version() or 'unknown'}"]))
    if NVIDIA_DRIVER_FILE.exists():
        hint = "the driver is loaded, torch does not use it: pip install --force-reinstall a CUDA build of torch"
        return Check("GPU", "none that torch can use", "warn", hint)
    return Check("GPU", "none", "ok", "not needed: every lesson runs on the CPU")


def check_cuda_runtime(torch: Any) -> Check:
    """The CUDA release that torch was built with."""
    built = getattr(getattr(torch, "version", None), "cuda", None)
    if built:
        return Check("CUDA runtime", f"{built} (in torch)")
    return Check("CUDA runtime", "none in torch", "ok", "only with a GPU")


def check_kernel_driver() -> Check:
    """NVIDIA's kernel module, as Linux reports it."""
    if NVIDIA_DRIVER_FILE.exists():
        return Check("NVIDIA kernel driver", NVIDIA_DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0])
    return Check("NVIDIA kernel driver", "none", "ok", "only with a GPU")


def check_compiler() -> Check:
    """The C++ compiler that torch.compile's inductor would call: ``CXX``, else g++, clang++ or c++."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    compiler = next((path for path in map(shutil.which, filter(None, wanted)) if path), None)
    if compiler is None:
        hint = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++"
        return Check("C++ compiler", "none", "warn", f"only torch.compile needs it: {hint}")
    code, stdout, stderr = _run([compiler, "--version"])
    if code or not stdout:
        return Check("C++ compiler", f"{compiler} fails: {stderr.strip()[:80]}", "warn", "only torch.compile needs it")
    return Check("C++ compiler", f"{compiler}: {stdout.splitlines()[0]}")


def check_package(name: str, absent: Status, hint: str) -> Check:
    """The version of an installed package; ``absent`` is the status where it cannot be imported."""
    try:
        there = find_spec(name) is not None
        return Check(name, version(name)) if there else Check(name, "not installed", absent, hint)
    except (ImportError, PackageNotFoundError):
        return Check(name, "not installed", absent, hint)


def check_fonts() -> Check:
    """DejaVu Sans, which the figures are set in, where matplotlib finds it."""
    manager, error = _import("matplotlib.font_manager")
    if manager is None:
        return Check("fonts", f"matplotlib: {error}", "missing", "pip install -e .")
    try:
        return Check("fonts", str(manager.findfont("DejaVu Sans", fallback_to_default=False)))
    except ValueError:
        return Check("fonts", "no DejaVu Sans", "warn", "pip install --force-reinstall matplotlib")


def check_model() -> Check:
    """The default model in the cache folder, and its size on disk."""
    from nanoserve_lab.folders import cache_dir
    from nanoserve_lab.model.fetch import default_model_folder

    folder = default_model_folder()
    if folder is None:
        return Check("default model", f"not in {cache_dir()}", "warn", "nanoserve-lab model fetch")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Check("default model", f"{folder} ({gigabytes(size)})")


def check_memory() -> Check:
    """Memory that a new process can take now."""
    import psutil

    memory = psutil.virtual_memory()
    found = f"{gigabytes(memory.available)} of {gigabytes(memory.total)}"
    if memory.available >= FREE_MEMORY_GB * 1e9:
        return Check("free memory", found)
    return Check("free memory", found, "warn", f"the default model wants {FREE_MEMORY_GB:.0f} GB: close other programs")


def check_cpu() -> Check:
    """The processor's name and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("CPU", f"{_cpu_name()}, {cores} core{'s' if cores != 1 else ''}")


def check_disk() -> Check:
    """Free space on the disk of the cache folder."""
    from nanoserve_lab.folders import cache_dir

    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{gigabytes(free)} at {folder}"
    if free >= FREE_DISK_GB * 1e9:
        return Check("free disk space", found)
    hint = f"the default model wants {FREE_DISK_GB:.0f} GB: set NANOSERVE_LAB_CACHE to a folder on another disk"
    return Check("free disk space", found, "warn", hint)


def release(text: str) -> tuple[int, int]:
    """``(2, 13)`` of ``"2.13.0+cpu"``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def gigabytes(count: float) -> str:
    """``count`` bytes as decimal gigabytes."""
    return f"{count / 1e9:.1f} GB"


def _import(name: str) -> tuple[Any, str]:
    """The module, or None and why not. A package that is there may still fail to load, with any exception."""
    try:
        return import_module(name), ""
    except ModuleNotFoundError as error:
        return None, "not installed" if error.name == name else _one_line(error)
    except Exception as error:
        return None, _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _run(command: list[str], environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; a program that cannot be started or hangs counts as code 127."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", _one_line(error)
    return done.returncode, done.stdout, done.stderr


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    code, stdout, _ = _run(query)
    return stdout.split()[0] if code == 0 and stdout.split() else ""


def _cpu_name() -> str:
    if sys.platform == "darwin":
        name = _run(["sysctl", "-n", "machdep.cpu.brand_string"])[1].strip()
    else:
        source = Path("/proc/cpuinfo")
        lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
