"""Watching a step: each operation that eager would hand to a kernel, and where it came from."""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve_lab.recorders.operations import FUSED


class OperationWatch(TorchDispatchMode):
    """Sees every ATen operation below autograd, and hands it to ``operation``, which a subclass says.

    In ``inference_mode`` composites arrive whole. They are taken apart as eager takes them apart, but for `FUSED` ones
    and those that ask for a value (``item``, ``allclose``), whose name says so.
    """

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func(*args, **kwargs)``, outside this mode, and return its result."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation would import the compiler: a second and 140 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            # A handler runs below the key that tells a view whether its base wants gradients, and composites choose by
            # that (``matmul`` between ``mm`` and ``bmm``).
            with self, _view_tracking(not _tracks_views(func)):
                # Not `decompose`, which prefers a decomposition in Python to the kernel that eager runs.
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        with _view_tracking(False):
            return self.operation(func, args, kwargs)


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, functions compiled by ``torch.compile`` run as they were written: no mode sees into compiled code."""
    # Where nothing was compiled, asking for the stance would import the compiler.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@functools.cache
def _is_composite(operation: Any) -> bool:
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, operation.name()
    # A fake tensor also dispatches a question about its device, which is in no table.
    known = operation.namespace != "prim"
    whole = operation in FUSED or torch.Tag.data_dependent_output in operation.tags
    return known and not whole and has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


@functools.cache
def _tracks_views(operation: Any) -> bool:
    """Whether the dispatcher itself makes the operation's results views, whatever takes it apart."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "ADInplaceOrView")


def _view_tracking(on: bool) -> AbstractContextManager[Any]:
    """Whether a view learns of its base what autograd would want to know; off is how a handler runs an operation."""
    guard: AbstractContextManager[Any] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, not on
    )
    return guard


def deepest(parents: set[str]) -> str:
    """The path of the innermost of the modules that `ModuleTracker` says are running, empty outside all."""
    path = max(parents, key=lambda name: name.count("."), default="Global")
    return path.partition(".")[2]
