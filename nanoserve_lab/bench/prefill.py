"""`bench prefill`: time to the first token and peak memory beside `transformers`, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import torch

from nanoserve_lab.bench.decode import OWN
from nanoserve_lab.bench.peers import ATTENTIONS, Peer
from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import (
    DTYPES,
    alternate,
    command_line,
    made_up_prompt,
    model_name,
    parse_counts,
    parse_dtypes,
    peer_ratios,
    require,
    seconds_of,
    show,
    spread,
)
from nanoserve_lab.device import default_device
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.model import load_model, resolve_source
from nanoserve_lab.model.config import read_config

#: The engines measured; the part after the name is the peer's attention implementation. Its cache is the dynamic one.
ENGINES = (OWN, *(f"transformers {attention}" for attention in ATTENTIONS))

#: What the measurements of a dtype may take, loading not counted: on two cores one round of 1,024 tokens in bfloat16,
#: every engine once, takes the greater part of a minute.
SECONDS = 80


def peak_mb(device: torch.device) -> float:
    """The most memory that this process has held so far, in units of 10**6 bytes: the GPU's on CUDA, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count the parent's memory too, as a child starts as its copy
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"), re.M)
        if found:
            return int(found.group(1)) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def first_token(engine: str, folder: Path, dtype: str, most: int) -> Callable[[list[int]], int]:
    """The greedy first token of a prompt of ``most`` tokens at most, by ``engine`` of `ENGINES`, loaded now."""
    device = default_device()
    if engine != OWN:
        peer, attention = Peer(folder, DTYPES[dtype], device), engine.split()[1]
        return lambda prompt: peer.first_token(prompt, attention)
    model, _ = load_model(folder, device, DTYPES[dtype])
    own = Engine.build(model, None, EngineConfig(max_rows=1, max_context=most + 1))
    params = SamplingParams(max_tokens=1)
    return lambda prompt: own.generate([prompt], params)[0].token_ids[0]


#: What this process measures, once `load` has run in it.
_first_token: Callable[[list[int]], int] | None = None


def load(engine: str, folder: Path, dtype: str, most: int, threads: int) -> None:
    """Make this process the one that measures ``engine``."""
    global _first_token
    torch.set_num_threads(threads)
    _first_token = first_token(engine, folder, dtype, most)


def prefill(prompt: list[int]) -> tuple[float, float, int]:
    """In a process that has run `load`: the seconds to the first token of ``prompt``, `peak_mb` so far, the token."""
    assert _first_token is not None, "load comes first"
    device, run, tokens = default_device(), _first_token, list[int]()
    seconds = seconds_of(lambda: tokens.append(run(prompt)), device)
    return seconds, peak_mb(device), tokens[0]


def rounds_within(seconds: float, warm_up: float, most: int) -> int:
    """How many rounds, 1 to ``most``, fit into ``seconds`` after a first one, which took ``warm_up``."""
    return max(1, min(most, int(seconds / warm_up) - 1))


def measure_dtype(
    folder: Path, dtype: str, lengths: Sequence[int], repeats: int, seconds: float = SECONDS
) -> pd.DataFrame:
    """One row an engine and number of prompt tokens; the engines' processes take turns, one working at a time.

    Columns ``engine``, ``tokens``, ``repeats``, ``ttft_ms`` (median), ``ms_min``, ``ms_max``, ``peak_mb`` (of a process
    that has loaded the model and prefilled prompts up to this length), ``ratio`` (the best peer's median over this
    one's) and ``same_token`` (whether the first token is that of the first peer).

    The lengths share ``seconds`` by their tokens; a slow one gets fewer than ``repeats`` rounds, but at least one, and
    its rows say how many.
    """
    vocab_size = read_config(folder / "config.json").vocab_size
    # Spawned, not forked: a fork would begin with this process's memory, and it may hold CUDA.
    spawn = multiprocessing.get_context("spawn")
    table = []
    with ExitStack() as stack:
        processes = {e: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for e in ENGINES}
        options = (folder, dtype, max(lengths), torch.get_num_threads())
        for loading in [process.submit(load, engine, *options) for engine, process in processes.items()]:
            loading.result()
        # Shortest first: a process's peak after its warm-up at one length is that of this length.
        end, left = time.perf_counter() + seconds, sum(lengths)
        for tokens in sorted(lengths):
            prompt, start = made_up_prompt(vocab_size, tokens), time.perf_counter()
            warm = {engine: process.submit(prefill, prompt).result() for engine, process in processes.items()}
            share = (end - start) * tokens / left
            rounds, left = rounds_within(share, time.perf_counter() - start, repeats), left - tokens
            arms = {e: lambda p=p: p.submit(prefill, prompt).result()[0] for e, p in processes.items()}  # noqa: B023
            spreads = {e: spread(values) for e, values in alternate(arms, rounds, warmup=0).items()}
            ratios = peer_ratios({e: seconds.median for e, seconds in spreads.items()}, ENGINES[1:])
            for engine, (median, low, high) in spreads.items():
                table.append(
                    {
                        "engine": engine,
                        "tokens": tokens,
                        "repeats": rounds,
                        "ttft_ms": median * 1e3,
                        "ms_min": low * 1e3,
                        "ms_max": high * 1e3,
                        "peak_mb": warm[engine][1],
                        "ratio": ratios[engine],
                        "same_token": warm[engine][2] == warm[ENGINES[1]][2],
                    }
                )
    return pd.DataFrame(table)


def measure(
    source: str | None, dtypes: Sequence[str], lengths: Sequence[int], repeats: int, seconds: float = SECONDS
) -> pd.DataFrame:
    """`measure_dtype` for every dtype; adds ``model``, ``dtype`` and ``threads``."""
    folder = resolve_source(source)
    frames = []
    for dtype in dtypes:
        frame = measure_dtype(folder, dtype, lengths, repeats, seconds)
        frame.insert(1, "model", model_name(source))
        frame.insert(2, "dtype", dtype)
        show(frame)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True).assign(threads=torch.get_num_threads())


def run(
    out: Path = Path("data"),
    tokens: str = "128,1024",
    dtypes: str = "float32,bfloat16",
    repeats: int = 5,
    seconds: int = SECONDS,
    model: str | None = None,
) -> list[Path]:
    """Time to the first token of TOKENS prompt tokens, and peak memory, beside transformers, to OUT/prefill.csv.

    Each dtype takes about SECONDS: a prompt too slow for REPEATS rounds gets fewer, as its rows say.
    """
    command = command_line("prefill", run, locals())
    lengths, names = parse_counts("tokens", tokens), parse_dtypes("dtypes", dtypes)
    require("repeats", repeats, 1)
    require("seconds", seconds, 1)
    frame = measure(model, names, lengths, repeats, seconds)
    return [write_csv(frame, out / "prefill.csv", default_device(), command)]
