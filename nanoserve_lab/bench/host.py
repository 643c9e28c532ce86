"""`bench host`: what a decode step costs on the host beside its forward, by the number of rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.step import engine_after_prefill
from nanoserve_lab.bench.timing import command_line, made_up_prompt, parse_counts, require, show, synchronize
from nanoserve_lab.device import default_device
from nanoserve_lab.engine import Engine
from nanoserve_lab.engine.sampling import Sampler
from nanoserve_lab.model.tiny import tiny_model

#: Steps before the first one that counts.
WARMUP = 10
#: Tokens of the shortest prompt. The others are up to a block longer, so that in every step some rows need a new one.
CONTEXT = 16
#: Prompt and generated tokens together must stay within the tiny model's 256 positions.
MOST_STEPS = 200


class ForwardWatch:
    """The seconds that the calls of an engine's decode forward and of its samplers take, from entry to return."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, its time added to ``seconds``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return run


@contextmanager
def watch_forward(engine: Engine) -> Iterator[ForwardWatch]:
    """Watch the forwards of ``engine`` while inside."""
    watch = ForwardWatch()
    sampler_call, forward = Sampler.__call__, engine.decode_graphs.forward
    engine.decode_graphs.forward = watch.timed(forward)
    Sampler.__call__ = watch.timed(sampler_call)  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Sampler.__call__ = sampler_call  # type: ignore[method-assign]
        engine.decode_graphs.forward = forward


def step_times(engine: Engine, steps: int) -> pd.DataFrame:
    """``steps`` decode steps of ``engine``, `WARMUP` more before them: seconds of the ``step`` and of its ``forward``.

    The forward is the decode step's and the sampler's; on a GPU that is the time to launch them.
    """
    times = []
    with watch_forward(engine) as watch:
        for _ in range(WARMUP + steps):
            synchronize(engine.model.device)
            watch.seconds, start = 0.0, time.perf_counter()
            engine.step()
            times.append({"step": time.perf_counter() - start, "forward": watch.seconds})
    return pd.DataFrame(times[WARMUP:])


def measure(rows: Sequence[int], steps: int) -> pd.DataFrame:
    """One line for each number of rows, medians of ``steps`` steps in microseconds.

    Columns ``rows``, ``step_us``, ``forward_us``, ``host_us`` (the median of the steps' own differences: scheduling,
    planning, bookkeeping, readback) and ``host_us_per_row``.
    """
    model = tiny_model(device=default_device())
    table = []
    for count in rows:
        prompts = [made_up_prompt(model.config.vocab_size, CONTEXT + row % 16, row) for row in range(count)]
        # Two more tokens than steps: the prefill samples one, and no row ends inside the last step.
        times = step_times(engine_after_prefill(model, prompts, WARMUP + steps + 2), steps)
        host_us = statistics.median(times.step - times.forward) * 1e6
        table.append(
            {
                "rows": count,
                "step_us": statistics.median(times.step) * 1e6,
                "forward_us": statistics.median(times.forward) * 1e6,
                "host_us": host_us,
                "host_us_per_row": host_us / count,
            }
        )
    return pd.DataFrame(table).assign(steps=steps, threads=torch.get_num_threads())


def run(out: Path = Path("data"), rows: str = "1,8,64,256", steps: int = MOST_STEPS) -> list[Path]:
    """Microseconds of a decode step outside the forward, on a tiny model, to OUT/host.csv."""
    command = command_line("host", run, locals())
    batches = parse_counts("rows", rows)
    require("steps", steps, 1, MOST_STEPS)
    frame = measure(batches, steps)
    show(frame)
    return [write_csv(frame, out / "host.csv", default_device(), command)]
