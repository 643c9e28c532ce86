"""`bench step`: one decode step of a model taken apart: its operations, its floor, and the tokens on their way home."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.bench.provenance import with_provenance, write_csv
from nanoserve_lab.device import default_device, read_bandwidth
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.engine.deferred import DeferredReadback
from nanoserve_lab.engine.request import Request
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model import load_model
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.model.transformer import Transformer

COMMAND = "nanoserve-lab bench step"


def decoding_engine(model: Transformer, rows: int = 1, context: int = 128, steps: int = 64) -> Engine:
    """A plain engine in the middle of decoding ``rows`` sequences of ``context`` tokens, ``steps`` steps left."""
    prompts = [[(7 * row + 3 * i) % model.config.vocab_size for i in range(context)] for row in range(rows)]
    return engine_after_prefill(model, prompts, steps, optimize_cpu=False)


def engine_with_room(
    model: Transformer, rows: int, context: int, tokens: int, optimize_cpu: bool = True, **switches: bool
) -> Engine:
    """An engine that takes ``rows`` prompts of ``context`` tokens in one step, and ``tokens`` more for each later.

    Without ``optimize_cpu`` it is the engine that the course starts from: plain operations, the rectangle gathered.
    ``switches`` turn days on; buckets, if any, are as wide as the engine.
    """
    config = EngineConfig(
        max_rows=rows,
        max_context=context + tokens,
        num_blocks=rows * (-(-(context + tokens) // 16) + 1) + 1,  # one spare a row for admission, and the sink
        max_step_tokens=rows * (context + 1),
        optimize_cpu=optimize_cpu,
        slot_table=optimize_cpu,
        width_multiple=context + tokens,
        **switches,
    )
    return Engine.build(model, None, config)


def engine_after_prefill(
    model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, optimize_cpu: bool = True
) -> Engine:
    """An engine that has prefilled ``prompts`` in one step and sampled the first of ``tokens`` tokens for each."""
    engine = engine_with_room(model, len(prompts), max(map(len, prompts)), tokens, optimize_cpu)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=tokens))
    engine.step()
    return engine


def trace_step(model: Transformer, rows: int = 1, context: int = 128, repeats: int = 7) -> pd.DataFrame:
    """The launches of one decode step, one row each: the columns of `instruments.Launch` and the provenance.

    ``seconds`` is each launch's median over ``repeats`` consecutive steps, two more for warming up.
    """
    engine = decoding_engine(model, rows, context, repeats + 4)
    frames = []
    for _ in range(repeats + 2):
        with StepTrace() as trace:
            engine.step()
        frames.append(trace.frame())
    frame = frames[-1]
    frame["seconds"] = pd.concat([f.seconds for f in frames[2:]], axis=1).median(axis=1)
    return with_provenance(frame, model.device, COMMAND)


def step_seconds(engine: Engine, repeats: int = 21) -> float:
    """Median seconds of one untraced step of ``engine``, three more for warming up."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        engine.step()
        if engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that one decode step reads: all but an embedding table that is not the LM head too."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if model.config.tie_embeddings else total - model.embed.weight.nbytes


def kv_bytes(model: Transformer, tokens: int) -> int:
    """Bytes of K and V of ``tokens`` tokens in all layers."""
    return 2 * model.config.num_layers * model.config.kv_size * tokens * model.dtype.itemsize


def step_floor(model: Transformer, rows: int = 1, context: int = 128) -> pd.DataFrame:
    """One row: what a step must read, how fast this machine reads, what issuing its launches costs the host.

    Columns ``rows``, ``context``, ``bytes`` (weights and live K/V), ``launches``, ``host_s_per_launch`` (a step of a
    model as deep but only 32 wide, over its launches: its operations have next to nothing to do), ``bandwidth_gb_s``,
    ``step_s``, and ``floor_fraction`` (the time of the bytes over the step's).
    """
    shallow = replace(TINY, num_layers=model.config.num_layers, max_position=context + 64)
    narrow = tiny_model(shallow, dtype=model.dtype, device=model.device)
    launches = len(trace_step(narrow, rows, 16, repeats=1))
    host_s = step_seconds(decoding_engine(narrow, rows, 16)) / launches
    bandwidth = read_bandwidth(model.device)
    engine = decoding_engine(model, rows, context)
    step_s = step_seconds(engine)
    size = weight_bytes(model) + rows * kv_bytes(model, context)
    row = {
        "rows": rows,
        "context": context,
        "bytes": size,
        "launches": launches,
        "host_s_per_launch": host_s,
        "bandwidth_gb_s": bandwidth / 1e9,
        "step_s": step_s,
        "floor_fraction": size / bandwidth / step_s,
    }
    return with_provenance(pd.DataFrame([row]), model.device, COMMAND)


class ReadbackWatch(DeferredReadback):
    """A deferred readback that also writes down which token was sampled in which step and when the host read it."""

    def __init__(self, lag: int, max_rows: int, device: torch.device) -> None:
        super().__init__(lag, max_rows, device)
        self.step = 0
        self.seen: list[dict[str, object]] = []
        self._sampled: list[tuple[int, Request]] = []

    def push(self, tokens: Tensor, requests: Sequence[Request]) -> None:
        self._sampled += [(self.step, request) for request in requests]
        super().push(tokens, requests)

    def due(self, drain: bool = False) -> Iterator[tuple[Request, int]]:
        for request, token in super().due(drain):
            step, _ = self._sampled.pop(0)
            kept = request.finish_reason is None
            self.seen.append({"step": step, "request": request.id, "token": token, "read_at": self.step, "kept": kept})
            yield request, token
        self.step += 1


def readback_timeline(engine: Engine) -> pd.DataFrame:
    """Run ``engine`` until its work is done; one row a sampled token, in the order in which the host read them.

    Columns ``step`` (in which it was sampled), ``row`` (a letter for its request), ``token`` (its id as text),
    ``read_at`` (the step at whose end the host had it) and ``kept`` (False: sampled after a stop not yet read).
    """
    watch = ReadbackWatch(engine.config.readback_lag, engine.config.max_rows, engine.model.device)
    engine.readback = watch
    while engine.has_work:
        engine.step()
    frame = pd.DataFrame(watch.seen)
    letters = {request: chr(ord("A") + i) for i, request in enumerate(sorted(frame.request.unique()))}
    frame["row"] = frame.pop("request").map(letters)
    frame["token"] = frame.token.astype(str)
    return with_provenance(frame[["step", "row", "token", "read_at", "kept"]], engine.model.device, COMMAND)


def two_rows(stop_after: int = 3, max_tokens: int = 7, lag: int = 2) -> Engine:
    """The tiny engine with two requests submitted; the first meets a stop token as its ``stop_after``-th."""
    config = EngineConfig(
        max_rows=2, max_context=32, block_size=4, readback_lag=lag, optimize_cpu=False, slot_table=False
    )
    model = tiny_model()
    first = Engine.build(model, None, config).generate([[1, 2, 3]], SamplingParams(max_tokens=stop_after))[0]
    engine = Engine.build(model, None, config)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=max_tokens, stop_ids=(first.token_ids[-1],)))
    engine.submit([4, 5, 6], SamplingParams(max_tokens=max_tokens))
    return engine


def run(out: Path = Path("data"), rows: int = 2, context: int = 128, model: str | None = None) -> list[Path]:
    """Take one decode step apart and write decode-step.csv, decode-floor.csv and deferred-readback.csv to OUT."""
    device = default_device()
    transformer, _ = load_model(model, device, torch.float32)
    frames = {
        "decode-step.csv": trace_step(transformer, rows, context),
        "decode-floor.csv": step_floor(transformer, rows, context),
        "deferred-readback.csv": readback_timeline(two_rows()),
    }
    return [write_csv(frame, out / name) for name, frame in frames.items()]
