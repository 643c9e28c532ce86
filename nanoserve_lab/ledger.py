"""The decode-step ledger: one row a lesson, counted on the tiny model on the CPU, so that it is the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.compiled import eager_compiler
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.plan import DecodePlan
from nanoserve_lab.recorders import Recording, tape_recorder

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
    "06_graph_capture": replace(
        _SIZES,
        compile_decode=True,
        slot_table=True,
        bucket_decode=True,
        width_multiple=16,
        persist_inputs=True,
        capture_decode=True,
    ),
}
# Arithmetic and measurements: the engine is that of the lesson before.
LESSONS["07_pool_and_breakeven"] = LESSONS["06_graph_capture"]


@dataclass(frozen=True)
class LedgerRow:
    """What one decode step of two rows costs and what of it moves.

    ``moving_addresses`` counts the tensors handed to the forward, and the logits it hands back, that lie at another
    address one step later; ``bytes_moved`` is the traffic of all launches, read and written. A replay is one launch and
    allocates nothing, as on a GPU, where the host hands over the recorded operations at once; their bytes count.
    """

    lesson: str
    launches: int
    allocations: int
    host_syncs: int
    moving_addresses: int
    bytes_moved: int


def measure(lesson: str) -> LedgerRow:
    """The ledger's row for ``lesson``, measured now."""
    # A compiled function hides its operations from the trace: its graph is run operation by operation here. A recording
    # takes the single operations anyway, and wants to see the compiled graph before.
    recorded = LESSONS[lesson].capture_decode
    with nullcontext() if recorded else torch.compiler.set_stance("force_eager"):
        return _measure(lesson)


def _measure(lesson: str) -> LedgerRow:
    recordings: list[Recording] = []

    def keep(step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording:
        recordings.append(tape_recorder(step, args, pool))
        return recordings[-1]

    engine = Engine.build(tiny_model(), None, LESSONS[lesson], eager_compiler, keep)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        engine.submit(prompt, SamplingParams(max_tokens=8))
    engine.step()
    first = forward_tensors(engine)
    with StepTrace() as trace:
        second = forward_tensors(engine)
    # `first` is still alive here: an allocator could otherwise hand its addresses out again.
    moving = sum(first[name].data_ptr() != second[name].data_ptr() for name in first)
    row = LedgerRow(
        lesson,
        launches=len(trace.launches),
        allocations=trace.allocations,
        host_syncs=len(trace.syncs),
        moving_addresses=moving,
        bytes_moved=trace.bytes_read + trace.bytes_written,
    )
    return _with_replays_as_one(row, recordings) if recordings else row


def _with_replays_as_one(row: LedgerRow, recordings: list[Recording]) -> LedgerRow:
    """``row`` of a step that was a replay. The tape stands in for a GPU and runs operation by operation: what a trace
    sees of that goes, one launch and the recorded operations' bytes come in."""
    (recording,) = recordings
    with StepTrace() as tape:
        recording.replay()
    operations = recording.launches()
    return replace(
        row,
        launches=row.launches - len(tape.launches) + 1,
        allocations=row.allocations - tape.allocations,
        bytes_moved=row.bytes_moved
        - (tape.bytes_read + tape.bytes_written)
        + int(operations.bytes_read.sum() + operations.bytes_written.sum()),
    )


def forward_tensors(engine: Engine) -> dict[str, Tensor]:
    """Run one decode step and return what its forward, or its replay, was handed and handed back, by name."""
    seen: dict[str, Tensor] = {}
    decode = engine.decode

    def note(plan: DecodePlan, input_ids: Tensor) -> Tensor:
        logits = decode(plan, input_ids)
        seen.update(
            input_ids=input_ids.view(-1),
            positions=plan.positions.view(-1),
            write_slots=plan.write_slots,
            slot_mapping=plan.slot_mapping,
            context_lens=plan.context_lens,
            logits=logits,
        )
        return logits

    with _instead(engine, "decode", note):
        engine.step()
    return seen


@contextmanager
def _instead(owner: Any, name: str, other: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def ledger(last: str) -> pd.DataFrame:
    """The ledger from the first lesson to ``last``, indexed by lesson."""
    names = list(LESSONS)
    rows = [vars(measure(name)) for name in names[: names.index(last) + 1]]
    return pd.DataFrame(rows).set_index("lesson")
