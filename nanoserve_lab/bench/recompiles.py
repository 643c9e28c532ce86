"""`bench recompiles`: how many graphs the decode forward is compiled to while the contexts grow, by what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.timing import command_line, require, show
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.compiled import CompiledDecode, eager_compiler, quiet
from nanoserve_lab.engine.forward import DecodeForward
from nanoserve_lab.model.config import ModelConfig
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.plan import DecodePlan, Planner

ARMS = ("block tables", "plan, static", "plan, dynamic")
#: Tokens of the two rows before the first step: the two never take a new block in the same step.
PROMPTS = (3, 2)
#: Steps after which the compiler's own bookkeeping of so many graphs takes minutes.
MOST_CONTEXTS = 512

#: Kinds of guards by the compiler's names for them; those not listed are about types, modules and global settings.
GUARD_KINDS = {
    "CONSTANT_MATCH": "a number",
    "EQUALS_MATCH": "a number",
    "SEQUENCE_LENGTH": "a list's length",
    "DICT_KEYS_MATCH": "a dict's keys",
    "TENSOR_MATCH": "a tensor's shape",
}


class LookupForward:
    """A decode forward that looks its own addresses up: the block tables and lengths of the rows are Python state.

    `follow` brings that state up to date with a cache, as an engine without a planner would after every step.
    """

    def __init__(self, forward: DecodeForward, block_size: int) -> None:
        self.forward, self.block_size = forward, block_size
        self.tables: dict[int, list[int]] = {}
        self.lengths: list[int] = []

    def follow(self, cache: PagedCache) -> None:
        """Take over the rows' blocks and lengths."""
        self.tables = {row: cache.owned(row) for row in range(cache.rows)}
        self.lengths = cache.lengths[: cache.rows].tolist()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` for ``input_ids`` ``[rows, 1]`` int64, one new token a row."""
        size, width = self.block_size, max(self.lengths)
        reads, writes = [], []
        for row, table in self.tables.items():
            length = self.lengths[row]
            slots = (torch.tensor(table)[:, None] * size + torch.arange(size)).view(-1)[:length]
            reads.append(F.pad(slots, (0, width - length)))
            writes.append(table[(length - 1) // size] * size + (length - 1) % size)
        lengths = torch.tensor(self.lengths)
        return self.forward(input_ids, lengths[:, None] - 1, torch.tensor(writes), lengths, torch.stack(reads))


def two_row_cache(config: ModelConfig, block_size: int, room: int) -> PagedCache:
    """A cache of two rows of 3 and 2 tokens, their blocks one after the other, with room for ``room`` more tokens."""
    longest = max(PROMPTS) + room
    blocks = len(PROMPTS) * -(-longest // block_size) + 1
    cache = PagedCache(KVPool(config, blocks, block_size, torch.float32, "cpu"), len(PROMPTS), longest)
    for tokens in PROMPTS:
        cache.add(cache.reserve(tokens), tokens)
    return cache


def two_row_plan(block_size: int = 2) -> tuple[PagedCache, DecodePlan]:
    """The cache of `two_row_cache` after it has grown by one token, and the plan of that step."""
    cache = two_row_cache(TINY, block_size, room=8)
    cache.grow()
    return cache, Planner(cache).plan()


def graphs_while_growing(arm: str, contexts: int, block_size: int = 16, layers: int = 1) -> pd.DataFrame:
    """One decode step a context, every row a token longer each time, in a model of ``layers`` layers.

    A row a step: ``step`` (from 1), ``context`` (tokens of the longest row), ``arm``, ``graphs`` made so far and
    ``recompiles``, those of them made for arguments of a kind that had one. The compiler's limits on the number of
    graphs are lifted, and all that it compiled in this process before is forgotten. Raises `ValueError` for an arm that
    is not one of `ARMS`.
    """
    if arm not in ARMS:
        raise ValueError(f"arm: wanted one of {', '.join(ARMS)}, got {arm!r}")
    config = replace(TINY, num_layers=layers, max_position=max(PROMPTS) + contexts)
    cache = two_row_cache(config, block_size, contexts)
    forward = DecodeForward(tiny_model(config), cache.pool, kernels=False)
    lookup, planner = LookupForward(forward, block_size), Planner(cache)
    inside = arm == "block tables"
    decode = CompiledDecode(lookup if inside else forward, eager_compiler, dynamic=arm != "plan, static")
    input_ids = torch.tensor([[1], [2]])
    # The compiler remembers by source line which numbers it has seen change, and would leave them open at once.
    torch._dynamo.reset()
    rows = []
    with torch.inference_mode(), unlimited(contexts):
        for step in range(1, contexts + 1):
            cache.grow()
            if inside:
                lookup.follow(cache)
                decode(input_ids)
            else:
                decode(input_ids, *planner.plan().tensors)
            context = int(cache.lengths.max())
            recompiles = len(decode.recompiles)
            rows.append(
                {"step": step, "context": context, "arm": arm, "graphs": decode.graphs, "recompiles": recompiles}
            )
    return pd.DataFrame(rows)


@contextmanager
def unlimited(graphs: int) -> Iterator[None]:
    """Room for ``graphs`` graphs of one function; the compiler gives up at 8 otherwise."""
    with torch._dynamo.config.patch(recompile_limit=graphs + 1, accumulated_recompile_limit=graphs + 1):
        yield


def guards_of(forward: Callable[..., Any], *args: Any) -> pd.DataFrame:
    """What the graph of ``forward(*args)`` is guarded on; runs it once.

    A row a guard: ``on`` (a name as it stands in the source), ``kind`` (see `GUARD_KINDS`) and ``value``, what it must
    still be. Guards on types, modules and global settings are left out, and those on what is not an argument. All that
    was compiled in this process before is forgotten.
    """
    seen: list[Any] = []

    def note(entries: Any) -> list[bool]:
        seen.extend(entries)
        return [True] * len(entries)

    # The method under the object: the compiler would name what it finds after its own wrapper otherwise.
    called: Any = forward
    function = called if isinstance(called, FunctionType | MethodType) else called.__call__
    torch._dynamo.reset()
    with quiet():
        options: dict[str, Any] = {"guard_filter_fn": note}
        torch.compile(function, backend="eager", fullgraph=True, options=options)(*args)
    torch._dynamo.reset()
    rows = [
        {"on": entry.name, "kind": GUARD_KINDS[entry.guard_type], "value": _shown(entry.value)}
        for entry in seen
        if entry.guard_type in GUARD_KINDS and not entry.is_global
    ]
    return pd.DataFrame(rows, columns=["on", "kind", "value"]).drop_duplicates(ignore_index=True)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape))
    if isinstance(value, dict):
        return str(list(value))
    return str(len(value)) if isinstance(value, list | tuple) else str(value)


def run(out: Path = Path("data"), contexts: int = 256, block_size: int = 16) -> list[Path]:
    """Graphs and recompiles over growing contexts: Python state in the forward, and a plan. To OUT/recompiles.csv."""
    command = command_line("recompiles", run, locals())
    require("contexts", contexts, 1, MOST_CONTEXTS)
    require("block-size", block_size, 1, 256)
    frame = pd.concat([graphs_while_growing(arm, contexts, block_size) for arm in ARMS], ignore_index=True)
    show(frame[frame.step == contexts])
    return [write_csv(frame, out / "recompiles.csv", "cpu", command)]
