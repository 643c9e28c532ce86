"""Day 54: the decode step recorded once a shape and replayed after that."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from nanoserve_lab.buckets import BucketSet, check_pad_inert, check_shape_in_set
from nanoserve_lab.compiled import CompiledDecode, check_single_graph
from nanoserve_lab.inputs import (
    Addresses,
    DecodeInputs,
    check_addresses_stable,
    check_snapshots_present,
    check_step_inputs_persistent,
)
from nanoserve_lab.plan import DecodePlan, PlannedCache
from nanoserve_lab.recorders import Recorder, Recording, eager_recorder, tape_recorder
from nanoserve_lab.recorders.cuda import cuda_graph_recorder
from nanoserve_lab.slots import SlotTable, check_mapping_is_window, check_window_intact
from nanoserve_lab.unsound import Unsound

__all__ = [
    "CaptureUnsound",
    "CapturedDecode",
    "CapturedGraph",
    "cuda_graph_recorder",
    "default_recorder",
    "eager_recorder",
    "tape_recorder",
]

Shape = tuple[int, int]
Forward = Callable[..., Tensor]
_log = logging.getLogger(__name__)


class CaptureUnsound(Unsound):
    """A recorded step that must not be replayed, or a list of them that is not what it should be."""

    lesson: ClassVar[str] = "06_graph_capture"


def default_recorder(step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording:
    """CUDA graphs where the arguments are on CUDA, the tape elsewhere."""
    cuda = any(isinstance(arg, Tensor) and arg.is_cuda for arg in args)
    return (cuda_graph_recorder if cuda else tape_recorder)(step, args, pool)


@dataclass
class CapturedGraph:
    """One recorded shape.

    ``replay()`` takes no arguments; it reads the inputs at ``addresses`` and writes ``output`` ``[rows, vocab]``, which
    lives until the next replay of any shape. ``plan`` is the plan of the recorded step, held for good: its tensors are
    storage that is written in place, so only ``rows``, a Python tuple, says for ever what it said then. ``seconds`` is
    what recording took, ``nodes`` the number of recorded operations, on CUDA that of the graph's nodes.
    """

    plan: DecodePlan
    replay: Callable[[], None]
    output: Tensor
    addresses: tuple[int, ...]
    pool: Any
    nodes: int
    seconds: float
    replays: int = 0

    @property
    def shape(self) -> Shape:
        """Rows, padding included, and width."""
        return self.plan.shape

    @property
    def rows(self) -> tuple[int, ...]:
        """The table rows that the recorded windows cover."""
        return self.plan.rows


@dataclass(frozen=True)
class StepParts:
    """What a recorded step reads: the parts whose gates look before it is recorded, and ``addresses`` of everything
    that must stay where it is. ``compiled`` is None where nothing compiles."""

    cache: PlannedCache
    inputs: DecodeInputs
    table: SlotTable
    buckets: BucketSet
    addresses: Addresses
    compiled: CompiledDecode | None = None


class CapturedDecode:
    """Replays a step whose shape has been recorded, records one that has not, and runs the rest eagerly.

    ``forward`` takes ``(input_ids, *plan.tensors)``. All shapes write windows of one buffer of ``logits`` ``[max_rows,
    vocab]``. Without ``recorder`` it is off and every step is eager. ``eager_steps`` counts those by reason,
    ``captures`` the recordings; ``failed`` says which shapes could not be recorded, and why: their steps are eager, or,
    with ``strict``, the failure is raised. ``graphs`` are the recordings by shape.
    """

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder | None = None,
        parts: StepParts | None = None,
        logits: Tensor | None = None,
        after_recording: Callable[[], None] = lambda: None,
        strict: bool = False,
    ) -> None:
        if recorder is not None and (parts is None or logits is None):
            raise ValueError("a recorder needs the step's parts and a buffer of logits")
        self.forward, self.recorder, self.parts, self.strict = forward, recorder, parts, strict
        self.graphs: dict[Shape, CapturedGraph] = {}
        self.failed: dict[Shape, str] = {}
        self.eager_steps: Counter[str] = Counter()
        self._logits, self._after_recording = logits, after_recording

    @property
    def captures(self) -> int:
        """Recordings made."""
        return len(self.graphs)

    @property
    def replays(self) -> int:
        """Replays of all recordings, each recording step's own among them."""
        return sum(graph.replays for graph in self.graphs.values())

    def __call__(self, plan: DecodePlan | tuple[Tensor, ...], input_ids: Tensor) -> Tensor:
        """Logits ``[rows, vocab]``, valid until the next call.

        ``plan`` may be the four tensors of a plan without one: then nothing says what they are, and the step is eager.
        Raises what `check_capture_preconditions` raises before a shape is recorded, and on every replay
        `CaptureUnsound` for other rows and `inputs.InputsUnsound` for anything that has moved.
        """
        if not isinstance(plan, DecodePlan):
            return self._eager("no plan", input_ids, plan)
        if self.recorder is None:
            return self._eager("off", input_ids, plan.tensors)
        graph = self.graphs.get(plan.shape)
        if graph is None:
            if plan.shape in self.failed:
                return self._eager("recording failed", input_ids, plan.tensors)
            graph = self._record(plan, input_ids)
            if graph is None:
                return self._eager("recording failed", input_ids, plan.tensors)
        else:
            assert self.parts is not None
            check_replay_rows(graph, plan)
            check_addresses_stable(self.parts.addresses.names, graph.addresses, self.parts.addresses.read())
        # Also after recording: what a recording computed on the way is not a result that anybody should read.
        graph.replay()
        graph.replays += 1
        return graph.output

    def _eager(self, reason: str, input_ids: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        self.eager_steps[reason] += 1
        return self.forward(input_ids, *tensors)

    def _record(self, plan: DecodePlan, input_ids: Tensor) -> CapturedGraph | None:
        assert self.recorder is not None
        assert self.parts is not None
        assert self._logits is not None
        output = self._logits[: len(plan.rows)]
        if self.parts.compiled is not None:
            self.forward(input_ids, *plan.tensors)  # the graph that the first precondition counts
        check_capture_preconditions(plan, input_ids, self.parts)
        pool = next((graph.pool for graph in self.graphs.values()), None)
        start = time.perf_counter()
        try:
            recording = self.recorder(self._step(output), (input_ids, *plan.tensors), pool)
        except Exception as error:
            self._note_failure(plan.shape, error)
            return None
        seconds = time.perf_counter() - start
        self._after_recording()
        graph = CapturedGraph(
            plan, recording.replay, output, self.parts.addresses.read(), recording.pool, recording.size, seconds
        )
        self.graphs[plan.shape] = graph
        return graph

    def _step(self, output: Tensor) -> Callable[..., Tensor]:
        forward = self.forward

        def step(*tensors: Tensor) -> Tensor:
            return output.copy_(forward(*tensors))

        return step

    def _note_failure(self, shape: Shape, error: Exception) -> None:
        if self.strict:
            if isinstance(error, Unsound):
                raise error
            raise CaptureUnsound(f"shape {shape[0]} x {shape[1]}: could not be recorded: {error}") from error
        if not self.failed:
            _log.warning("decode steps stay eager, shape %d x %d could not be recorded: %s", *shape, error)
        self.failed[shape] = str(error)


class CaptureSwitches(Protocol):
    """The switches of an engine's configuration that recording needs."""

    @property
    def bucket_decode(self) -> bool: ...
    @property
    def persist_inputs(self) -> bool: ...


def check_capture_ready(config: CaptureSwitches) -> None:
    """Recorded steps need a closed set of shapes and inputs that stay. Raises `CaptureUnsound` naming what is off."""
    missing = [name for name in ("bucket_decode", "persist_inputs") if not getattr(config, name)]
    if missing:
        raise CaptureUnsound(
            f"capture_decode: needs {' and '.join(missing)}; a recording fixes the step's shape and the addresses of "
            "its inputs"
        )


def check_capture_preconditions(plan: DecodePlan, input_ids: Tensor, parts: StepParts) -> None:
    """Everything that must hold before a shape is recorded, in the order of the days; once a shape, because most of it
    reads values. Each gate's own exception comes through as it is: its type says which day's promise is broken."""
    if parts.compiled is not None:
        check_single_graph(parts.compiled)
    check_mapping_is_window(plan, parts.table)
    check_window_intact(plan, parts.table, parts.cache)
    check_shape_in_set(plan, parts.buckets)
    check_pad_inert(plan)
    check_step_inputs_persistent(plan, input_ids, parts.inputs)
    check_snapshots_present(plan)


def check_replay_rows(graph: CapturedGraph, plan: DecodePlan) -> None:
    """The plan covers the table rows that the recorded windows are. Reads a Python tuple. Raises `CaptureUnsound`."""
    if plan.rows != graph.rows:
        raise CaptureUnsound(
            f"rows: the plan covers rows {list(plan.rows)}, the recording of {graph.shape[0]} x {graph.shape[1]} rows "
            f"{list(graph.rows)}; a replay would read and write the other sequences"
        )


def check_all_shapes_captured(decode: CapturedDecode, shapes: Iterable[Shape]) -> None:
    """Every shape of the list has been recorded. Raises `CaptureUnsound`."""
    shapes = list(shapes)
    missing = [shape for shape in shapes if shape not in decode.graphs]
    if missing:
        rows, width = missing[0]
        why = decode.failed.get(missing[0], "it has not been seen yet")
        raise CaptureUnsound(
            f"{len(missing)} of {len(shapes)} shapes are not recorded, the first {rows} x {width}: {why}"
        )


def check_replays_dominate(decode: CapturedDecode, min_ratio: float) -> None:
    """At least ``min_ratio`` of the steps were replays. Raises `CaptureUnsound`."""
    eager = sum(decode.eager_steps.values())
    steps = decode.replays + eager
    if not steps or decode.replays / steps < min_ratio:
        raise CaptureUnsound(
            f"{decode.replays} of {steps} steps were replays, wanted {min_ratio:.0%}; eager: {dict(decode.eager_steps)}"
        )


def check_pool_shared(graphs: Iterable[CapturedGraph]) -> None:
    """All recordings share one memory pool. Raises `CaptureUnsound`."""
    pools = [graph.pool for graph in graphs]
    distinct = [pool for i, pool in enumerate(pools) if not any(pool is other or pool == other for other in pools[:i])]
    if len(distinct) > 1:
        raise CaptureUnsound(
            f"{len(pools)} recordings in {len(distinct)} pools, wanted one: each pool pays for its peak"
        )


def check_pool_budget(shapes: Sequence[Shape], heads: int, budget_bytes: int) -> None:
    """The scores of the largest shape fit into ``budget_bytes``. Raises `CaptureUnsound`."""
    needed = shared_pool_bytes(shapes, heads)
    if needed > budget_bytes:
        raise CaptureUnsound(
            f"pool: the scores of the largest of {len(shapes)} shapes take {needed:,} bytes, {budget_bytes:,} are left"
        )


def check_output_not_held(graph: CapturedGraph, tensors: Iterable[Tensor]) -> None:
    """None of ``tensors``, which outlive the step, shares storage with the recording's output: the next replay writes
    through it. Raises `CaptureUnsound`."""
    storage = graph.output.untyped_storage().data_ptr()
    for at, tensor in enumerate(tensors):
        if not tensor.is_mkldnn and tensor.numel() and tensor.untyped_storage().data_ptr() == storage:
            raise CaptureUnsound(
                f"output: tensor {at} of shape {tuple(tensor.shape)} lies in the recorded step's output, which the "
                "next replay overwrites; keep a copy, or sample before the next step",
                address=tensor.data_ptr(),
            )


def score_cells(rows: int, context: int, heads: int) -> int:
    """Cells of the score rectangle ``[rows, heads, 1, context]`` of the plain read."""
    return rows * heads * context


def workspace_bytes(rows: int, context: int, heads: int, itemsize: int = 4) -> int:
    """Bytes of the scores of one shape."""
    return score_cells(rows, context, heads) * itemsize


def shared_pool_bytes(shapes: Iterable[Shape], heads: int, itemsize: int = 4) -> int:
    """Bytes of scores of a list of shapes ``(rows, width)`` in one pool: those of the largest."""
    return max(workspace_bytes(rows, width, heads, itemsize) for rows, width in shapes)


def private_pool_bytes(shapes: Iterable[Shape], heads: int, itemsize: int = 4) -> int:
    """Bytes of scores of a list of shapes with a pool each: their sum."""
    return sum(workspace_bytes(rows, width, heads, itemsize) for rows, width in shapes)


def pool_sharing_ratio(shapes: Sequence[Shape], heads: int, itemsize: int = 4) -> float:
    """Private over shared bytes."""
    return private_pool_bytes(shapes, heads, itemsize) / shared_pool_bytes(shapes, heads, itemsize)


def capture_cost_s(shapes: Sequence[Shape], seconds_per_capture: float) -> float:
    """Seconds to record a list of shapes, which some client waits for unless it happens before the first."""
    return len(shapes) * seconds_per_capture


def launch_saving_s(launches: int, launch_s: float, replay_s: float) -> float:
    """Seconds that one replay saves: ``launches`` launches of ``launch_s`` each, less its own ``replay_s``."""
    return launches * launch_s - replay_s


def capture_breakeven_steps(cost_s: float, saving_s: float) -> float:
    """Steps after which recording has paid, rounded up; ``math.inf`` where a replay saves nothing."""
    return math.ceil(cost_s / saving_s) if saving_s > 0 else math.inf
