"""`bench launch`: what one launch, one replay and one recording cost, and after how many steps a recording has paid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.bench.capture import MODEL, engine_of
from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import (
    alternate,
    command_line,
    parse_counts,
    parse_words,
    require,
    seconds_of,
    show,
    spread,
)
from nanoserve_lab.captured import capture_breakeven_steps, capture_cost_s, default_recorder, launch_saving_s
from nanoserve_lab.device import default_device
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model import load_model
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.model.transformer import Transformer

MODELS: dict[str, Callable[[], Transformer]] = {
    "tiny": lambda: tiny_model(TINY, device=default_device()),
    "four-layer": lambda: tiny_model(MODEL, device=default_device()),
    "default": lambda: load_model()[0],
}
#: Runs of a step between two looks at the clock: a device is waited for once for all of them.
INNER = 10


def _several(work: Callable[[], object]) -> None:
    for _ in range(INNER):
        work()


def add_chain(x: Tensor, length: int) -> Tensor:
    """``length`` additions of one to ``x`` in place: launches with next to no work."""
    for _ in range(length):
        x.add_(1)
    return x


def costs_of(step: Callable[..., Tensor], args: tuple[Tensor, ...], repeats: int) -> dict[str, Any]:
    """What ``step(*args)`` costs eagerly, replayed and to record, medians of ``repeats`` alternating measurements.

    ``launches`` (counted in a run by `StepTrace`), ``eager_ms``, ``replay_ms``, ``record_ms``, ``launch_us`` (an eager
    step over its launches, what an operation computes included), ``saving_ms`` (a replay against a step) and
    ``breakeven_steps`` of one recording, infinite where a replay saves nothing. The step is run many times.
    """
    device = args[0].device
    with torch.inference_mode():
        with StepTrace() as trace:
            step(*args)
        recording = default_recorder(step, args)

        timed: dict[str, Callable[[], float]] = {
            "eager": partial(seconds_of, partial(_several, partial(step, *args)), device),
            "replay": partial(seconds_of, partial(_several, recording.replay), device),
            "record": partial(seconds_of, partial(default_recorder, step, args), device),
        }
        seconds = {name: spread(values).median for name, values in alternate(timed, repeats).items()}
    seconds["eager"] /= INNER
    seconds["replay"] /= INNER
    launches = len(trace.launches)
    saving = launch_saving_s(launches, seconds["eager"] / launches, seconds["replay"])
    return {
        "launches": launches,
        **{f"{name}_ms": value * 1e3 for name, value in seconds.items()},
        "launch_us": seconds["eager"] / launches * 1e6,
        "saving_ms": saving * 1e3,
        "breakeven_steps": float(capture_breakeven_steps(capture_cost_s([(1, 1)], seconds["record"]), saving)),
    }


def decode_costs(model: Transformer, rows: int, repeats: int) -> dict[str, Any]:
    """`costs_of` one decode step of ``rows`` rows after a 16-token prompt, in the engine that people would run."""
    engine, _ = engine_of(model, rows, steps=2, capture=True)
    engine.step()
    decode = engine.decode_graphs
    (graph,) = decode.graphs.values()
    assert decode.parts is not None

    def step(*tensors: Tensor) -> Tensor:
        return graph.output.copy_(decode.forward(*tensors))

    inputs = decode.parts.inputs.input_ids.window(len(graph.rows))
    return costs_of(step, (inputs, *graph.plan.tensors), repeats)


def measure(models: Sequence[str], rows: int, chain: Sequence[int], repeats: int) -> pd.DataFrame:
    """One line for each chain of additions and each model of `MODELS`: ``step``, ``rows`` and the columns of
    `costs_of`."""
    one = torch.zeros(1, device=default_device())
    lines = [
        {"step": f"{length} additions", "rows": 1, **costs_of(partial(add_chain, length=length), (one,), repeats)}
        for length in chain
    ]
    for name in models:
        lines.append({"step": f"{name} decode", "rows": rows, **decode_costs(MODELS[name](), rows, repeats)})
    return pd.DataFrame(lines).assign(repeats=repeats, threads=torch.get_num_threads())


def run(
    out: Path = Path("data"),
    models: str = "tiny,four-layer,default",
    rows: int = 2,
    chain: str = "1,10,100,1000",
    repeats: int = 7,
) -> list[Path]:
    """Eager, replayed and recorded milliseconds of chains of additions and of decode steps to OUT/launch.csv."""
    command = command_line("launch", run, locals())
    names, lengths = parse_words("models", models, MODELS), parse_counts("chain", chain)
    require("rows", rows, 1)
    require("repeats", repeats, 1)
    frame = measure(names, rows, lengths, repeats)
    show(frame)
    return [write_csv(frame, out / "launch.csv", default_device(), command)]
