"""The decode-step ledger: one row a lesson, counted on the tiny model on the CPU, so that it is the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.compiled import eager_compiler
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import tiny_model

_SIZES = EngineConfig(max_rows=2, max_context=32, block_size=4, optimize_cpu=False, slot_table=False)
#: The engine that each lesson leaves behind.
LESSONS: dict[str, EngineConfig] = {
    "00_decode_step": _SIZES,
    "01_graph_breaks": replace(_SIZES, compile_decode=True),
    "02_decode_plan": replace(_SIZES, compile_decode=True),
    "03_slot_table": replace(_SIZES, compile_decode=True, slot_table=True),
    "04_bucketing": replace(_SIZES, compile_decode=True, slot_table=True, bucket_decode=True, width_multiple=16),
    "05_persistent_inputs": replace(
        _SIZES, compile_decode=True, slot_table=True, bucket_decode=True, width_multiple=16, persist_inputs=True
    ),
}


@dataclass(frozen=True)
class LedgerRow:
    """What one decode step of two rows costs and what of it moves.

    ``moving_addresses`` counts the tensors handed to the forward, and the logits it hands back, that lie at another
    address one step later; ``bytes_moved`` is the traffic of all launches, read and written.
    """

    lesson: str
    launches: int
    allocations: int
    host_syncs: int
    moving_addresses: int
    bytes_moved: int


def measure(lesson: str) -> LedgerRow:
    """The ledger's row for ``lesson``, measured now."""
    # A compiled function hides its operations from the trace: its graph is run operation by operation here.
    with torch.compiler.set_stance("force_eager"):
        return _measure(lesson)


def _measure(lesson: str) -> LedgerRow:
    engine = Engine.build(tiny_model(), None, LESSONS[lesson], eager_compiler)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        engine.submit(prompt, SamplingParams(max_tokens=8))
    engine.step()
    first = forward_tensors(engine)
    with StepTrace() as trace:
        second = forward_tensors(engine)
    # `first` is still alive here: an allocator could otherwise hand its addresses out again.
    moving = sum(first[name].data_ptr() != second[name].data_ptr() for name in first)
    return LedgerRow(
        lesson,
        launches=len(trace.launches),
        allocations=trace.allocations,
        host_syncs=len(trace.syncs),
        moving_addresses=moving,
        bytes_moved=trace.bytes_read + trace.bytes_written,
    )


def forward_tensors(engine: Engine) -> dict[str, Tensor]:
    """Run one decode step and return what its forward was handed and handed back, by name."""
    seen: dict[str, Tensor] = {}

    def note(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        input_ids, positions, write_slots, _, read = args
        seen.update(
            input_ids=input_ids,
            positions=positions,
            write_slots=write_slots,
            slot_mapping=read.slot_mapping,
            context_lens=read.context_lens,
            logits=output,
        )

    handle = engine.model.register_forward_hook(note)
    try:
        engine.step()
    finally:
        handle.remove()
    return seen


def ledger(last: str) -> pd.DataFrame:
    """The ledger from the first lesson to ``last``, indexed by lesson."""
    names = list(LESSONS)
    rows = [vars(measure(name)) for name in names[: names.index(last) + 1]]
    return pd.DataFrame(rows).set_index("lesson")
