"""What machine this is: its description, its free memory, and how fast it reads."""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path

import psutil
import torch


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


def read_bandwidth(device: torch.device | str, megabytes: int = 256, repeats: int = 7) -> float:
    """Bytes per second that ``device`` reads in a large fp32 matrix-vector product, the median of ``repeats`` runs.

    A decode step of one row is made of such products, so this is the speed that its weights can be read at.
    """
    device = torch.device(device)
    columns = 4096
    matrix = torch.ones(megabytes * 2**20 // (4 * columns), columns, device=device)
    vector = torch.ones(columns, device=device)
    times = []
    for _ in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        torch.mv(matrix, vector)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return matrix.numel() * 4 / statistics.median(times[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine_name(device: torch.device | str = "cpu") -> str:
    """Processor, cores and memory of the host, and the GPU's name where ``device`` is one."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GB"
    memory = psutil.virtual_memory().total / 2**30
    return f"{_processor()}, {torch.get_num_threads()} threads, {memory:.0f} GB"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_device(device: torch.device | str | None = None) -> str:
    """One line on the machine that a notebook or a bench runs on: device, versions of torch and triton."""
    device = default_device() if device is None else torch.device(device)
    triton = triton_version() or "not installed"
    return f"{device.type}: {machine_name(device)}; torch {torch.__version__}; triton {triton}"


def triton_version() -> str | None:
    """The version of triton, or None where it is not installed (it has Linux wheels only)."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
