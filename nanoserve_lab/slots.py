"""Day 51: the read rectangle is a window on one table, extended by a cell a step instead of gathered anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve_lab.plan import DecodePlan, PlannedCache
from nanoserve_lab.unsound import Unsound

IntArray = NDArray[np.int64]
#: Puts ``values`` ``[rows]`` into a tensor of the caller's and returns it.
LengthsWriter = Callable[[IntArray], Tensor]


class SlotsUnsound(Unsound):
    """The read rectangle is not the window on the slot table that it must be, or the table disagrees with the plan."""

    lesson: ClassVar[str] = "03_slot_table"


class SlotTable:
    """The slots of every row's tokens: ``data`` ``[max_rows, max_context]`` int64 on ``device``, allocated once.

    The rows in use are ``0 .. n - 1``. A cell at or past its row's length is 0, the sink slot: storage that nobody has
    written is a legal address. The host works on a NumPy ``mirror``, which on the CPU is the table itself; elsewhere
    each change is one copy of the cells it touched.
    """

    def __init__(self, max_rows: int, max_context: int, device: torch.device | str = "cpu") -> None:
        for name, value in (("max_rows", max_rows), ("max_context", max_context)):
            if value < 1:
                raise ValueError(f"{name}: wanted 1 or more, got {value}")
        self.max_rows, self.max_context = max_rows, max_context
        # Rows lie one cell further apart than the table is wide. A window of its full width would be contiguous
        # otherwise and any other not, and a compiler makes a graph of its own for each of the two.
        pitch = max_context + 1
        cells = torch.zeros(max_rows * pitch, dtype=torch.int64, device=device)
        self.data = cells.view(max_rows, pitch)[:, :max_context]
        self._strides = self.data.stride()
        self._on_host = cells.device.type == "cpu"
        host = cells if self._on_host else torch.zeros_like(cells, device="cpu")
        self._cells: IntArray = host.numpy()
        self.mirror: IntArray = self._cells.reshape(max_rows, pitch)[:, :max_context]
        self.lengths: IntArray = np.zeros(max_rows, dtype=np.int64)
        self._row_starts = np.arange(max_rows) * pitch
        # The rows that were read last, a tuple: the same one need not be looked through again.
        self._prefix: tuple[int, ...] = ()
        self._device_cells = cells

    def fill(self, row: int, slots: IntArray) -> None:
        """Give ``row``, which was empty, a sequence whose tokens lie in ``slots`` ``[tokens]``.

        Raises `SlotsUnsound`, writing nothing, for a slot that no sequence can own or more tokens than the table is
        wide.
        """
        _check_slots(slots)
        if len(slots) > self.max_context:
            raise SlotsUnsound(
                f"slot table: {len(slots)} slots for row {row}, the table is {self.max_context} columns wide"
            )
        self.mirror[row, : len(slots)] = slots
        self.lengths[row] = len(slots)
        self._send(row, len(slots))

    def extend(self, slots: IntArray) -> None:
        """One more token in each of the first ``len(slots)`` rows, written to its cell.

        Raises `SlotsUnsound`, writing nothing, as `fill` does.
        """
        rows = len(slots)
        lengths = self.lengths[:rows]
        _check_slots(slots)
        if max(lengths.tolist(), default=0) >= self.max_context:
            row = int(lengths.argmax())
            raise SlotsUnsound(
                f"slot table: column {self.max_context} of row {row}, the table has columns 0 to {self.max_context - 1}"
            )
        cells = self._row_starts[:rows] + lengths
        self._cells[cells] = slots
        lengths += 1
        if not self._on_host:
            sent = torch.from_numpy(np.stack([cells, slots])).pin_memory().to(self.data.device, non_blocking=True)
            self._device_cells.index_copy_(0, sent[0], sent[1])

    def move(self, source: int, target: int) -> None:
        """The prefix rule: ``source``, the last row in use, takes the place of ``target``, which ends. No other row
        changes; the place that ``source`` leaves is the sink again. They may be the same row."""
        old, new = int(self.lengths[target]), int(self.lengths[source])
        if source != target:
            self.mirror[target, :new] = self.mirror[source, :new]
            self.mirror[target, new:old] = 0
            self.lengths[target] = new
            self._send(target, max(old, new))
        self.mirror[source, :new] = 0
        self.lengths[source] = 0
        self._send(source, new)

    def read(
        self, rows: Sequence[int], width: int, lengths_writer: LengthsWriter | None = None
    ) -> tuple[Tensor, Tensor]:
        """The window ``[rows, width]`` of the table and the rows' lengths ``[rows]``, both int64.

        The window shares the table's storage and starts where the table starts, whatever its shape. ``rows`` may go
        past the rows in use: those have length 1 and read the sink. The lengths are a fresh tensor, or what
        ``lengths_writer`` makes of them. Raises `SlotsUnsound` where ``rows`` are not ``0 .. n - 1`` (other rows are no
        window, only a gather) or the window is larger than the table.
        """
        count = len(rows)
        if rows is not self._prefix:
            if tuple(rows) != tuple(range(count)):
                raise SlotsUnsound(f"rows: a window covers the first rows of the table in order, got {list(rows)}")
            self._prefix = tuple(rows)
        if not (1 <= count <= self.max_rows and 1 <= width <= self.max_context):
            raise SlotsUnsound(
                f"window: {count} rows x {width} columns of a table of {self.max_rows} x {self.max_context}"
            )
        lengths = self.lengths[:count].copy()
        if not lengths.item(-1):  # rows in use come first, so the last one says whether there is padding
            np.maximum(lengths, 1, out=lengths)
        if lengths_writer is not None:
            written = lengths_writer(lengths)
        else:
            written = torch.from_numpy(lengths)  # a fresh array: nobody else writes to it
            written = written if self._on_host else written.to(self.data.device)
        return self.data.as_strided((count, width), self._strides), written

    def _send(self, row: int, columns: int) -> None:
        if columns and not self._on_host:
            sent = torch.from_numpy(self.mirror[row, :columns].copy()).pin_memory()
            self.data[row, :columns].copy_(sent, non_blocking=True)


def check_mapping_is_window(plan: DecodePlan, table: SlotTable) -> None:
    """The plan's rectangle is the table's own storage, from its first cell, in the table's strides.

    Reads addresses only. Raises `SlotsUnsound`.
    """
    mapping, data = plan.slot_mapping, table.data
    shape = "x".join(map(str, mapping.shape))
    if mapping.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
        raise SlotsUnsound(
            f"slot_mapping {shape}: storage of its own, wanted a window on the slot table "
            f"{'x'.join(map(str, data.shape))}; a rectangle gathered anew lies at another address in every step",
            address=mapping.data_ptr(),
            table_address=data.data_ptr(),
        )
    if mapping.storage_offset() != data.storage_offset():
        raise SlotsUnsound(
            f"slot_mapping {shape}: starts at cell {mapping.storage_offset()} of the slot table, wanted cell "
            f"{data.storage_offset()}"
        )
    if mapping.stride() != data.stride():
        raise SlotsUnsound(f"slot_mapping {shape}: strides {mapping.stride()}, the slot table's are {data.stride()}")


def check_window_intact(plan: DecodePlan, table: SlotTable, cache: PlannedCache | None = None) -> None:
    """The rectangle says what the plan's own witnesses say: each live row ends in the slot that this step writes, holds
    no slot twice, and is the sink behind its end.

    These know a row's newest slot and its length, not its history: with the ``cache`` that was planned for, every slot
    is compared with the blocks that the row owns. Reads the rectangle's values: on a device that is a synchronisation.
    Raises `SlotsUnsound`.
    """
    window = plan.slot_mapping.cpu().numpy()
    owned = None if cache is None else cache.gather(window.shape[1])
    for row in range(plan.live):
        length, slot = plan.context_list[row], plan.write_list[row]
        if not 1 <= length <= window.shape[1]:
            raise SlotsUnsound(f"row {row}: a context of {length} tokens in a window of {window.shape[1]} columns")
        seen = int(window[row, length - 1])
        if seen != slot:
            raise SlotsUnsound(
                f"slot_mapping: row {row} reads its newest token from slot {seen}, the step writes it to slot {slot}"
            )
        used = window[row, :length]
        if owned is not None and (wrong := np.flatnonzero(used != owned[row, :length])).size:
            raise SlotsUnsound(
                f"slot_mapping: row {row} reads token {int(wrong[0])} from slot {int(used[wrong[0]])}, its blocks hold "
                f"that token in slot {int(owned[row, wrong[0]])}"
            )
        if used.min() < 1 or len(np.unique(used)) != length:
            raise SlotsUnsound(f"slot_mapping: row {row} reads the sink or one slot twice in its {length} tokens")
        if window[row, length:].any():
            column = length + int(np.flatnonzero(window[row, length:])[0])
            raise SlotsUnsound(
                f"slot_mapping: row {row} has {length} tokens, but column {column} still holds slot "
                f"{int(window[row, column])}; wanted the sink, 0"
            )
    if tuple(table.lengths[: plan.live]) != tuple(plan.context_list[: plan.live]):
        raise SlotsUnsound(
            f"context_lens: the plan says {plan.context_list[: plan.live]}, the slot table "
            f"{table.lengths[: plan.live].tolist()}"
        )


def _check_slots(slots: IntArray) -> None:
    # Python-style indexing would take -1 for the last slot of the pool; 0 is the sink, which nobody owns.
    least = min(slots.tolist(), default=1)
    if least < 1:
        raise SlotsUnsound(f"slot table: slot {least}; a sequence's tokens lie in slots from 1 on")
