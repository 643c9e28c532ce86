"""Counting instruments: what one step launches, allocates, reads and writes, and where it waits for the device.

`StepTrace` watches PyTorch's dispatcher, so the counts come from the operations that ran and from nothing else. It
says what the dispatcher sees: one ATen operation may be several kernels on a GPU (or none).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from nanoserve_lab.recorders.operations import (
    FUSED,
    SYNC_METHODS,
    kind_of,
    shapes_of,
    short_name,
    storage_of,
    tensors_of,
    traffic,
    user_line,
)

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
    storage, ``allocations`` the storages that came into being, and ``syncs`` lists the values that the host waited for.
    Times include the instrument's own; compare them with each other, not with an untraced step.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.syncs: list[HostSync] = []
        self.allocations = 0
        self.views = 0
        self._modules = ModuleTracker()
        self._in_sync = False
        self._contexts = ExitStack()

    def __enter__(self) -> StepTrace:
        for context in (torch.inference_mode(), self._modules, _SyncWatch(self), _OperationWatch(self)):
            self._contexts.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()

    def frame(self) -> pd.DataFrame:
        """The launches, one row each, with the columns of `Launch`."""
        return pd.DataFrame([vars(launch) for launch in self.launches], columns=list(Launch.__annotations__))

    @property
    def bytes_read(self) -> int:
        """Bytes that the launches read, intermediates included."""
        return sum(launch.bytes_read for launch in self.launches)

    @property
    def bytes_written(self) -> int:
        """Bytes that the launches wrote."""
        return sum(launch.bytes_written for launch in self.launches)

    def _record(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], seconds: float) -> None:
        name = short_name(func)
        known = {storage_of(t) for t in inputs}
        if name == "lift_fresh":
            # Host data that became a tensor: its storage is new, though no operation made it.
            self.allocations += 1
            return
        fresh = {storage_of(t) for t in outputs} - known
        self.allocations += len(fresh)
        if name.startswith(("empty", "new_empty", "detach", "_pin_memory", "is_pinned")):
            return
        if not fresh and not func._schema.is_mutable:
            self.views += 1
            return
        read, written = traffic(func, inputs, outputs)
        self.launches.append(
            Launch(
                order=len(self.launches),
                op=str(func),
                kind=kind_of(func),
                module=_deepest(self._modules.parents),
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


class _OperationWatch(TorchDispatchMode):
    """Sees every ATen operation below autograd and hands it to the trace."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in FUSED:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten._local_scalar_dense.default:
            return self._trace._sync("item", lambda: func(*args, **kwargs))
        inputs = tensors_of((args, kwargs))
        start = time.perf_counter()
        result = func(*args, **kwargs)
        if any(t.is_cuda for t in inputs):
            torch.cuda.synchronize()
        self._trace._record(func, inputs, tensors_of(result), time.perf_counter() - start)
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


def _deepest(parents: set[str]) -> str:
    path = max(parents, key=lambda name: name.count("."), default="Global")
    return path.partition(".")[2]
