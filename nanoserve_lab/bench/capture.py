"""`bench capture`: a run whose steps are recorded once a shape and replayed, beside the same run eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import command_line, made_up_prompt, parse_counts, require, show, spread, synchronize
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.captured import (
    CapturedDecode,
    default_recorder,
    private_pool_bytes,
    shared_pool_bytes,
    tape_recorder,
)
from nanoserve_lab.device import default_device
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.model.transformer import Transformer
from nanoserve_lab.plan import DecodePlan
from nanoserve_lab.recorders import Recorder, Recording

#: Tokens of every row's prompt, and the width multiple of the log's run.
PROMPT, WIDTH_MULTIPLE = 16, 128
#: Four layers, wide enough that an operation has something to do.
MODEL = replace(
    TINY,
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position=1024,
)


class Watched(CapturedDecode):
    """A decode step that notes its seconds, those of recording apart, and the shapes that an open set would have."""

    seconds = 0.0

    def __init__(self, decode: CapturedDecode) -> None:
        self.__dict__.update(decode.__dict__)
        self.open_shapes: set[tuple[int, int]] = set()

    def __call__(self, plan: DecodePlan | tuple[Tensor, ...], input_ids: Tensor) -> Tensor:
        assert isinstance(plan, DecodePlan)
        self.open_shapes.add((plan.live, max(plan.context_list[: plan.live])))
        new = self.recorder is not None and plan.shape not in self.graphs
        synchronize(input_ids.device)
        start = time.perf_counter()
        logits = super().__call__(plan, input_ids)
        synchronize(input_ids.device)
        seconds = time.perf_counter() - start
        if not new:
            self.seconds += seconds
        else:
            # The recording step's own replay counts, recording does not; its time is that of a replay.
            graph = self.graphs[plan.shape]
            start = time.perf_counter()
            graph.replay()
            synchronize(input_ids.device)
            self.seconds += time.perf_counter() - start
        return logits


def engine_of(
    model: Transformer, rows: int, steps: int, capture: bool, recorder: Recorder = default_recorder
) -> tuple[Engine, Watched]:
    """An engine whose ``rows`` prompts are prefilled, ``steps`` decode steps ahead of it, and its watch."""
    context = PROMPT + steps + 1
    config = EngineConfig(
        max_rows=rows,
        max_context=context,
        num_blocks=rows * (-(-context // 16) + 1) + 1,
        max_step_tokens=rows * (PROMPT + 1),
        width_multiple=WIDTH_MULTIPLE,
        bucket_decode=True,
        persist_inputs=True,
        capture_decode=capture,
        strict=False,
    )
    engine = Engine.build(model, None, config, recorder=recorder)
    for row in range(rows):
        engine.submit(made_up_prompt(model.config.vocab_size, PROMPT, row), SamplingParams(max_tokens=steps + 1))
    engine.step()
    watched = engine.decode_graphs = Watched(engine.decode_graphs)
    return engine, watched


def one_run(model: Transformer, rows: int, steps: int) -> dict[str, Any]:
    """Both engines over ``steps`` steps, taking turns step by step; counts from the recorded one."""
    (eager, eager_watch), (recorded, watch) = (engine_of(model, rows, steps, capture) for capture in (False, True))
    for step in range(steps):
        for engine in (eager, recorded) if step % 2 == 0 else (recorded, eager):
            engine.step()
    replays = watch.replays
    return {
        "captures_open": len(watch.open_shapes),
        "captures_closed": watch.captures,
        "replays": replays,
        "reuse": 1 - watch.captures / replays,
        "eager_ms": eager_watch.seconds * 1e3,
        "replayed_ms": watch.seconds * 1e3,
        "record_ms": sum(graph.seconds for graph in watch.graphs.values()) * 1e3,
    }


def measure(rows: Sequence[int], steps: Sequence[int], repeats: int) -> pd.DataFrame:
    """One line for each number of rows and steps.

    Both runs pad their steps to the same closed set of shapes and write their inputs in place; only one records.
    Columns ``steps``, ``rows``, ``captures_open`` (shapes that the run presents without buckets), ``captures_closed``,
    ``replays`` (each recording step's own among them), ``reuse``, ``eager_ms`` and ``replayed_ms`` (all decode forwards
    of a run, sampling and planning left out; medians over ``repeats`` runs), ``record_ms`` (the recordings alone), and
    ``ratio`` (the median of the runs' own, replayed over eager). A step that records counts in ``replayed_ms`` with the
    time of one more replay, so that both columns are of as many steps.
    """
    model = tiny_model(MODEL, device=default_device())
    lines = []
    for batch in rows:
        for length in steps:
            runs = pd.DataFrame([one_run(model, batch, length) for _ in range(repeats + 1)][1:])
            counted = runs[["captures_open", "captures_closed", "replays", "reuse"]].drop_duplicates()
            assert len(counted) == 1, "the counts of one run differ from those of another"
            times = {name: spread(runs[name].tolist()).median for name in ("eager_ms", "replayed_ms", "record_ms")}
            ratio = spread((runs.replayed_ms / runs.eager_ms).tolist()).median
            counts = {str(name): value for name, value in counted.iloc[0].items()}
            lines.append({"steps": length, "rows": batch, **counts, **times, "ratio": ratio})
    frame = pd.DataFrame(lines).assign(repeats=repeats, threads=torch.get_num_threads())
    integers = ["captures_open", "captures_closed", "replays"]
    return frame.astype(dict.fromkeys(integers, "int64"))


def recorded_launches(repeats: int, rows: int = 2) -> pd.DataFrame:
    """`Recording.launches` of a decode step of ``rows`` rows on the tape, each operation timed over ``repeats``
    replays. The tape runs on the CPU."""
    recordings: list[Recording] = []

    def keep(step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording:
        recordings.append(tape_recorder(step, args, pool))
        return recordings[-1]

    engine, _ = engine_of(tiny_model(MODEL), rows, 2, capture=True, recorder=keep)
    engine.step()
    return recordings[0].launches(repeats)


def pool_table(max_rows: int = 256, max_context: int = 8192, heads: int = 32) -> pd.DataFrame:
    """The log's pool arithmetic, fp32 scores alone: columns ``width_multiple``, ``shapes``, ``shared_bytes``,
    ``private_bytes``, ``ratio``."""
    lines = []
    for multiple in (128, 512, 2048, 8192):
        shapes = BucketSet(max_rows, max_context, multiple).shapes()
        shared, private = shared_pool_bytes(shapes, heads), private_pool_bytes(shapes, heads)
        lines.append((multiple, len(shapes), shared, private, private / shared))
    return pd.DataFrame(lines, columns=["width_multiple", "shapes", "shared_bytes", "private_bytes", "ratio"])


def run(out: Path = Path("data"), rows: str = "2,32,256", steps: str = "8,32,64,128", repeats: int = 5) -> list[Path]:
    """Captures, replays and milliseconds of a run, eager and replayed, to OUT/day-54-capturebench.csv, the pool table
    to OUT/day-54-pool.csv, and the operations of one recording to OUT/recording.csv."""
    command = command_line("capture", run, locals())
    batches, lengths = parse_counts("rows", rows), parse_counts("steps", steps)
    require("repeats", repeats, 1)
    frame, pools = measure(batches, lengths, repeats), pool_table()
    show(frame)
    show(pools)
    tables = {"day-54-capturebench.csv": frame, "day-54-pool.csv": pools}
    paths = [write_csv(table, out / name, default_device(), command) for name, table in tables.items()]
    return [*paths, write_csv(recorded_launches(20 * repeats), out / "recording.csv", "cpu", command)]
