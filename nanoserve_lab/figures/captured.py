"""The diagram of lesson 06: what a recorded step holds, who checks it, how long its output lives, what it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from nanoserve_lab.bench.capture import pool_table
from nanoserve_lab.buckets import check_pad_inert, check_shape_in_set
from nanoserve_lab.captured import CapturedGraph, check_replay_rows, tape_recorder, workspace_bytes
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.engine.sampling import Sampler
from nanoserve_lab.figures.diagrams import Canvas
from nanoserve_lab.figures.registry import figure
from nanoserve_lab.figures.style import Palette, Picture
from nanoserve_lab.inputs import (
    check_addresses_stable,
    check_snapshots_present,
    check_step_inputs_persistent,
    input_bytes,
)
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.slots import SlotTable, check_mapping_is_window, check_window_intact

#: The engine of the log's memory figures: rows, context, heads.
PRICED = (256, 8192, 32)
#: The inputs of a decode step, all of them windows.
WINDOWS = ("input_ids", "positions", "write_slots", "context_lens", "slot_mapping")


class Window:
    """A deferred readback that keeps each step's tokens as the tensor they came in until ``lag`` later steps ran."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.steps: deque[tuple[Tensor, Sequence[Any]]] = deque()

    def __len__(self) -> int:
        return len(self.steps)

    def push(self, tokens: Tensor, requests: Sequence[Any]) -> None:
        """Keep the step's ``tokens`` ``[rows]``."""
        self.steps.append((tokens, requests))

    def due(self, drain: bool = False) -> Iterator[tuple[Any, int]]:
        """Requests and tokens of the steps that are read now."""
        while len(self.steps) > (0 if drain else self.lag):
            tokens, requests = self.steps.popleft()
            yield from zip(requests, tokens.tolist(), strict=True)


def sampler_inside(engine: Engine) -> None:
    """Break ``engine``: its recorded step ends with the token, so that the fixed output holds tokens, not logits."""
    decode, forward, sample = engine.decode_graphs, engine.forward, engine._sample

    def sampled(sampler: Sampler, logits: Tensor) -> Tensor:
        return logits if logits.dim() == 1 else sample(sampler, logits)  # a prefill's are logits still

    decode.forward = lambda *tensors: forward(*tensors).argmax(-1)
    decode._logits = torch.zeros(engine.config.max_rows, dtype=torch.int64, device=engine.model.device)
    engine._sample = sampled  # type: ignore[method-assign]


@dataclass(frozen=True)
class CaptureRun:
    """Two rows, recorded in their first decode step and replayed in two more.

    ``first`` and ``later`` are the values of the held plan's windows after the first and the third step, by name;
    ``once`` and ``always`` count the calls that handed values to the host in each gate before recording (a step of
    three rows, padded to four) and on a replay. ``kept`` has, for the sampler outside and inside the recording, tokens
    and numbered addresses of the three tensors that a deferred window holds.
    """

    graph: CapturedGraph
    first: dict[str, list[Any]]
    later: dict[str, list[Any]]
    once: dict[str, int]
    always: dict[str, int]
    kept: dict[bool, tuple[list[int], list[int]]]


def _engine(prompts: Sequence[Sequence[int]]) -> Engine:
    config = EngineConfig(
        max_rows=4,
        max_context=16,
        block_size=4,
        optimize_cpu=False,
        bucket_decode=True,
        width_multiple=8,
        persist_inputs=True,
        capture_decode=True,
    )
    engine = Engine.build(tiny_model(dtype=torch.float64), None, config, recorder=tape_recorder)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=10))
    return engine


def capture_run() -> CaptureRun:
    """The run that the diagram draws, on the tape."""
    engine = _engine(([1, 2, 3], [4, 5, 6]))
    engine.step()
    values = []
    for _ in range(3):
        engine.step()
        (graph,) = engine.decode_graphs.graphs.values()
        assert engine.inputs is not None
        tensors = (engine.inputs.input_ids.window(2), *graph.plan.tensors)
        values.append({name: tensor.tolist() for name, tensor in zip(WINDOWS, tensors, strict=True)})
    return CaptureRun(graph, values[0], values[2], *_waits(), {inside: _kept(inside) for inside in (False, True)})


def _waits() -> tuple[dict[str, int], dict[str, int]]:
    """How often each gate hands values to the host: those before recording, and those on a replay."""
    engine = _engine(([1, 2, 3], [4, 5, 6], [7, 8, 9]))
    for _ in range(2):
        engine.step()
    (graph,) = engine.decode_graphs.graphs.values()
    parts = engine.decode_graphs.parts
    assert parts is not None
    with torch.inference_mode():
        engine.cache.grow()
        plan = engine.planner.plan()
        input_ids = engine._input_tensor(engine._tokens, plan)
    once: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
        (check_mapping_is_window, (plan, parts.table)),
        (check_window_intact, (plan, parts.table, parts.cache)),
        (check_shape_in_set, (plan, parts.buckets)),
        (check_pad_inert, (plan,)),
        (check_step_inputs_persistent, (plan, input_ids, parts.inputs)),
        (check_snapshots_present, (plan,)),
    )
    addresses = parts.addresses
    always: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
        (check_replay_rows, (graph, plan)),
        (check_addresses_stable, (addresses.names, graph.addresses, addresses.read())),
    )
    return ({gate.__name__: _syncs(gate, args) for gate, args in once},
            {gate.__name__: _syncs(gate, args) for gate, args in always})  # fmt: skip


def _syncs(gate: Callable[..., None], arguments: tuple[Any, ...]) -> int:
    with StepTrace() as trace:
        gate(*arguments)
    return len(trace.syncs)


def _kept(inside: bool) -> tuple[list[int], list[int]]:
    engine = _engine(([1, 2, 3],))
    engine.readback = Window(2)  # type: ignore[assignment]
    if inside:
        sampler_inside(engine)
    window: list[Tensor] = []
    engine.step()
    for _ in range(3):
        engine.step()
        # The window has let go of the step just read; the figure keeps what it holds together with the newest.
        window.append(engine._tokens)
    places: dict[int, int] = {}
    return [int(t) for t in window], [places.setdefault(t.data_ptr(), len(places) + 1) for t in window]


@figure(
    name="captured_decode_replay",
    data=None,
    caption=(
        "A recorded decode step: the plan it holds for good, the gates before recording and on every replay, the "
        "output that lives for one step, and the memory of a list of recordings."
    ),
    alt=(
        "Four panels. Upper left, what a replay holds: the plan of step 1. Five of its fields are windows and follow "
        "the run: after step 1 the positions are 3, 3, the write slots 7, 11 and the lengths 4, 4, two steps later 5, "
        "5, then 13, 17 and 6, 6, and input_ids and slot_mapping have changed as well. The sixth, rows, is a Python "
        "tuple: 0, 1 both times. Upper right, the gates: six run in order once a shape, before recording; of these "
        "check_window_intact and check_pad_inert read values, which the host must wait for. Two run on every replay, "
        "check_replay_rows and check_addresses_stable; they read a tuple and addresses, and no value. "
        "Lower left, the output is a buffer too. A deferred window holds the tokens of three steps: with the sampler "
        "outside the recording three tensors at three addresses, 45, 50, 44; with the sampler inside three views of "
        "one address, all 44. Lower right, scores in a shared pool against private ones, at 256 rows, 8,192 tokens and "
        "32 heads: for 576 shapes 268.4 MB against 17,414.2 MB, 64.9 times; 144 shapes 4,554.5 MB, 17.0 times; 36 "
        "shapes 1,339.6 MB, 5.0 times; 9 shapes 535.8 MB, 2.0 times. The largest shape's scores take 268,435,456 "
        "bytes, the slot table 16,777,216, the input buffers 8,192."
    ),
    size=(7.0, 6.7),
)
def captured_decode_replay(picture: Picture, data: None, palette: Palette) -> None:
    """A recorded step's held plan, gates, output and memory: four panels, read from a run of three steps."""
    canvas, run = Canvas.over(picture, palette), capture_run()
    canvas.quarters(
        "A replay runs the step again, and none of its Python",
        "A replay holds the plan of step 1",
        "Gates: values once, addresses always",
        "The output is a buffer too",
        "One pool: a maximum, not a sum",
    )
    _held(canvas, run)
    _gates(canvas, run)
    _outputs(canvas, run)
    _memory(canvas)


def _held(canvas: Canvas, run: CaptureRun) -> None:
    palette = canvas.palette
    columns = ((1.24, "when recorded", run.first), (2.34, "2 steps later", run.later))
    for x, title, _ in columns:
        canvas.text(x + 0.3, 5.78, title, va="center_baseline")
    for at, name in enumerate(WINDOWS):
        y = 5.42 - at * 0.26
        canvas.text(0.16, y + 0.1, name, ha="left", va="center_baseline")
        for x, _, values in columns:
            if name != "slot_mapping":
                _cells(canvas, x, y, np.ravel(values[name]).tolist(), 0.3)
                continue
            for row, slots in enumerate(values[name]):
                fill = _row_fill(palette, row)
                for column, slot in enumerate(slots):
                    canvas.axes.add_patch(
                        Rectangle((x + column * 0.1, y + 0.1 - row * 0.1), 0.1, 0.1, fc=fill if slot else palette.paper,
                                  ec=palette.ink, lw=0.6)
                    )  # fmt: skip
    y = 3.98
    canvas.text(0.16, y + 0.1, "rows", ha="left", va="center_baseline", weight="bold")
    for x, _, _ in columns:
        canvas.text(x + 0.3, y + 0.1, str(run.graph.rows), va="center_baseline", weight="bold")
    canvas.axes.add_patch(
        Rectangle((0.11, y - 0.04), 3.27, 0.28, fill=False, ec=palette.warn, lw=2.2, ls="--")
    )  # fmt: skip
    canvas.text(0.16, 3.76, "Five windows say what the newest step wrote.", ha="left")
    canvas.text(0.16, 3.57, "The tuple says what step 1 said, for ever.", ha="left")
    canvas.text(0.16, 3.38, "replay() itself takes no arguments.", ha="left")


def _gates(canvas: Canvas, run: CaptureRun) -> None:
    palette = canvas.palette
    reads = {
        "check_mapping_is_window": "address",
        "check_window_intact": "values",
        "check_shape_in_set": "shape",
        "check_pad_inert": "values",
        "check_step_inputs_persistent": "addresses",
        "check_snapshots_present": "Python",
        "check_replay_rows": "a tuple",
        "check_addresses_stable": "addresses",
    }
    groups = ((5.84, "once a shape, in this order", run.once), (4.32, "on every replay", run.always))
    for top, title, gates in groups:
        canvas.text(3.64, top, title, ha="left", va="center_baseline", color=palette.muted)
        canvas.text(6.07, top, "reads", ha="left", va="center_baseline", color=palette.muted)
        for at, (gate, waits) in enumerate(gates.items()):
            y = top - 0.2 * (at + 1)
            colour = palette.warn if waits else palette.ink
            canvas.text(3.64, y, gate, ha="left", va="center_baseline")
            canvas.text(6.07, y, reads[gate], ha="left", va="center_baseline", color=colour,
                        weight="bold" if waits else "normal")  # fmt: skip
    canvas.text(3.64, 3.57, f"Values handed to the host: {sum(run.once.values())} before a", ha="left")
    canvas.text(3.64, 3.38, f"recording, {sum(run.always.values())} on a replay.", ha="left")


def _outputs(canvas: Canvas, run: CaptureRun) -> None:
    palette = canvas.palette
    for step in range(3):
        canvas.text(1.62 + step * 0.66, 2.34, f"step {step + 1}", size=8.5, color=palette.muted, va="center_baseline")
    for y, inside, title in ((2.02, False, "sampler outside the recording"), (1.1, True, "sampler inside")):
        colour = palette.warn if inside else palette.accent
        top = y + (0.54 if not inside else 0.38)
        canvas.text(0.16, top, title, ha="left", va="center_baseline", color=colour, weight="bold")
        canvas.text(0.16, y + 0.1, "window holds", ha="left", va="center_baseline")
        for step, (token, place) in enumerate(zip(*run.kept[inside], strict=True)):
            left = 1.42 + step * 0.66
            fill = _row_fill(palette, 3 if inside else step)
            canvas.axes.add_patch(Rectangle((left, y), 0.4, 0.22, fc=fill, ec=palette.ink, lw=0.8))
            canvas.text(left + 0.2, y + 0.11, str(token), color=palette.text_on(fill), va="center_baseline")
            canvas.text(left + 0.2, y - 0.12, f"address {place}", size=8.5, color=palette.muted)
    canvas.text(0.16, 0.66, "A replay writes where the recording wrote:", ha="left")
    canvas.text(0.16, 0.47, "its output lives for one step. What crosses a", ha="left")
    canvas.text(0.16, 0.28, "step must be the sampler's own tensor.", ha="left")


def _memory(canvas: Canvas) -> None:
    palette = canvas.palette
    rows, context, heads = PRICED
    table = pool_table(rows, context, heads)
    shared = table["shared_bytes"].iloc[0]
    canvas.text(3.64, 2.6, f"scores in MB, {rows} rows, {context:,} tokens, {heads} heads", ha="left", size=8.5,
                color=palette.muted)  # fmt: skip
    for x, title in ((4.16, "shapes"), (4.98, "shared"), (6.02, "private"), (6.84, "times")):
        canvas.text(x, 2.36, title, ha="right", va="center_baseline", size=8.5, color=palette.muted)
    for at, line in enumerate(table.to_dict("records")):
        y = 2.14 - at * 0.2
        for x, text in (
            (4.16, f"{line['shapes']}"),
            (4.98, f"{line['shared_bytes'] / 1e6:,.1f}"),
            (6.02, f"{line['private_bytes'] / 1e6:,.1f}"),
            (6.84, f"{line['ratio']:.1f}x"),
        ):
            canvas.text(x, y, text, ha="right", va="center_baseline", weight="bold" if x == 4.98 else "normal")
    assert (table["shared_bytes"] == shared).all()
    canvas.text(3.64, 1.24, "bytes of one step at the top of the list", ha="left", size=8.5, color=palette.muted)
    lines = (
        ("scores [rows, heads, 1, context]", workspace_bytes(rows, context, heads)),
        ("the slot table", SlotTable(rows, context).data.nbytes),
        ("the four input buffers", input_bytes(rows)),
    )
    for at, (name, size) in enumerate(lines):
        y = 1.02 - at * 0.2
        canvas.text(3.64, y, name, ha="left", va="center_baseline")
        canvas.text(6.84, y, f"{size:,}", ha="right", va="center_baseline", weight="bold")
    canvas.text(3.64, 0.34, "The largest shape sets the price, not the list.", ha="left")


def _row_fill(palette: Palette, row: int) -> str:
    return palette.families[("elementwise", "norm", "embedding", "sampling")[row % 4]]


def _cells(canvas: Canvas, x: float, y: float, values: Sequence[int], size: float) -> None:
    """A row of cells with their numbers, a colour a row of the batch."""
    for row, value in enumerate(values):
        fill = _row_fill(canvas.palette, row)
        canvas.axes.add_patch(Rectangle((x + row * size, y), size, 0.2, fc=fill, ec=canvas.palette.ink, lw=0.8))
        canvas.text(x + (row + 0.5) * size, y + 0.1, str(value), size=8.5, color=canvas.palette.text_on(fill),
                    va="center_baseline")  # fmt: skip
