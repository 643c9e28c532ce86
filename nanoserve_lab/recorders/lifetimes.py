"""When the storages that a step makes are born, and when they die: what a recording asks an allocator for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from nanoserve_lab.recorders.watching import OperationWatch, uncompiled


@dataclass(frozen=True)
class Allocate:
    """Storage ``id`` comes into being: ``nbytes`` bytes, made by ``op`` for a tensor of this shape and dtype."""

    id: int
    nbytes: int
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


def allocation(id: int, operation: str, tensor: Tensor) -> Allocate:
    """The birth of the storage of ``tensor``, made by ``operation``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Allocate(id, tensor.untyped_storage().nbytes(), operation, tuple(tensor.shape), dtype)


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


def lifetimes_of(step: Callable[..., Any], args: Sequence[Any] = ()) -> Lifetimes:
    """Run ``step(*args)`` once, under ``inference_mode``, and write down the storages that it makes and drops.

    The tensors may be real, on ``meta``, or fake (of one ``FakeTensorMode``, entered here), so that shapes that fit no
    machine can be asked about. A storage dies when the last reference to it goes, as it does in eager mode and while a
    CUDA graph is recorded: a local name keeps it alive to the end of its function. Cyclic garbage is collected after
    the step, not during it. Not counted: what existed before (inputs, weights, caches), tensors without elements, host
    data that becomes a tensor, and storages on another device than the first tensor of ``args``.

    Composites are taken apart as PyTorch does, but for ``rms_norm`` and ``scaled_dot_product_attention``, of which a
    GPU allocates the result; functions compiled by ``torch.compile`` run as they were written. Outputs are looked for
    in nested tuples, lists and dicts. Raises `ValueError` for an operation that makes a tensor without a storage to
    measure (a sparse one); what the step raises comes through.
    """
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    fake_modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    watch = _StorageWatch(tensors[0].device if tensors else None)
    with ExitStack() as stack:
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(uncompiled())
        stack.enter_context(torch.inference_mode())
        for mode in (*fake_modes[:1], watch):
            stack.enter_context(mode)
        output = step(*args)
        made = (watch.ids.get(storage._cdata) for _, storage in _storages(output, "the result"))
        outputs = frozenset(id for id in made if id is not None)
        if len(outputs) < len(watch.alive):
            gc.collect()
        return Lifetimes(tuple(watch.events), outputs)


class _StorageWatch(OperationWatch):
    """Writes an event when an operation makes a storage, and one when that storage is gone."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.events: list[Allocate | Free] = []
        self.alive: dict[int, weakref.finalize] = {}
        self._device = device
        # Storage to id. A storage leaves before its place in memory can be given to another.
        self.ids: dict[int, int] = {}
        self._count = 0

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = {s._cdata: s.nbytes() for _, s in _storages((args, kwargs), func)}
        result = func(*args, **kwargs)
        for tensor, storage in _storages((result, args, kwargs), func):
            known = before.get(storage._cdata)
            if (known is None and storage._cdata in self.ids) or known == storage.nbytes():
                continue
            if self._device in (None, tensor.device):
                before[storage._cdata] = storage.nbytes()
                self._replace(storage, allocation(self._count, str(func), tensor))
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
