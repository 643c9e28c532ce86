"""What the benches share: arms of a comparison that take turns, their medians and ranges, and checked options."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from nanoserve_lab.bench.provenance import PROVENANCE
from nanoserve_lab.model.fetch import MODEL_NAME

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


class BenchRefused(ValueError):
    """An option of a bench that cannot be meant. The message names the option, what was wanted and what was seen."""


class BenchFailed(RuntimeError):
    """A bench that ran and found what must not be, or lost one of its processes."""


class Spread(NamedTuple):
    """Median and range of repeated measurements, in the unit of the measurements."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of ``values``."""
    return Spread(statistics.median(values), min(values), max(values))


def alternate(arms: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Run every arm once a round and return its ``repeats`` values; ``warmup`` rounds before them are thrown away.

    Every other round runs the arms in the opposite order, so that a machine that drifts favours none of them.
    """
    values: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(warmup + repeats):
        for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
            value = arms[name]()
            if turn >= warmup:
                values[name].append(value)
    return values


def peer_ratios(medians: Mapping[str, float], peers: Collection[str]) -> dict[str, float]:
    """For each engine the best median among ``peers`` over its own: above 1 is faster than every peer."""
    best = min(medians[peer] for peer in peers)
    return {engine: best / median for engine, median in medians.items()}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes until ``device`` is done with it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for all work on ``device``; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made_up_prompt(vocab_size: int, tokens: int, row: int = 0) -> list[int]:
    """``tokens`` token ids, the same on every machine; another ``row`` is another prompt."""
    return [(7 * row + 3 * i + 1) % vocab_size for i in range(tokens)]


def parse_counts(option: str, text: str) -> list[int]:
    """The positive integers of a comma-separated option; raises `BenchRefused` naming ``option``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BenchRefused(f"--{option}: wanted positive integers with commas between them, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def parse_words(option: str, text: str, known: Collection[str]) -> list[str]:
    """The words of a comma-separated option, all ``known``; raises `BenchRefused` naming ``option``."""
    names = [part.strip() for part in text.split(",")]
    if not set(names) <= set(known):
        raise BenchRefused(f"--{option}: wanted some of {', '.join(known)} with commas between them, got {text!r}")
    return list(dict.fromkeys(names))


def parse_dtypes(option: str, text: str) -> list[str]:
    """The names of floating dtypes in a comma-separated option; raises `BenchRefused` naming ``option``."""
    return parse_words(option, text, DTYPES)


def require(option: str, value: float, least: float, most: float | None = None) -> None:
    """Raise `BenchRefused` naming ``option`` where ``value`` is below ``least`` or above ``most``."""
    if not value >= least or (most is not None and value > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most}"
        raise BenchRefused(f"--{option}: wanted {wanted}, got {value}")


def model_name(source: str | None) -> str:
    """The model in one word for a table: the default model's name, a folder's own name, or the hub id."""
    if source is None:
        return MODEL_NAME
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source


def command_line(bench: str, run: Callable[..., object], options: Mapping[str, Any]) -> str:
    """What to type for ``bench``: those ``options`` that differ from the defaults of ``run``. No folder is named."""
    words = [f"nanoserve-lab bench {bench}"]
    for name, parameter in inspect.signature(run).parameters.items():
        if name in options and name != "out" and options[name] != parameter.default:
            value = model_name(options[name]) if name == "model" else options[name]
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def show(frame: pd.DataFrame) -> None:
    """Print the measured columns of ``frame``."""
    measured = [column for column in frame.columns if column not in PROVENANCE]
    print(frame[measured].to_string(index=False, float_format=lambda value: f"{value:.4g}"), flush=True)
