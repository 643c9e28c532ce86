"""`bench all`: every bench of this machine, shortened to fit into some minutes or in full, each in its own process."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from nanoserve_lab.bench.provenance import machine_folder
from nanoserve_lab.bench.timing import BenchFailed, require

#: The benches in the order in which they run, and the options of the short run; the others have their defaults.
SHORT: dict[str, dict[str, Any]] = {
    "launch": {"models": "tiny,four-layer", "repeats": 3},
    "breakeven": {"repeats": 3},
    "inputs": {"rows": "3,256", "steps": "8,512", "repeats": 3},
    "capture": {"rows": "2", "steps": "8,128", "repeats": 2},
    "plan": {"rows": "32", "contexts": "128,1024,8192", "repeats": 3},
    "host": {"rows": "1,8,64", "steps": 32},
    "step": {},
    "pool": {"multiples": "2048,8192"},
    "padding": {"seconds": 120.0},
    "recompiles": {"contexts": 32},
    "decode": {"rows": "1,8", "contexts": "128", "dtypes": "float32", "steps": 8, "repeats": 2},
    "prefill": {"tokens": "128", "dtypes": "float32", "repeats": 2},
    "compile": {"rows": "1,8", "repeats": 5},
    "soak": {"seconds": 30},
}
#: Seconds in which the short run is to be done: a bench that has not begun by then is left out, and named.
BUDGET_S = 480.0


def options_of(bench: str, full: bool) -> dict[str, Any]:
    """The options with which ``bench`` runs, all that differ from its defaults."""
    return {} if full else SHORT[bench]


def left_out(bench: str, options: Mapping[str, Any]) -> str:
    """What a run with ``options`` leaves out against the defaults, in words: ``rows 1,8 of 1,8,32``; empty for none."""
    defaults = inspect.signature(_run_of(bench)).parameters
    return "; ".join(f"{name} {value} of {defaults[name].default}" for name, value in options.items())


def command_of(bench: str, out: Path, options: Mapping[str, Any]) -> list[str]:
    """The command line of one bench, run by this interpreter."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "nanoserve_lab", "bench", bench, "--out", str(out), *words]


def run_benches(out: Path, full: bool, budget_s: float) -> Iterator[tuple[str, str]]:
    """Run the benches one after another into ``out``; yields each with what is to be said about it, ``""`` for one
    that ran in full. A bench that fails or has no time left is named, and the next one runs."""
    start = time.monotonic()
    for bench in SHORT:
        options = options_of(bench, full)
        left = budget_s - (time.monotonic() - start)
        if left <= 0:
            yield bench, f"left out: the {budget_s / 60:.0f} minutes are over"
            continue
        print(f"== bench {bench}", flush=True)
        try:
            done = subprocess.run(command_of(bench, out, options), timeout=left, check=False)
        except subprocess.TimeoutExpired:
            yield bench, f"left out: not done when the {budget_s / 60:.0f} minutes were over"
            continue
        if done.returncode:
            yield bench, f"failed: exit code {done.returncode}; its message is above"
        else:
            yield bench, left_out(bench, options)


def run(out: Path | None = None, full: bool = False, minutes: float | None = None) -> list[Path]:
    """All benches of this machine to OUT, by default data/machines/NAME after the processor or accelerator.

    Without --full each runs on fewer cells, so that all are done in eight minutes on two cores; MINUTES is another
    limit. What was left out is said at the end.
    """
    folder = out or machine_folder()
    if minutes is not None:
        require("minutes", minutes, 0.0)
    budget = minutes * 60 if minutes is not None else float("inf") if full else BUDGET_S
    said = dict(run_benches(folder, full, budget))
    print(f"\nwritten to {folder}")
    for bench, words in said.items():
        print(f"  {bench}: {words or 'in full'}")
    failed = [bench for bench, words in said.items() if words.startswith("failed")]
    if failed:
        raise BenchFailed(f"{len(failed)} of {len(said)} benches failed: {', '.join(failed)}")
    return sorted(folder.glob("*.csv"))


def _run_of(bench: str) -> Callable[..., Any]:
    run: Callable[..., Any] = import_module(f"nanoserve_lab.bench.{bench}").run
    return run
