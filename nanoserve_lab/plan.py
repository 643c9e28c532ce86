"""Day 50: all that a decode step must know is worked out on the host before the forward, and handed over as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanoserve_lab.unsound import Unsound

IntArray = NDArray[np.int64]
#: The host's copy of a tensor's values: a tuple, or an array that nobody else writes to.
Snapshot = tuple[int, ...] | IntArray


class PlanUnsound(Unsound):
    """A plan that does not say what the cache says now."""

    lesson: ClassVar[str] = "02_decode_plan"


@dataclass(frozen=True)
class DecodePlan:
    """The addresses of one decode step, one new token a row, all tensors int64 on the model's device.

    ``rows`` are the table rows that the tensors cover, padding included: ``(0, .., n - 1)``; the first ``live`` hold
    sequences. ``positions`` ``[rows, 1]``; ``write_slots`` ``[rows]``, where K and V of the new token go;
    ``context_lens`` ``[rows]``, the new token included; ``slot_mapping`` ``[rows, width]``, the slots to read, the sink
    behind a row's end. A padded row has position 0, writes slot 0 (the sink), and reads one token there.

    The snapshots are the host's copies of two tensors as they were when the plan was made. A plan whose tensors are
    its own needs none; one whose tensors are shared storage, which the next step writes through, has no other witness.
    """

    rows: tuple[int, ...]
    live: int
    positions: Tensor
    write_slots: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    context_snapshot: Snapshot | None = None
    write_snapshot: Snapshot | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, padding included, and columns of the read rectangle: what a compiled or recorded step is chosen by."""
        return len(self.rows), self.slot_mapping.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the forward takes beside the token ids, in its order."""
        return self.positions, self.write_slots, self.context_lens, self.slot_mapping

    @property
    def context_list(self) -> list[int]:
        """The rows' context lengths when the plan was made; without a snapshot they are read from the device."""
        return _witness(self.context_snapshot, self.context_lens)

    @property
    def write_list(self) -> list[int]:
        """The slots written, when the plan was made; without a snapshot they are read from the device."""
        return _witness(self.write_snapshot, self.write_slots)


def _witness(snapshot: Snapshot | None, tensor: Tensor) -> list[int]:
    source = tensor if snapshot is None else np.asarray(snapshot)
    values: list[int] = source.tolist()
    return values


class PlannedCache(Protocol):
    """What a planner asks of a K/V cache whose rows ``0 .. rows - 1`` have just grown by one token.

    ``lengths`` ``[max_rows]`` are the rows' tokens and ``newest_slots`` ``[max_rows]`` the slots of the newest; both
    are 0 past the rows that run. ``longest`` is the largest of ``lengths``.
    """

    rows: int
    longest: int
    lengths: IntArray
    newest_slots: IntArray

    def gather(self, width: int) -> IntArray:
        """The rows' slots, ``[rows, width]``, the sink behind a row's end."""

    def tensor(self, values: IntArray) -> Tensor:
        """A copy of ``values`` on the pool's device."""


class Windows(Protocol):
    """A table of slots whose rectangle is a window: `slots.SlotTable`."""

    def read(self, rows: Sequence[int], width: int, lengths_writer: Any = None) -> tuple[Tensor, Tensor]:
        """The window and the rows' lengths."""


class Shapes(Protocol):
    """A closed set of shapes: `buckets.BucketSet`."""

    def fit(self, rows: int, context: int) -> tuple[int, int]:
        """The smallest shape of the set that covers ``rows`` and ``context``."""


class Buffer(Protocol):
    """A tensor that is written in place: `inputs.InputBuffer`."""

    def write(self, values: IntArray) -> Tensor:
        """Write ``values`` to the first rows; the window over them."""


class Buffers(Protocol):
    """The step's input buffers: `inputs.DecodeInputs`."""

    @property
    def positions(self) -> Buffer: ...
    @property
    def write_slots(self) -> Buffer: ...
    @property
    def context_lens(self) -> Buffer: ...


class Planner:
    """Builds the plan of the next step from the parts it is handed.

    The read rectangle is gathered from the ``cache``, or is a window of ``table``; with ``buckets`` its shape is the
    smallest of a closed set that fits, and the rows added are padding. The other tensors are built anew, or are windows
    of ``inputs``; then the plan carries snapshots.
    """

    def __init__(
        self,
        cache: PlannedCache,
        table: Windows | None = None,
        buckets: Shapes | None = None,
        inputs: Buffers | None = None,
    ) -> None:
        if buckets is not None and table is None:
            raise ValueError("buckets: a padded rectangle is a window on a slot table, and this planner has none")
        self._cache, self._table, self._buckets, self._inputs = cache, table, buckets, inputs
        self._prefixes: dict[int, tuple[int, ...]] = {}

    def plan(self) -> DecodePlan:
        """The plan of one decode step over the rows that run, after they have grown; at least one must run."""
        cache, inputs = self._cache, self._inputs
        live = cache.rows
        shape = live, cache.longest
        rows, width = shape if self._buckets is None else self._buckets.fit(*shape)
        prefix = self._prefix(rows)
        context, slots = cache.lengths[:rows], cache.newest_slots[:rows]
        if rows > live:
            # A padded row is one token long, at position 0, and its slot is the sink.
            context = context.copy()
            context[live:] = 1
        positions = context - 1
        if self._table is None:
            mapping, context_lens = cache.tensor(cache.gather(width)), None
        else:
            mapping, context_lens = self._table.read(
                prefix, width, None if inputs is None else inputs.context_lens.write
            )
        if inputs is None:
            lens = cache.tensor(context) if context_lens is None else context_lens
            return DecodePlan(prefix, live, cache.tensor(positions[:, None]), cache.tensor(slots), lens, mapping)
        lens = inputs.context_lens.write(context) if context_lens is None else context_lens
        return DecodePlan(
            prefix,
            live,
            inputs.positions.write(positions),
            inputs.write_slots.write(slots),
            lens,
            mapping,
            context_snapshot=context.copy(),
            write_snapshot=slots.copy(),
        )

    def _prefix(self, rows: int) -> tuple[int, ...]:
        known = self._prefixes.get(rows)
        if known is None:
            known = self._prefixes[rows] = tuple(range(rows))
        return known


def check_plan_current(plan: DecodePlan, cache: PlannedCache) -> None:
    """The plan describes the cache as it is now: the same rows, each as long as the plan says and with its newest token
    in the slot that the plan writes.

    Without snapshots it reads ``context_lens`` and ``write_slots``: on a device that is a synchronisation. Raises
    `PlanUnsound`.
    """
    if plan.live != cache.rows:
        raise PlanUnsound(f"plan: made for {plan.live} rows, {cache.rows} run now; plan again after the batch changed")
    for row, (planned, now) in enumerate(zip(plan.context_list, cache.lengths[: cache.rows].tolist(), strict=False)):
        if planned != now:
            raise PlanUnsound(
                f"context_lens: the plan has row {row} at {planned} tokens, the cache at {now}; "
                "a step ran after the plan was made, and this one would write its token over an older one"
            )
    # A row that another sequence of the same length has taken differs in its blocks alone.
    for row, (planned, now) in enumerate(zip(plan.write_list, cache.newest_slots[: cache.rows].tolist(), strict=False)):
        if planned != now:
            raise PlanUnsound(
                f"write_slots: the plan writes row {row}'s token to slot {planned}, the cache has slot {now} for it; "
                "another sequence is in that row now, and this step would write into blocks that are not its own"
            )
