"""`bench soak`: random arrivals and cancellations for a while.

Every request must end, every block come back, and memory stay where it is.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import torch

from nanoserve_lab.bench.load import TRACES, Trace, arrivals
from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import (
    DTYPES,
    BenchFailed,
    BenchRefused,
    command_line,
    model_name,
    parse_dtypes,
    require,
    show,
)
from nanoserve_lab.device import default_device
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams, TokenEvent
from nanoserve_lab.model import load_model

#: A pool that holds two sequences of the greatest length, or eight ordinary ones: at times it is short of blocks.
ENGINE = EngineConfig(max_rows=8, max_context=512, num_blocks=65)
#: Requests served as fast as they go before the clock starts, to learn how many a second this machine can serve.
WARMUP_REQUESTS = 24
#: One request in ten is cancelled, after a time drawn between 0 and this many seconds.
CANCELLED, PATIENCE_S = 0.1, 4.0
#: The line through the samples of resident memory may rise by this much, from the first to the last of them.
FLAT_MB = 8.0


@dataclass
class Ledger:
    """How many tokens each submitted request has been told of, and how many its completion held at each ending.

    It keeps numbers only: the account must not be what memory grows by.
    """

    tokens: Counter[int] = field(default_factory=Counter)
    endings: dict[int, list[int]] = field(default_factory=dict)

    def submitted(self, request_id: int) -> None:
        """Open an account for a request."""
        self.endings[request_id] = []

    def take(self, events: list[TokenEvent]) -> None:
        """Enter the events of one step; raises `BenchFailed` for one of a request that nobody submitted."""
        for event in events:
            if event.request_id not in self.endings:
                raise BenchFailed(f"request {event.request_id}: an event of a request that was not submitted")
            self.tokens[event.request_id] += event.token_id is not None
            if event.finish_reason is not None:
                held = -1 if event.completion is None else len(event.completion.token_ids)
                self.endings[event.request_id].append(held)

    def check(self) -> None:
        """Raise `BenchFailed` where a request has not ended exactly once, or a token of its completion was not told."""
        for request_id, ends in self.endings.items():
            if len(ends) != 1:
                raise BenchFailed(f"request {request_id}: wanted one ending, saw {len(ends)}")
            if ends[0] != self.tokens[request_id]:
                raise BenchFailed(
                    f"request {request_id}: {self.tokens[request_id]} tokens told, its completion holds {ends[0]}"
                )


def check_empty(engine: Engine, submitted: int) -> None:
    """Raise `BenchFailed` where ``engine`` still holds a request or a block, or its own counts do not add up."""
    stats = engine.stats()
    left = {"waiting": stats.waiting, "running": stats.running, "blocks": stats.total_blocks - stats.free_blocks}
    if any(left.values()):
        raise BenchFailed(f"after the last request the engine still holds {left}")
    if sum(stats.finished.values()) != submitted:
        raise BenchFailed(f"{submitted} requests submitted, {stats.finished} finished")


def slope_mb_per_min(samples: pd.DataFrame) -> tuple[float, float]:
    """Slope of ``rss_mb`` over ``second`` by least squares, and its standard error, both in MB a minute.

    Raises `BenchFailed` for fewer than three samples.
    """
    if len(samples) < 3:
        raise BenchFailed(f"wanted three samples of resident memory or more, saw {len(samples)}")
    minutes, resident = (samples.second / 60).to_numpy(), samples.rss_mb.to_numpy()
    slope, intercept = np.polyfit(minutes, resident, 1)
    residuals = resident - slope * minutes - intercept
    variance = (residuals**2).sum() / (len(samples) - 2)
    return float(slope), float(np.sqrt(variance / ((minutes - minutes.mean()) ** 2).sum()))


def check_flat(samples: pd.DataFrame) -> float:
    """The slope of resident memory over ``samples`` in MB a minute.

    Raises `BenchFailed` where the line, less two standard errors, rises by more than `FLAT_MB` over the samples.
    """
    slope, error = slope_mb_per_min(samples)
    minutes = (samples.second.iloc[-1] - samples.second.iloc[0]) / 60
    if (slope - 2 * error) * minutes > FLAT_MB:
        raise BenchFailed(
            f"resident memory rises by {slope:.1f} MB a minute (standard error {error:.1f}), "
            f"wanted {FLAT_MB} MB at most in {minutes:.1f} minutes"
        )
    return slope


def held_mb(process: psutil.Process) -> float:
    """Resident memory of this process in MB (10**6 bytes), holes in the heap given back to the system first.

    glibc keeps freed memory between blocks that are in use, more or less of it by chance: prompts of all lengths leave
    holes of all sizes. Where it cannot be asked to give them back they are counted.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return process.memory_info().rss / 1e6


class Soak:
    """An engine, a source of requests with made-up prompts, and the account of what became of them."""

    def __init__(self, engine: Engine, trace: Trace, length_scale: float, seed: int) -> None:
        self.engine, self.trace, self.length_scale, self.seed = engine, trace, length_scale, seed
        self.ledger = Ledger()
        self.rng = np.random.default_rng(seed)

    def requests(self, count: int, rate_scale: float, seed: int) -> pd.DataFrame:
        """``count`` arrivals, a prompt and an output at most half of the engine's context each."""
        longest = (self.engine.config.max_context or self.engine.model.config.max_position) // 2
        return arrivals(self.trace, count, seed, rate_scale, self.length_scale, longest, longest)

    def submit(self, prompt_tokens: int, output_tokens: int) -> int:
        """Queue one request, greedy or sampled by the toss of a coin; its id."""
        prompt = self.rng.integers(0, self.engine.model.config.vocab_size, prompt_tokens).tolist()
        temperature, seed = float(self.rng.integers(2)), int(self.rng.integers(2**31))
        params = SamplingParams(max_tokens=output_tokens, temperature=temperature, seed=seed)
        request_id = self.engine.submit(prompt, params)
        self.ledger.submitted(request_id)
        return request_id

    def capacity(self, count: int = WARMUP_REQUESTS) -> float:
        """Requests a second that the engine serves when ``count`` of them are there at once; it warms up, too."""
        table = self.requests(count, 1.0, self.seed + 1)
        for prompt_tokens, output_tokens in zip(table.prompt_tokens, table.output_tokens, strict=True):
            self.submit(prompt_tokens, output_tokens)
        start = time.perf_counter()
        while self.engine.has_work:
            self.ledger.take(self.engine.step())
        return count / (time.perf_counter() - start)

    def agenda(self, seconds: float, rate_scale: float) -> list[tuple[float, int, int, int]]:
        """What happens in ``seconds``, the first last: time, number of the request, prompt and output tokens.

        A request that is cancelled comes again later, with 0 and 0.
        """
        count = 16
        while (table := self.requests(count, rate_scale, self.seed)).at_s.iloc[-1] < seconds:
            count *= 2
        table = table[table.at_s < seconds]
        agenda = list(zip(table.at_s, table.index, table.prompt_tokens, table.output_tokens, strict=True))
        cancelled = np.flatnonzero(self.rng.random(len(table)) < CANCELLED)
        agenda += [(table.at_s[i] + self.rng.uniform(0, PATIENCE_S), i, 0, 0) for i in cancelled]
        return sorted(agenda, reverse=True)

    def run(self, seconds: float, rate_scale: float) -> pd.DataFrame:
        """Serve the arrivals of ``seconds``, then what is left; a sample in every second and one at the end.

        Columns ``second``, ``rss_mb`` (see `held_mb`), ``running``, ``waiting``, and counts from the start of this run:
        ``submitted``, ``finished`` (not cancelled), ``cancelled``, ``preemptions``, ``tokens``.
        """
        agenda, ids = self.agenda(seconds, rate_scale), dict[int, int]()
        before, tokens_before = self.engine.stats(), self.ledger.tokens.total()
        samples: list[dict[str, float]] = []
        process, start = psutil.Process(), time.perf_counter()

        def sample() -> None:
            stats = self.engine.stats()
            cancelled = stats.finished.get("cancelled", 0) - before.finished.get("cancelled", 0)
            ended = sum(stats.finished.values()) - sum(before.finished.values())
            samples.append(
                {
                    "second": time.perf_counter() - start,
                    "rss_mb": held_mb(process),
                    "running": stats.running,
                    "waiting": stats.waiting,
                    "submitted": len(ids),
                    "finished": ended - cancelled,
                    "cancelled": cancelled,
                    "preemptions": stats.preemptions - before.preemptions,
                    "tokens": self.ledger.tokens.total() - tokens_before,
                }
            )

        while agenda or self.engine.has_work or len(samples) <= seconds:
            now = time.perf_counter() - start
            while agenda and agenda[-1][0] <= now:
                _, number, prompt_tokens, output_tokens = agenda.pop()
                if number in ids:
                    self.engine.cancel(ids[number])
                else:
                    ids[number] = self.submit(prompt_tokens, output_tokens)
            if self.engine.has_work:
                self.ledger.take(self.engine.step())
            else:
                time.sleep(0.01)
            if time.perf_counter() - start >= len(samples):
                sample()
        sample()
        return pd.DataFrame(samples)


def measure(soak: Soak, seconds: float, load: float) -> pd.DataFrame:
    """`Soak.run` at ``load`` times the requests a second that the engine can serve, its outcome checked.

    The further columns are ``trace``, ``requests_per_s``, ``rate_scale`` and ``length_scale`` (both over the trace's
    own), and ``slope_mb_per_min`` of the samples after the first quarter. Raises `BenchFailed` where a request was
    lost, a block is not free at the end, or memory rises.
    """
    requests_per_s = load * soak.capacity()
    rate_scale = requests_per_s / soak.trace.requests_per_s
    samples = soak.run(seconds, rate_scale)
    soak.ledger.check()
    check_empty(soak.engine, len(soak.ledger.endings))
    slope = check_flat(samples[samples.second >= seconds / 4])
    return samples.assign(
        trace=soak.trace.name,
        requests_per_s=requests_per_s,
        rate_scale=rate_scale,
        length_scale=soak.length_scale,
        slope_mb_per_min=slope,
    )


def run(
    out: Path = Path("data"),
    seconds: int = 120,
    load: float = 1.0,
    trace: str = "conversation",
    length_scale: float = 0.0625,
    seed: int = 0,
    dtype: str = "float32",
    model: str | None = None,
) -> list[Path]:
    """Serve random arrivals for SECONDS and write a line a second to OUT/soak.csv; fails where anything is lost.

    LOAD is the share of the requests that this machine can serve a second, which is measured first.
    """
    command = command_line("soak", run, locals())
    require("seconds", seconds, 4)
    require("load", load, 0.01)
    require("length-scale", length_scale, 0.001)
    require("seed", seed, 0)
    if trace not in TRACES:
        raise BenchRefused(f"--trace: wanted one of {', '.join(TRACES)}, got {trace!r}")
    device, names = default_device(), parse_dtypes("dtype", dtype)
    if len(names) != 1:
        raise BenchRefused(f"--dtype: wanted one dtype, got {dtype!r}")
    transformer, tokenizer = load_model(model, device, DTYPES[names[0]])
    soak = Soak(Engine.build(transformer, tokenizer, ENGINE), TRACES[trace], length_scale, seed)
    frame = measure(soak, seconds, load).assign(model=model_name(model), dtype=dtype, threads=torch.get_num_threads())
    show(frame.iloc[[0, len(frame) // 2, -1]])
    return [write_csv(frame, out / "soak.csv", device, command)]
