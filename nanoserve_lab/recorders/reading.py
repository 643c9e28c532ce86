"""Reading a recording: its operations and its external storages as tables, and a summary in words."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.recorders.node import External, Node
from nanoserve_lab.recorders.operations import kind_of, shapes_of, storage_of, traffic
from nanoserve_lab.recorders.owners import owners_of

_LAUNCH_COLUMNS = (
    "order", "op", "kind", "module", "shapes", "dtype", "bytes_read", "bytes_written", "seconds", "line", "source",
)  # fmt: skip
_EXTERNAL_COLUMNS = ("role", "shape", "dtype", "bytes", "written", "kept_by")


def launches(nodes: Sequence[Node], repeats: int = 0) -> pd.DataFrame:
    """See `Recording.launches`."""
    seconds = timed(nodes, repeats)
    rows = []
    for order, (node, took) in enumerate(zip(nodes, seconds, strict=True)):
        inputs = node.inputs
        read, written = traffic(node.operation, node.args, node.kwargs, node.outputs)
        rows.append(
            {
                "order": order,
                "op": str(node.operation),
                "kind": kind_of(node.operation),
                "module": node.module,
                "shapes": shapes_of(inputs),
                "dtype": _dtypes(inputs, node.outputs),
                "bytes_read": read,
                "bytes_written": written,
                "seconds": took,
                "line": node.site.line,
                "source": node.site.source,
            }
        )
    return pd.DataFrame(rows, columns=list(_LAUNCH_COLUMNS))


def timed(nodes: Sequence[Node], repeats: int) -> list[float]:
    """Seconds of each operation on the host, the median of ``repeats`` replays that stop the clock at each."""
    times: list[list[float]] = [[] for _ in nodes]
    with torch.inference_mode():
        for _ in range(repeats):
            for node, taken in zip(nodes, times, strict=True):
                function, args, kwargs = node.call
                start = time.perf_counter()
                function(*args, **kwargs)
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) if taken else float("nan") for taken in times]


def externals(nodes: Sequence[Node], external: Sequence[External]) -> pd.DataFrame:
    """See `Recording.externals`."""
    owners = owners_of([entry.tensor for entry in external])
    own = Counter(storage_of(t) for t in {id(t): t for node in nodes for t in node.inputs}.values())
    rows = [
        {
            "role": entry.role,
            "shape": tuple(entry.tensor.shape),
            "dtype": _dtype(entry.tensor),
            "bytes": _storage_bytes(entry.tensor),
            "written": entry.written,
            "kept_by": ", ".join(sorted(names)) or _unnamed(entry.tensor, own[storage_of(entry.tensor)]),
        }
        for entry, names in zip(external, owners, strict=True)
    ]
    return pd.DataFrame(rows, columns=list(_EXTERNAL_COLUMNS))


def summary(nodes: Sequence[Node], external: Sequence[External]) -> str:
    """See `Recording.summary`."""
    kinds = Counter(kind_of(node.operation) for node in nodes)
    moved = [traffic(node.operation, node.args, node.kwargs, node.outputs) for node in nodes]
    outside = {storage_of(entry.tensor) for entry in external}
    inside = {storage_of(t): _storage_bytes(t) for node in nodes for t in node.outputs}
    held = sum(size for storage, size in inside.items() if storage not in outside)
    arguments = [entry for entry in external if entry.role != "captured"]
    written = [entry for entry in external if entry.written]
    return "\n".join(
        [
            f"{len(nodes)} operations: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
            f"{sum(read for read, _ in moved):,} bytes read, {sum(wrote for _, wrote in moved):,} written",
            f"{held:,} bytes of results and intermediates",
            f"{len(external)} external storages, {sum(_storage_bytes(e.tensor) for e in external):,} bytes: "
            f"{len(arguments)} of arguments, {len(external) - len(arguments)} captured; {len(written)} written",
        ]
    )


def _unnamed(tensor: Tensor, own: int) -> str:
    if tensor.is_mkldnn:
        return ""
    storage = tensor.untyped_storage()
    return "a local variable" if torch._C._storage_Use_Count(storage._cdata) > own + 1 else ""


def _dtypes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """``"float32 int64"`` of what goes in, ``" -> bool"`` behind it where other dtypes come out."""
    into, out = (" ".join(dict.fromkeys(map(_dtype, tensors))) for tensors in (inputs, outputs))
    return f"{into} -> {out}" if into and out and into != out else into or out


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.is_mkldnn else tensor.untyped_storage().nbytes()
