"""Counting instruments: what one step launches, allocates, reads and writes, and where it waits for the device.

`StepTrace` watches PyTorch's dispatcher, so the counts come from the operations that ran and from nothing else. It
says what the dispatcher sees: one ATen operation may be several kernels on a GPU (or none).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker

from nanoserve_lab.recorders.operations import (
    SYNC_METHODS,
    kind_of,
    shapes_of,
    short_name,
    storage_of,
    tensors_of,
    traffic,
    user_line,
    writes,
)
from nanoserve_lab.recorders.watching import OperationWatch, deepest, uncompiled

aten = torch.ops.aten


@dataclass(frozen=True)
class Launch:
    """One operation that computes. ``seconds`` is its time on the host (on a GPU: until the device was done)."""

    order: int
    op: str
    kind: str
    module: str
    shapes: str
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class HostSync:
    """A value that Python asked a tensor for: the call, and the line that made it."""

    call: str
    path: str
    line: int
    source: str


class StepTrace:
    """Use as a context manager around a step; it runs under ``inference_mode``, composites taken apart.

    ``launches`` are the operations that compute, in order. ``views`` counts those that only make another view of a
    storage, ``allocations_on`` the storages that came into being by the type of their device (``"cpu"``, ``"cuda"``),
    and ``syncs`` lists the values that the host waited for. Functions compiled by ``torch.compile`` run as they were
    written. Times include the instrument's own; compare them with each other, not with an untraced step.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.syncs: list[HostSync] = []
        self.allocations_on: Counter[str] = Counter()
        self.views = 0
        self._modules = ModuleTracker()
        self._in_sync = False
        self._contexts = ExitStack()

    def __enter__(self) -> StepTrace:
        for context in (uncompiled(), torch.inference_mode(), self._modules, _SyncWatch(self), _LaunchWatch(self)):
            self._contexts.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()

    def frame(self) -> pd.DataFrame:
        """The launches, one row each, with the columns of `Launch`."""
        return pd.DataFrame([vars(launch) for launch in self.launches], columns=list(Launch.__annotations__))

    @property
    def allocations(self) -> int:
        """Storages that came into being on any device: on the host, a copy to a device has two of them before it."""
        return self.allocations_on.total()

    @property
    def bytes_read(self) -> int:
        """Bytes that the launches read, intermediates included."""
        return sum(launch.bytes_read for launch in self.launches)

    @property
    def bytes_written(self) -> int:
        """Bytes that the launches wrote."""
        return sum(launch.bytes_written for launch in self.launches)

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor], seconds: float) -> None:
        name, inputs = short_name(func), tensors_of((args, kwargs))
        known = {storage_of(t) for t in inputs}
        if name == "lift_fresh":
            # Host data that became a tensor: its storage is new, though no operation made it.
            self.allocations_on[outputs[0].device.type] += 1
            return
        fresh = {storage_of(t): t.device.type for t in outputs if storage_of(t) not in known}
        self.allocations_on.update(fresh.values())
        if name.startswith(("empty", "new_empty", "detach", "_pin_memory", "is_pinned")):
            return
        if not fresh and not writes(func):
            self.views += 1
            return
        read, written = traffic(func, args, kwargs, outputs)
        self.launches.append(
            Launch(
                order=len(self.launches),
                op=str(func),
                kind=kind_of(func),
                module=deepest(self._modules.parents),
                shapes=shapes_of(inputs),
                bytes_read=read,
                bytes_written=written,
                seconds=seconds,
            )
        )

    def _sync(self, call: str, run: Callable[[], Any]) -> Any:
        """Run a call that waits for a value; the syncs inside it are its own."""
        if self._in_sync:
            return run()
        site = user_line(__file__)
        self.syncs.append(HostSync(call, site.path, site.line, site.source))
        self._in_sync = True
        try:
            return run()
        finally:
            self._in_sync = False


class _LaunchWatch(OperationWatch):
    """Runs every operation and hands it to the trace with its time."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            name = "item" if func is aten._local_scalar_dense.default else short_name(func)
            return self._trace._sync(name, lambda: func(*args, **kwargs))
        start = time.perf_counter()
        result = func(*args, **kwargs)
        if any(t.is_cuda for t in tensors_of((args, kwargs))):
            torch.cuda.synchronize()
        self._trace._record(func, args, kwargs, tensors_of(result), time.perf_counter() - start)
        return result


class _SyncWatch(TorchFunctionMode):
    """Sees the methods of `SYNC_METHODS`, most of which never reach the dispatcher."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in SYNC_METHODS:
            return self._trace._sync(name, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)
