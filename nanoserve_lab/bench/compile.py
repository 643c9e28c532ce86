"""`bench compile`: what compiling the decode forward takes and brings, and the graphs it makes as contexts grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.bench.provenance import with_provenance, write_csv
from nanoserve_lab.bench.timing import (
    alternate,
    command_line,
    model_name,
    parse_counts,
    require,
    seconds_of,
    show,
    spread,
)
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.compiled import CompiledDecode, Compiler, GraphBroken, eager_compiler, torch_compiler
from nanoserve_lab.device import default_device
from nanoserve_lab.engine.forward import DecodeForward
from nanoserve_lab.model import Transformer, load_model
from nanoserve_lab.model.tiny import TINY, tiny_model

#: A random model between the tiny one and a real one: 8 layers, 256 wide, 7 million weights.
MIDDLE = replace(
    TINY, vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=8, num_heads=8, num_kv_heads=4,
    head_dim=32, max_position=2048,
)  # fmt: skip
MIDDLE_NAME = "random, 8 layers"
#: What ``--model`` takes for the default model.
DEFAULT = "default"
#: How a step tells the compiler how long its contexts are, one way a line of the figure.
WAYS = ("fixed sizes", "a Python int", "dynamic sizes")

StepArgs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def decode_forward(model: Transformer, rows: int, context: int) -> DecodeForward:
    """The plain decode forward of ``model`` over a pool, random K and V in it, of ``rows`` x ``context`` tokens."""
    pool = KVPool(model.config, rows * context + 1, 1, model.dtype, model.device)
    pool.data.normal_(generator=torch.Generator(model.device).manual_seed(0))
    return DecodeForward(model, pool, kernels=False)


def step_args(rows: int, context: int, device: torch.device) -> StepArgs:
    """What a decode step of ``rows`` sequences of ``context`` tokens, the new one included, hands to the forward."""
    slots = torch.arange(1, rows * context + 1, device=device).view(rows, context)
    column = torch.full((rows, 1), context - 1, device=device)
    return torch.ones_like(column), column, slots[:, -1].clone(), torch.full_like(column[:, 0], context), slots


@torch.inference_mode()
def measure(
    model: Transformer,
    name: str,
    rows: Sequence[int],
    context: int = 128,
    repeats: int = 21,
    compiler: Compiler = torch_compiler,
) -> pd.DataFrame:
    """One line for each number of rows: the plain forward beside the compiled one, which take turns.

    ``compile_s`` is the first call at that number of rows, as long as a plain call where a graph is there already
    (``graphs`` counts those so far). The whole is compiled once before, unmeasured: the compiler's cache on the disk is
    warm, and how long an empty one takes is not measured. ``eager_ms`` and ``compiled_ms`` are medians of ``repeats``
    calls, ``speedup`` is the first over the second.
    """
    forward = decode_forward(model, max(rows), context)
    calls = {count: step_args(count, context, model.device) for count in rows}
    if compiler is not eager_compiler:  # which keeps nothing on the disk
        filling = CompiledDecode(forward, compiler)
        for args in calls.values():
            filling(*args)
    compiled = CompiledDecode(forward, compiler)
    table = []
    for count, args in calls.items():
        first = seconds_of(partial(compiled, *args), model.device)
        arms = {
            "eager": partial(seconds_of, partial(forward, *args), model.device),
            "compiled": partial(seconds_of, partial(compiled, *args), model.device),
        }
        times = alternate(arms, repeats, warmup=3)
        eager, graph = spread(times["eager"]), spread(times["compiled"])
        table.append(
            {
                "model": name,
                "rows": count,
                "context": context,
                "graphs": compiled.graphs,
                "compile_s": first,
                "eager_ms": eager.median * 1e3,
                "eager_ms_low": eager.low * 1e3,
                "eager_ms_high": eager.high * 1e3,
                "compiled_ms": graph.median * 1e3,
                "compiled_ms_low": graph.low * 1e3,
                "compiled_ms_high": graph.high * 1e3,
                "speedup": eager.median / graph.median,
            }
        )
    return pd.DataFrame(table).assign(repeats=repeats, threads=torch.get_num_threads())


class MeanStep:
    """A decode step over a pool of one number a slot instead of K and V: it writes, reads and averages.

    Row ``r`` owns block ``r + 1``, whose slots are row ``r`` of ``table`` ``[rows, block]``. With all scores equal,
    attention is the mean of what a row reads.
    """

    def __init__(self, rows: int = 8, block: int = 64) -> None:
        self.pool = torch.zeros((rows + 1) * block)
        self.table = torch.arange(block, (rows + 1) * block).view(rows, block)

    def forward(self, tokens: Tensor, write_slots: Tensor, context_lens: Tensor, slot_mapping: Tensor) -> Tensor:
        """The means ``[rows]`` once ``tokens`` ``[rows]`` are written; the addresses as in `plan.DecodePlan`."""
        self.pool[write_slots] = tokens
        unread = torch.arange(slot_mapping.shape[1]) >= context_lens[:, None]
        return self.pool[slot_mapping].masked_fill(unread, 0).sum(dim=1) / context_lens

    def by_int(self, tokens: Tensor, write_slots: Tensor, table: Tensor, context: int) -> Tensor:
        """The same for rows of equal length, which is a Python int."""
        self.pool[write_slots] = tokens
        return self.pool[table[:, :context]].mean(dim=1)

    def args(self, rows: int, context: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `forward` takes for ``rows`` rows of ``context`` tokens."""
        slots = self.table[:rows, :context]
        return torch.ones(rows), slots[:, -1].clone(), torch.full((rows,), context), slots


def graphs_made(steps: int = 24, rows: int = 2, prompt: int = 3) -> pd.DataFrame:
    """The graphs made while the contexts of a `MeanStep`'s rows grow by a token in each of ``steps`` steps.

    A row for each of `WAYS` and step: ``way``, ``step`` (from 1), ``context``, ``graphs`` so far and ``refused``, true
    in the step at which the compiler's limit ends it. Counts, and no times.
    """
    table = []
    for way in WAYS:
        step = MeanStep()
        by_int = way == "a Python int"
        decode = CompiledDecode(step.by_int if by_int else step.forward, eager_compiler, dynamic=way != "fixed sizes")
        for number in range(1, steps + 1):
            context, refused = prompt + number, False
            try:
                tokens, slots, lens, window = step.args(rows, context)
                decode(tokens, slots, *((step.table[:rows], context) if by_int else (lens, window)))
            except GraphBroken:
                refused = True
            table.append({"way": way, "step": number, "context": context, "graphs": decode.graphs, "refused": refused})
            if refused:
                break
    return with_provenance(pd.DataFrame(table), "cpu", "nanoserve-lab bench compile")


def run(
    out: Path = Path("data"),
    rows: str = "1,8,32",
    context: int = 128,
    repeats: int = 21,
    model: str | None = None,
) -> list[Path]:
    """Compile seconds and milliseconds a step, eager and compiled, of a random model of 8 layers to OUT/compile.csv;
    with --model (a folder, a hub id, or "default") of that one too. The graphs over growing contexts to OUT/graphs.csv.
    """
    command = command_line("compile", run, locals())
    batches = parse_counts("rows", rows)
    require("context", context, 2, MIDDLE.max_position)
    require("repeats", repeats, 3)
    device = default_device()
    frames = [measure(tiny_model(MIDDLE, device=device), MIDDLE_NAME, batches, context, repeats)]
    if model is not None:
        source = None if model == DEFAULT else model
        transformer, _ = load_model(source, device, torch.float32)
        frames.append(measure(transformer, model_name(source), batches, context, repeats))
    frame = pd.concat(frames, ignore_index=True)
    show(frame)
    return [
        write_csv(frame, out / "compile.csv", device, command),
        write_csv(graphs_made(), out / "graphs.csv"),
    ]
