"""What memory a recording needs on a GPU, worked out without one.

A CUDA graph is recorded into a private pool of PyTorch's caching allocator, and keeps the pool's segments for as long
as it lives. `lifetimes_of` runs a step once and writes down when each storage is born and when it dies;
`CachingAllocator` lays such a list out by the allocator's rules; `pool_bytes` does so for a list of recordings.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` in pytorch/pytorch at commit 001074d25084 (``malloc``,
``get_free_block``, ``should_split``, ``get_allocation_size``, ``alloc_block``, ``free_block``), with the sizes of
``c10/core/AllocatorConfig.h`` as torch 2.13.0 installs it, and the default settings: no expandable segments, no split
limit, no rounding to powers of two. Segments are taken to lie at rising addresses; that decides between free blocks of
equal size, and nothing else.

Not counted: memory that a kernel or a library takes for itself (cuBLAS workspaces, scratch, copies for alignment), and
other streams. Running out of memory is not simulated.
"""

from __future__ import annotations

import gc
import random
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoserve_lab.recorders.operations import FUSED

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
class Allocate:
    """Storage ``id`` comes into being: ``nbytes`` bytes, made by ``op`` for a tensor of this shape and dtype."""

    id: int
    nbytes: int
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Free:
    """The last reference to storage ``id`` goes."""

    id: int


@dataclass(frozen=True)
class Lifetimes:
    """What one run of a step allocates and frees, in order. ``outputs`` are the ids that its result holds.

    An id that is neither freed nor an output was stashed by the step somewhere; it stays allocated in any case. Raises
    `ValueError` for an id allocated twice, freed while not allocated, without bytes, or an output that is not alive.
    """

    events: tuple[Allocate | Free, ...]
    outputs: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        alive: dict[int, bool] = {}
        for event in self.events:
            if isinstance(event, Free):
                if not alive.get(event.id):
                    raise ValueError(f"id {event.id} is freed while it is not allocated")
            elif event.id in alive or event.nbytes < 1:
                raise ValueError(f"wanted each id once, with 1 byte or more, got {event}")
            alive[event.id] = isinstance(event, Allocate)
        if dead := [id for id in sorted(self.outputs) if not alive.get(id)]:
            raise ValueError(f"outputs: {dead} are not alive at the end")

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, as asked for: no rounding, no segments."""
        return sum(block.nbytes for block in self.at_peak())

    def at_peak(self) -> list[Allocate]:
        """What is alive when most bytes are (the first time), largest first: the blocks that size the pool."""
        alive: dict[int, Allocate] = {}
        peak: list[Allocate] = []
        now = most = 0
        for event in self.events:
            if isinstance(event, Free):
                now -= alive.pop(event.id).nbytes
                continue
            alive[event.id] = event
            now += event.nbytes
            if now > most:
                most, peak = now, list(alive.values())
        return sorted(peak, key=lambda block: -block.nbytes)

    def frame(self) -> pd.DataFrame:
        """One row a storage: the columns of `Allocate`, and the places of its events, ``born`` and ``died``."""
        died = {event.id: at for at, event in enumerate(self.events) if isinstance(event, Free)}
        rows = [
            {**vars(event), "born": at, "died": died.get(event.id)}
            for at, event in enumerate(self.events)
            if isinstance(event, Allocate)
        ]
        frame = pd.DataFrame(rows, columns=[*Allocate.__annotations__, "born", "died"])
        return frame.astype({"died": "Int64"})


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


def lifetimes_of(step: Callable[..., Any], args: Sequence[Any] = ()) -> Lifetimes:
    """Run ``step(*args)`` once, under ``inference_mode``, and write down the storages that it makes and drops.

    The tensors may be real, on ``meta``, or fake (of one ``FakeTensorMode``, entered here), so that shapes that fit no
    machine can be asked about. A storage dies when the last reference to it goes, as it does in eager mode and while a
    CUDA graph is recorded: a local name keeps it alive to the end of its function. Cyclic garbage is collected after
    the step, not during it. Not counted: what existed before (inputs, weights, caches), tensors without elements, host
    data that becomes a tensor, and storages on another device than the first tensor of ``args``.

    Composites are taken apart as PyTorch does, but for ``rms_norm`` and ``scaled_dot_product_attention``, of which a
    GPU allocates the result. Outputs are looked for in nested tuples, lists and dicts. Raises `ValueError` for an
    operation that makes a tensor without a storage to measure (a sparse one); what the step raises comes through.
    """
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    fake_modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    watch = _StorageWatch(tensors[0].device if tensors else None)
    with ExitStack() as stack:
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        # The first operation under a mode imports the compiler, and errors caught in there would keep the caller's
        # frame, and with it the step's tensors, until they are collected: let that frame be this one.
        with watch:
            torch.empty(0)
        stack.enter_context(torch.inference_mode())
        for mode in (*fake_modes[:1], watch):
            stack.enter_context(mode)
        output = step(*args)
        made = (watch.ids.get(storage._cdata) for _, storage in _storages(output, "the result"))
        outputs = frozenset(id for id in made if id is not None)
        if len(outputs) < len(watch.alive):
            gc.collect()
        return Lifetimes(tuple(watch.events), outputs)


class _StorageWatch(TorchDispatchMode):
    """Writes an event when an operation makes a storage, and one when that storage is gone."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.events: list[Allocate | Free] = []
        self.alive: dict[int, weakref.finalize] = {}
        self._device = device
        # Storage to id. A storage leaves before its place in memory can be given to another.
        self.ids: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A fake tensor dispatches a question about its device too; such an operation cannot be taken apart.
        if func not in FUSED and func.namespace != "prim":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        before = {s._cdata: s.nbytes() for _, s in _storages((args, kwargs), func)}
        result = func(*args, **kwargs)
        for tensor, storage in _storages((result, args, kwargs), func):
            known = before.get(storage._cdata)
            if (known is None and storage._cdata in self.ids) or known == storage.nbytes():
                continue
            if self._device in (None, tensor.device):
                before[storage._cdata] = storage.nbytes()
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._replace(storage, Allocate(self._count, storage.nbytes(), str(func), tuple(tensor.shape), dtype))
        return result

    def _replace(self, storage: UntypedStorage, event: Allocate) -> None:
        """A storage that is new, or that was resized: the new block is taken before the old one goes."""
        old = self.ids.pop(storage._cdata, None)
        if event.nbytes:
            self._count += 1
            self.events.append(event)
            self.ids[storage._cdata] = event.id
            self.alive[event.id] = weakref.finalize(storage, self._die, storage._cdata, event.id)
        if old is not None:
            self.alive.pop(old).detach()
            self.events.append(Free(old))

    def _die(self, storage: int, id: int) -> None:
        del self.ids[storage], self.alive[id]
        self.events.append(Free(id))


def _storages(tree: Any, where: object) -> Iterator[tuple[Tensor, UntypedStorage]]:
    for leaf in tree_leaves(tree):
        # oneDNN's packed weights have no storage; they are weights, and were there before.
        if not isinstance(leaf, Tensor) or leaf.is_mkldnn:
            continue
        if leaf.layout is not torch.strided:
            raise ValueError(f"{where}: a tensor of layout {leaf.layout} has no storage to measure")
        yield leaf, leaf.untyped_storage()
