"""Which blocks each running sequence owns, by batch row, and the addresses that one step reads and writes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanoserve_lab.cache.attention import Span
from nanoserve_lab.cache.pool import SINK_SLOT, KVPool
from nanoserve_lab.device import upload

IntArray = NDArray[np.int64]


class RowTable(Protocol):
    """A table that follows which slots each row owns, such as `slots.SlotTable`."""

    def fill(self, row: int, slots: IntArray) -> None:
        """A sequence came into ``row``."""

    def extend(self, slots: IntArray) -> None:
        """The first ``len(slots)`` rows grew by one token each."""

    def move(self, source: int, target: int) -> None:
        """``target`` ended and the last row ``source`` took its place."""


class PrefillChunk(NamedTuple):
    """Tokens ``start .. stop - 1`` of a sequence that owns ``blocks``; its K and V before ``start`` are written."""

    blocks: list[int]
    start: int
    stop: int


class PrefillAddresses(NamedTuple):
    """What a ragged prefill needs beside the token ids: ``positions`` and ``write_slots`` ``[tokens]`` int64 and a
    `Span` a chunk."""

    positions: Tensor
    write_slots: Tensor
    spans: list[Span]


class PagedCache:
    """Block tables and lengths of the running sequences, one a row; the rows in use are always ``0 .. rows - 1``.

    A row that leaves is filled from the end. ``lengths[row]`` counts the tokens whose K and V are written, or will be
    by the step whose addresses were handed out last, and ``newest_slots[row]`` is the slot of the last of them; both
    are 0 past the rows in use. ``longest`` is the largest length. A ``table`` is told of every change.
    """

    def __init__(self, pool: KVPool, max_rows: int, max_context: int, table: RowTable | None = None) -> None:
        self.pool, self.max_rows, self.max_context = pool, max_rows, max_context
        self._row_table, self._device = table, pool.data.device
        self.rows, self.longest = 0, 0
        self.lengths: IntArray = np.zeros(max_rows, dtype=np.int64)
        self.table: IntArray = np.zeros((max_rows, pool.blocks_for(max_context)), dtype=np.int64)
        self.newest_slots: IntArray = np.zeros(max_rows, dtype=np.int64)
        self._offsets = np.arange(pool.block_size)
        # All rows grow in step, so (grown - length) % block_size of a row never changes; it is the row's phase. The
        # rows of phase grown % block_size are those whose last block is full now. Each list is in order of row.
        self._grown = 0
        self._phases: list[list[int]] = [[] for _ in range(pool.block_size)]

    def owned(self, row: int) -> list[int]:
        """The blocks that ``row`` owns, in order of position."""
        blocks: list[int] = self.table[row, : self.pool.blocks_for(int(self.lengths[row]))].tolist()
        return blocks

    def reserve(self, tokens: int) -> list[int]:
        """Blocks for a sequence of ``tokens`` tokens that is not in a row yet.

        Raises `OutOfBlocks`, taking none, where the pool has not enough.
        """
        return self.pool.allocator.take(self.pool.blocks_for(tokens))

    def add(self, blocks: list[int], tokens: int) -> int:
        """Put a prefilled sequence of ``tokens`` tokens, which owns ``blocks``, into a new last row; its index.

        Raises `ValueError`, changing nothing, where all rows are taken or the tokens exceed ``max_context``.
        """
        if self.rows == self.max_rows:
            raise ValueError(f"all {self.max_rows} rows are taken")
        self._check_context(tokens)
        row = self.rows
        self.table[row, : len(blocks)] = blocks
        self.lengths[row] = tokens
        slots = self.slots(row)
        self.newest_slots[row] = slots[-1]
        if self._row_table is not None:
            self._row_table.fill(row, slots)
        self._phase(tokens).append(row)
        self.rows, self.longest = row + 1, max(self.longest, tokens)
        return row

    def blocks_to_grow(self) -> int:
        """How many new blocks `grow` would take."""
        return len(self._phase(0))

    def can_grow(self) -> bool:
        """Whether the pool has the blocks that `grow` would take."""
        return self.blocks_to_grow() <= self.pool.allocator.num_free

    def grow(self) -> None:
        """Room for one more token in every row.

        Raises, changing nothing, `OutOfBlocks` where the pool has not enough blocks and `ValueError` where a row is at
        ``max_context``.
        """
        if not self.rows:
            return
        self._check_context(self.longest + 1)
        if full := self._phase(0):
            size = self.pool.block_size
            for row, block in zip(full, self.pool.allocator.take(len(full)), strict=True):
                self.table[row, self.lengths.item(row) // size] = block
                self.newest_slots[row] = block * size - 1
        lengths, slots = self.lengths[: self.rows], self.newest_slots[: self.rows]
        lengths += 1
        slots += 1
        self._grown += 1
        self.longest += 1
        if self._row_table is not None:
            self._row_table.extend(slots)

    def _phase(self, length: int) -> list[int]:
        """The rows that are as far from a new block as a row of ``length`` tokens."""
        return self._phases[(self._grown - length) % self.pool.block_size]

    def remove(self, row: int) -> int | None:
        """Free ``row``'s blocks and move the last row into its place; the row that moved, or None."""
        self.pool.allocator.give_back(self.owned(row))
        last = self.rows - 1
        self._phase(int(self.lengths[row])).remove(row)
        if last != row:
            phase = self._phase(int(self.lengths[last]))
            phase.remove(last)
            bisect.insort(phase, row)
        for state in (self.table, self.lengths, self.newest_slots):
            state[row] = state[last]
            state[last] = 0
        if self._row_table is not None:
            self._row_table.move(last, row)
        self.rows, self.longest = last, int(self.lengths.max())
        return last if last != row else None

    def slots(self, row: int) -> IntArray:
        """The slots of the row's tokens in order, ``[length]``."""
        return self._slots(self.table[row], int(self.lengths[row]))

    def _slots(self, blocks: IntArray, tokens: int) -> IntArray:
        blocks = blocks[: self.pool.blocks_for(tokens)]
        return (blocks[:, None] * self.pool.block_size + self._offsets).reshape(-1)[:tokens]

    def prefill_addresses(self, chunks: Sequence[PrefillChunk]) -> PrefillAddresses:
        """Addresses for the tokens of ``chunks``, side by side."""
        spans, positions, writes, at = [], [], [], 0
        for blocks, start, stop in chunks:
            slots = self._slots(np.array(blocks), stop)
            spans.append(Span(at, at + stop - start, self.tensor(slots)))
            positions.append(np.arange(start, stop))
            writes.append(slots[start:])
            at += stop - start
        return PrefillAddresses(self.tensor(np.concatenate(positions)), self.tensor(np.concatenate(writes)), spans)

    def gather(self, width: int) -> IntArray:
        """The slots of every row, ``[rows, width]``, the sink behind a row's end, built anew on every call.

        ``width`` is at least the longest context.
        """
        lengths = self.lengths[: self.rows]
        blocks = self.table[: self.rows, : self.pool.blocks_for(width)]
        slots = (blocks[:, :, None] * self.pool.block_size + self._offsets).reshape(self.rows, -1)[:, :width]
        return np.where(np.arange(width) < lengths[:, None], slots, SINK_SLOT)

    def _check_context(self, tokens: int) -> None:
        if tokens > self.max_context:
            raise ValueError(f"a sequence of {tokens} tokens exceeds the maximum context of {self.max_context}")

    def tensor(self, values: IntArray) -> Tensor:
        """A copy of ``values`` on the pool's device."""
        return upload(values, self._device)
