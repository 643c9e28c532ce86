"""What memory a recording needs on a GPU, worked out without one.

A CUDA graph is recorded into a private pool of PyTorch's caching allocator, and keeps the pool's segments for as long
as it lives. `Recording.lifetimes` says when each storage of a step was born and when it died while the tape recorded
it; `lifetimes_of` says the same of a step that need not be recorded, on fake tensors too. `CachingAllocator` lays such
a list out by the allocator's rules; `pool_bytes` does so for a list of recordings.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` in pytorch/pytorch at commit 001074d25084 (``malloc``,
``get_free_block``, ``should_split``, ``get_allocation_size``, ``alloc_block``, ``free_block``), with the sizes of
``c10/core/AllocatorConfig.h`` as torch 2.13.0 installs it, and the default settings: no expandable segments, no split
limit, no rounding to powers of two. Segments are taken to lie at rising addresses; that decides between free blocks of
equal size, and nothing else.

Not counted: memory that a kernel or a library takes for itself (cuBLAS workspaces, scratch, copies for alignment), and
other streams. Running out of memory is not simulated.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanoserve_lab.recorders.lifetimes import Allocate, Free, Lifetimes, lifetimes_of

__all__ = [
    "Allocate",
    "Block",
    "CachingAllocator",
    "Free",
    "Lifetimes",
    "PoolBytes",
    "RecordingBytes",
    "Segment",
    "lifetimes_of",
    "pool_bytes",
]

#: Every request is rounded up to a multiple of this; in the small pool, a remainder this large is split off.
MIN_BLOCK = 512
#: The largest request, rounded, that the small pool serves; a remainder above it is split off in the large pool.
SMALL_SIZE = 1 << 20
#: A request opens a segment of `SMALL_SEGMENT`; in the large pool, one of `LARGE_SEGMENT` if it is below `MIN_LARGE`,
#: else one of its size, rounded up to a multiple of `ROUND_LARGE`.
SMALL_SEGMENT, LARGE_SEGMENT, MIN_LARGE, ROUND_LARGE = 2 << 20, 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False)
class Block:
    """A piece of a segment: ``size`` bytes at ``address``, handed out or free. ``requested`` is what was asked for."""

    segment: Segment = field(repr=False)
    address: int
    size: int
    allocated: bool = False
    requested: int = 0


@dataclass(eq=False)
class Segment:
    """One ``cudaMalloc`` of the small pool or of the large one; ``blocks``, by address, cover it without gaps."""

    address: int
    size: int
    small: bool
    blocks: list[Block] = field(default_factory=list, repr=False)


class CachingAllocator:
    """One pool of the caching allocator: a small and a large one, which share nothing but the sums.

    ``segments`` are in the order in which they were opened. Like a graph's pool, it gives no segment back.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak_bytes = 0
        # Free blocks by (size, address), of the large pool and of the small one; addresses are unique, so that the
        # block itself is never compared.
        self._free: tuple[list[tuple[int, int, Block]], ...] = ([], [])

    def malloc(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``: the smallest free one that fits, else of a new segment.

        Raises `ValueError` for less than one byte; PyTorch does not ask the allocator for the storage of a tensor
        without elements.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes: wanted 1 or more, got {nbytes}")
        size = _round_up(nbytes, MIN_BLOCK)
        small = size <= SMALL_SIZE
        block = self._best_fit(size, small) or self._open_segment(size, small)
        remainder = block.size - size
        if remainder >= MIN_BLOCK if small else remainder > SMALL_SIZE:
            rest = Block(block.segment, block.address + size, remainder)
            block.size = size
            block.segment.blocks.insert(block.segment.blocks.index(block) + 1, rest)
            self._put(rest)
        block.allocated, block.requested = True, nbytes
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back; its free neighbours become part of it. Raises `ValueError` for one that is not out."""
        if not block.allocated or block.segment not in self.segments:
            raise ValueError(f"{block} is not handed out by this pool")
        self.allocated_bytes -= block.size
        blocks = block.segment.blocks
        at = blocks.index(block)
        start = at - 1 if at > 0 and not blocks[at - 1].allocated else at
        stop = at + 2 if at + 1 < len(blocks) and not blocks[at + 1].allocated else at + 1
        merged = blocks[start:stop]
        for neighbour in merged:
            if neighbour is not block:
                self._take(neighbour)
        blocks[start:stop] = [block]
        block.address, block.size = merged[0].address, sum(piece.size for piece in merged)
        block.allocated, block.requested = False, 0
        self._put(block)

    def _best_fit(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect_left(free, (size,))
        return free.pop(at)[2] if at < len(free) else None

    def _open_segment(self, size: int, small: bool) -> Block:
        large = LARGE_SEGMENT if size < MIN_LARGE else _round_up(size, ROUND_LARGE)
        segment = Segment(self.reserved_bytes, SMALL_SEGMENT if small else large, small)
        segment.blocks.append(Block(segment, segment.address, segment.size))
        self.segments.append(segment)
        self.reserved_bytes += segment.size
        return segment.blocks[0]

    def _put(self, block: Block) -> None:
        insort(self._free[block.segment.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.segment.small]
        del free[bisect_left(free, (block.size, block.address))]


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class RecordingBytes:
    """One recording of a list: ``index`` is its place in the list as handed in; the rest are bytes of its pool.

    ``reserved`` are the segments that it added, ``held`` the blocks that it left allocated, ``peak`` the most that was
    allocated at once while it was recorded, what earlier recordings hold included.
    """

    index: int
    reserved: int
    held: int
    peak: int


@dataclass(frozen=True)
class PoolBytes:
    """All recordings of a list together, and each, in the order in which they were recorded.

    ``reserved`` are the bytes of all segments, ``allocated`` those that stay in use when all is recorded.
    """

    reserved: int
    allocated: int
    segments: int
    recordings: tuple[RecordingBytes, ...]


def pool_bytes(
    recordings: Sequence[Lifetimes],
    shared: bool = True,
    order: Literal["given", "largest", "smallest", "random"] | Sequence[int] = "largest",
    hold_outputs: bool = True,
    seed: int = 0,
) -> PoolBytes:
    """Bytes that a list of recordings reserves and allocates: in one ``shared`` pool, or in a private pool each.

    A recording in a shared pool takes the free blocks that earlier ones left. ``order`` sorts by `Lifetimes.peak_bytes`
    (equal ones as given), shuffles by ``seed``, or is a permutation of the list's places. With ``hold_outputs`` every
    recording's outputs stay allocated, as those of a graph do; without, they are freed when it ends, as where the step
    writes its result into storage of its own. Raises `ValueError` for an unknown order and for a list of places that
    is no permutation.
    """
    places = _order(recordings, order, seed)
    pools = [CachingAllocator() for _ in (places[:1] if shared else places)]
    rows = [_record(pools[0 if shared else n], at, recordings[at], hold_outputs) for n, at in enumerate(places)]
    return PoolBytes(
        reserved=sum(p.reserved_bytes for p in pools),
        allocated=sum(p.allocated_bytes for p in pools),
        segments=sum(len(p.segments) for p in pools),
        recordings=tuple(rows),
    )


def _record(pool: CachingAllocator, index: int, recording: Lifetimes, hold_outputs: bool) -> RecordingBytes:
    reserved, allocated = pool.reserved_bytes, pool.allocated_bytes
    blocks: dict[int, Block] = {}
    peak = allocated
    for event in recording.events:
        if isinstance(event, Free):
            pool.free(blocks.pop(event.id))
        else:
            blocks[event.id] = pool.malloc(event.nbytes)
            peak = max(peak, pool.allocated_bytes)
    if not hold_outputs:
        for id in sorted(recording.outputs):
            pool.free(blocks.pop(id))
    return RecordingBytes(index, pool.reserved_bytes - reserved, pool.allocated_bytes - allocated, peak)


def _order(recordings: Sequence[Lifetimes], order: str | Sequence[int], seed: int) -> list[int]:
    places = list(range(len(recordings)))
    if not isinstance(order, str):
        if sorted(order) != places:
            raise ValueError(f"order: wanted a permutation of the {len(places)} places, got {list(order)}")
        return list(order)
    if order in ("largest", "smallest"):
        sign = -1 if order == "largest" else 1
        return sorted(places, key=lambda at: sign * recordings[at].peak_bytes)
    if order == "random":
        random.Random(seed).shuffle(places)
    elif order != "given":
        raise ValueError(f"order: wanted given, largest, smallest, random or a list of places, got {order!r}")
    return places
