"""What is known about ATen operations: their kind, the bytes they move, and the line of Python that asked for one."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

#: Composite operations that are counted whole, because a GPU runs them as one kernel; every other one is decomposed.
FUSED = frozenset({aten.rms_norm.default, aten.scaled_dot_product_attention.default})

#: Methods that hand a tensor's values to Python without a dispatch, or with several.
SYNC_METHODS = frozenset(
    {
        "tolist", "numpy", "cpu", "item", "__array__", "__repr__", "__format__", "__dlpack__",
        "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
    }
)  # fmt: skip

_KINDS = {
    "matmul": ("mm", "addmm", "mv", "addmv", "addbmm", "baddbmm", "nanoserve_lab::linear"),
    "attention": (
        "bmm",
        "_softmax",
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "nanoserve_lab::paged_attention",
    ),
    "norm": ("rms_norm", "native_layer_norm", "nanoserve_lab::rms_norm"),
    "index": (
        "index",
        "index_select",
        "index_copy_",
        "index_put_",
        "gather",
        "scatter",
        "embedding",
        "nanoserve_lab::place",
    ),
    "copy": ("clone", "copy_", "_to_copy", "cat", "stack", "roll"),
    "reduction": ("argmax", "nanoserve_lab::argmax", "sum", "mean", "amax", "max", "cumsum", "sort"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
# Operations that read as much as they write (and the indices), not all of their first argument.
_PICKS = frozenset({"index", "index_select", "gather", "embedding"})
# Operations that write as much as they read from their source, not all of what they write into.
_PLACES = frozenset({"index_copy_", "index_put_", "scatter_", "nanoserve_lab::place"})

#: Characters of a source line that a message shows.
_SHOWN = 100

_TORCH_HOME = f"{Path(torch.__file__).parent}{os.sep}"
_OWN_HOME = f"{Path(__file__).parent}{os.sep}"


@dataclass(frozen=True)
class Site:
    """A line of the user's code: file, line number, and the line's text (empty where the source is not at hand)."""

    path: str
    line: int
    source: str

    def __str__(self) -> str:
        text = self.source if len(self.source) <= _SHOWN else f"{self.source[:_SHOWN]} ..."
        return f"line {self.line}" + (f", `{text}`" if text else "")


def user_line(*skip: str) -> Site:
    """The nearest line of the call stack that is not torch's, not this folder's, and not in a file of ``skip``."""
    frame = sys._getframe(1)
    hidden = (_TORCH_HOME, _OWN_HOME, *skip)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(hidden):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    return Site(path, line, linecache.getline(path, line).strip())


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of ``tree``, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Who a tensor's storage is, among those alive. oneDNN's packed weights have none; they are who they are."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def same_generator(one: torch.Generator, other: Any) -> bool:
    """Whether two Python objects are one generator; the dispatcher wraps it anew each time."""
    return isinstance(other, torch.Generator) and one._cdata == other._cdata  # type: ignore[attr-defined]


def short_name(operation: Any) -> str:
    """``index_copy_`` of ``aten.index_copy_.default``; the namespace stays for operations that are not ATen's."""
    name: str = operation._schema.name
    return name.removeprefix("aten::")


def kind_of(operation: Any) -> str:
    """One word for what an operation does: ``matmul``, ``attention``, ..., ``elementwise`` where nothing else fits."""
    return _KIND_OF.get(short_name(operation), "elementwise")


def is_empty(operation: Any) -> bool:
    """Whether an operation only reserves memory."""
    return short_name(operation).startswith(("empty", "new_empty"))


def shapes_of(tensors: Iterable[Tensor]) -> str:
    """``"2x64 64x64 scalar"``."""
    return " ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors)


def writes(operation: Any) -> bool:
    """Whether an operation writes into an argument; one that only makes the argument another view does not."""
    return operation._schema.is_mutable and torch.Tag.inplace_view not in operation.tags


def written_arguments(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out_only: bool = False
) -> list[Tensor]:
    """The arguments that the operation's schema says it writes into; with ``out_only`` those that it does not read."""
    arguments = operation._schema.arguments
    values = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = {a.name for a in arguments if a.kwarg_only}
    return tensors_of([values.get(name) for name in names if name in outs or not out_only])


def traffic(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Iterable[Tensor]
) -> tuple[int, int]:
    """Bytes that an operation reads and writes. ``outputs`` may hold arguments that it returned."""
    name, outs = short_name(operation), written_arguments(operation, args, kwargs, out_only=True)
    inputs = [t for t in tensors_of((args, kwargs)) if not _among(t, outs)]
    made = [*outs, *(t for t in outputs if not _among(t, [*inputs, *outs]))]
    if name == "nanoserve_lab::paged_attention":
        # Of the pool, at most the slots of the window.
        q, keys, values, slots, lengths = args
        return _bytes([q, slots, lengths]) + slots.numel() * _bytes([keys[0], values[0]]), _bytes(outs)
    if name in _PICKS:
        return _bytes(made) + _bytes(t for t in inputs if not t.is_floating_point()), _bytes(made)
    if name in _PLACES:
        filled = written_arguments(operation, args, kwargs)
        given = [t for t in inputs if not _among(t, filled)]
        return _bytes(given), _bytes(t for t in given if t.is_floating_point())
    if name in ("copy_", "fill_", "zero_"):
        return _bytes(inputs[1:]), _bytes(inputs[:1])
    changed = written_arguments(operation, args, kwargs) if writes(operation) else []
    return _bytes(inputs), _bytes([*made, *(t for t in changed if not _among(t, outs))])


def _among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _bytes(tensors: Iterable[Tensor]) -> int:
    # A broadcast tensor is read once: no more than its storage holds.
    return sum(t.nbytes if t.is_mkldnn else min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
