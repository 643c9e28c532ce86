"""What machine this is: its description, its free memory, and how fast it reads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated on ``device``; on the host, within the container's limit if there is one."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _cgroup_headroom())


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under the control group's limit (v2); a very large number where there is none."""
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no control groups, or "max"
        return 2**63


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``values`` on ``device`` that the host does not wait for.

    On the CPU too it is a copy: a step's tensors never share storage with the tables that the next step changes.
    """
    kind = device.type
    if kind == "cuda":
        # From pageable memory the copy would first wait for everything that is queued on the device.
        return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
    # NumPy copies a few cells in a third of the time that a tensor takes to be cloned.
    copy = torch.from_numpy(values.copy())
    return copy if kind == "cpu" else copy.to(device)


def read_bandwidth(device: torch.device | str, megabytes: int = 256, repeats: int = 7) -> float:
    """Bytes per second that ``device`` reads in the sum of a large tensor, the median of ``repeats`` runs.

    A decode step of one row reads every weight once and computes next to nothing with it: no step can be faster than
    this speed allows.
    """
    device = torch.device(device)
    numbers = torch.ones(megabytes * 2**20 // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        numbers.sum()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return numbers.nbytes / statistics.median(times[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine_name() -> str:
    """The host in words: processor, cores this process may use, memory. Holds no host name and no path.

    Example: ``"AMD EPYC, 2 cores, 24 GB"``. Memory is the machine's, in units of 2**30 bytes, rounded.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = round(psutil.virtual_memory().total / 2**30)
    return f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'}, {memory} GB"


def _processor() -> str:
    name = ""
    try:
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        else:
            found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
            name = found.group(1) if found else ""
    except (OSError, subprocess.SubprocessError):
        pass  # the architecture, below, is always known
    name = re.sub(r"\((R|TM|C)\)|\bCPU\b|\bProcessor\b|\b\d+-Core\b|@.*|\b(with|w/)\s.*", " ", name, flags=re.I)
    return " ".join(name.replace("/", " ").replace(",", " ").split()) or platform.machine() or "unknown processor"


def describe_device(device: torch.device | str | None = None) -> str:
    """One line on the machine that a notebook or a bench runs on: device, versions of torch and triton."""
    device = default_device() if device is None else torch.device(device)
    name = device.type if device.type != "cuda" else f"cuda ({torch.cuda.get_device_name(device)})"
    triton = triton_version() or "not installed"
    return f"{name}; {machine_name()}; {torch.get_num_threads()} threads; torch {torch.__version__}; triton {triton}"


def triton_version() -> str | None:
    """The version of triton, or None where it is not installed (it has Linux wheels only)."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
