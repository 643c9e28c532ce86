"""`bench pool`: the memory of recordings of the plain read: computed from its scores, simulated, and measured.

The formula prices the score rectangle alone. The simulation runs the read on ``meta`` tensors and lays what it
allocates out by the caching allocator's rules. On CUDA the same lists are recorded and their pools' segments summed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.bench.provenance import read_csv, with_provenance, write_csv
from nanoserve_lab.bench.timing import BenchRefused, command_line, parse_counts, require, show
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.cache.attention import paged_attention_batched_reference
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.captured import private_pool_bytes, shared_pool_bytes, workspace_bytes
from nanoserve_lab.device import default_device
from nanoserve_lab.engine.forward import DecodeForward
from nanoserve_lab.model.config import ModelConfig
from nanoserve_lab.model.transformer import Transformer
from nanoserve_lab.recorders import Recording
from nanoserve_lab.recorders.allocator import Allocate, Lifetimes, lifetimes_of, pool_bytes
from nanoserve_lab.recorders.cuda import cuda_graph_recorder, pool_segments

Shape = tuple[int, int]

MAX_ROWS, MAX_CONTEXT = 256, 8192
MULTIPLES = (128, 512, 2048, 8192)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: How a list can be recorded: in one pool, in this order, or in a pool each.
WAYS = ("one pool, largest first", "one pool, smallest first", "a pool each")


@dataclass(frozen=True)
class Heads:
    """The read of one layer: query heads, K/V heads, their size, and the dtype of K, V and scores by name."""

    heads: int
    kv_heads: int
    head_dim: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: wanted a multiple of {self.kv_heads} K/V heads, got {self.heads}")

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return DTYPES[self.dtype].itemsize


#: The default model's heads, and the log's 32 with 8 K/V heads, of which the log says nothing.
OURS, LOGS = Heads(9, 3), Heads(32, 8)


def read_args(shape: Shape, heads: Heads, device: str | torch.device = "meta") -> tuple[Tensor, ...]:
    """Arguments of `paged_attention_batched_reference` for ``shape`` ``(rows, width)``, over a cache of one slot: only
    what the read makes of it counts here."""
    rows, width = shape
    dtype = DTYPES[heads.dtype]
    cache = torch.zeros(1, heads.kv_heads, heads.head_dim, dtype=dtype, device=device)
    slots = torch.zeros(rows, width, dtype=torch.int64, device=device)
    return torch.zeros(rows, heads.heads, heads.head_dim, dtype=dtype, device=device), cache, cache, slots, slots == 1


@functools.cache
def read_lifetimes(shape: Shape, heads: Heads) -> Lifetimes:
    """What the read of ``shape`` allocates and frees, run once on ``meta`` tensors."""
    return lifetimes_of(paged_attention_batched_reference, read_args(shape, heads))


def terms(read: Lifetimes) -> dict[str, int]:
    """Bytes alive at the peak of a read, by what they are, in the order in which they were made.

    An operation of a read that is not known here keeps its own name.
    """
    names: dict[int, str] = {}
    seen, products = Counter[str](), 0
    for block in read.events:
        if not isinstance(block, Allocate):
            continue
        op = block.op.split(".")[1]
        products += op == "bmm"
        which = "K" if products == 0 else "V"
        names[block.id] = {
            "index_select": ("K gathered", "V gathered")[min(seen[op], 1)],
            "clone": f"{which} laid out",
            "bmm": ("scores", "result")[min(seen[op], 1)],
            "masked_fill": "masked scores",
            "_softmax": "weights",
            "mul": "Q scaled",
        }.get(op, op)
        seen[op] += 1
    bill: Counter[str] = Counter()
    for block in sorted(read.at_peak(), key=lambda block: block.id):
        bill[names[block.id]] += block.nbytes
    return dict(bill)


def simulated(shapes: Sequence[Shape], heads: Heads) -> dict[str, int]:
    """Bytes that recordings of the read of all ``shapes`` reserve, for each of `WAYS`."""
    reads = [read_lifetimes(shape, heads) for shape in shapes]
    pools = (pool_bytes(reads, order="largest"), pool_bytes(reads, order="smallest"), pool_bytes(reads, shared=False))
    return {way: pool.reserved for way, pool in zip(WAYS, pools, strict=True)}


def computed(shapes: Sequence[Shape], heads: Heads) -> dict[str, int]:
    """Bytes of the scores of all ``shapes``, for each of `WAYS`; a maximum knows no order."""
    shared = shared_pool_bytes(shapes, heads.heads, heads.itemsize)
    return dict(zip(WAYS, (shared, shared, private_pool_bytes(shapes, heads.heads, heads.itemsize)), strict=True))


def measured(shapes: Sequence[Shape], heads: Heads, device: torch.device) -> dict[str, float]:
    """Bytes of the segments of the CUDA graphs' pools, for each of `WAYS`; NaN without CUDA, or where the recordings do
    not fit."""
    if device.type != "cuda":
        return dict.fromkeys(WAYS, math.nan)
    ordered = sorted(shapes, key=lambda shape: read_lifetimes(shape, heads).peak_bytes)
    lists = zip(WAYS, (ordered[::-1], ordered, ordered[::-1]), strict=True)
    return {way: _recorded_bytes(shapes, heads, device, way != WAYS[2]) for way, shapes in lists}


def _recorded_bytes(shapes: Sequence[Shape], heads: Heads, device: torch.device, shared: bool) -> float:
    kept: list[Recording] = []
    torch.cuda.empty_cache()
    try:
        for shape in shapes:
            pool = kept[-1].pool if shared and kept else None
            args = read_args(shape, heads, device)
            kept.append(cuda_graph_recorder(paged_attention_batched_reference, args, pool))
            torch.cuda.empty_cache()  # the warm-up's own segments
    except torch.cuda.OutOfMemoryError:
        return math.nan
    pools = {tuple(recording.pool) for recording in kept}
    return float(sum(size for pool in pools for size in pool_segments(pool)))


def _by_how(shapes: Sequence[Shape], heads: Heads, device: torch.device) -> dict[str, Mapping[str, float]]:
    return {
        "computed": computed(shapes, heads),
        "simulated": simulated(shapes, heads),
        "measured": measured(shapes, heads, device),
    }


def priced(
    rows: int = MAX_ROWS,
    context: int = MAX_CONTEXT,
    width_multiple: int = 2048,
    heads: Heads = OURS,
    device: torch.device | None = None,
) -> pd.DataFrame:
    """The memory of one engine's recordings, term by term, with provenance.

    Columns ``where`` (``"the largest shape"`` or ``"the list"``), ``how`` (``"computed"``, ``"simulated"``,
    ``"measured"``), ``term`` and ``bytes`` (NaN: not measured). The largest shape's simulated terms are alive at its
    peak; its term ``"holes and rounding"`` is what the pool reserves beside them. The list's terms are `WAYS`.
    """
    device = device or default_device()
    largest, shapes = (rows, context), BucketSet(rows, context, width_multiple).shapes()
    read = read_lifetimes(largest, heads)
    alive = terms(read)
    holes = pool_bytes([read]).reserved - sum(alive.values())
    one, many = "the largest shape", "the list"
    alone = measured([largest], heads, device)[WAYS[0]]
    bill: list[tuple[str, str, str, float]] = [
        (one, "computed", "scores", workspace_bytes(*largest, heads.heads, heads.itemsize)),
        *((one, "simulated", term, nbytes) for term, nbytes in alive.items()),
        (one, "simulated", "holes and rounding", holes),
        (one, "measured", "segments", alone),
    ]
    for how, ways in _by_how(shapes, heads, device).items():
        bill += [(many, how, way, nbytes) for way, nbytes in ways.items()]
    frame = pd.DataFrame(bill, columns=["where", "how", "term", "bytes"]).astype({"bytes": "float64"})
    sizes = {"rows": rows, "context": context, "width_multiple": width_multiple, "shapes": len(shapes)}
    return with_provenance(frame.assign(**sizes, **asdict(heads)), device, "nanoserve-lab bench pool")


def by_multiple(
    multiples: Sequence[int] = MULTIPLES,
    heads: Heads = LOGS,
    max_rows: int = MAX_ROWS,
    max_context: int = MAX_CONTEXT,
    device: torch.device | None = None,
) -> pd.DataFrame:
    """The list of each width multiple, a line for each of `WAYS`: ``width_multiple``, ``shapes``, ``way``,
    ``computed_bytes``, ``simulated_bytes``, ``measured_bytes`` (NaN: not measured) and the heads."""
    device = device or default_device()
    lines: list[dict[str, Any]] = []
    for multiple in multiples:
        shapes = BucketSet(max_rows, max_context, multiple).shapes()
        bills = _by_how(shapes, heads, device)
        for way in WAYS:
            sizes = {f"{how}_bytes": bill[way] for how, bill in bills.items()}
            lines.append({"width_multiple": multiple, "shapes": len(shapes), "way": way, **sizes, **asdict(heads)})
    return pd.DataFrame(lines)


def decode_lifetimes(shapes: Sequence[Shape], config: ModelConfig, one_buffer: bool) -> list[Lifetimes]:
    """What a whole decode step of ``config`` allocates and frees for each of ``shapes``, on ``meta`` tensors.

    Its logits ``[rows, vocab]`` are a tensor of each recording's own, or, with ``one_buffer``, written to the first
    rows of one buffer that was there before.
    """
    with torch.device("meta"):
        model = Transformer(config).requires_grad_(False)
        logits = torch.empty(max(rows for rows, _ in shapes), config.vocab_size)
    forward = DecodeForward(model, KVPool(config, 2, 16, torch.float32, "meta"), kernels=False)

    def step(input_ids: Tensor, *tensors: Tensor) -> Tensor:
        made = forward(input_ids, *tensors)
        return logits[: len(input_ids)].copy_(made) if one_buffer else made

    def args(rows: int, width: int) -> list[Tensor]:
        sizes = ((rows, 1), (rows, 1), (rows,), (rows,), (rows, width))
        return [torch.zeros(size, dtype=torch.int64, device="meta") for size in sizes]

    return [lifetimes_of(step, args(*shape)) for shape in shapes]


def bill_to_show(folder: Path) -> pd.DataFrame:
    """`priced` on this machine; where it has no GPU, the newest bill that one has recorded in ``folder``'s
    ``machines/``, if there is any."""
    device = default_device()
    bills = (
        [read_csv(path) for path in sorted(folder.glob("machines/*/pool-terms.csv"))] if device.type == "cpu" else []
    )
    recorded = [bill for bill in bills if (bill["device"] != "cpu").all()]
    return max(recorded, key=lambda bill: str(bill["date"].iloc[0])) if recorded else priced(device=device)


def run(
    out: Path = Path("data"),
    multiples: str = ",".join(map(str, MULTIPLES)),
    heads: int = LOGS.heads,
    kv_heads: int = LOGS.kv_heads,
    rows: int = MAX_ROWS,
    context: int = MAX_CONTEXT,
) -> list[Path]:
    """Pool bytes of the plain read by width multiple to OUT/pool-simulated.csv, and those of the default model's
    largest shape, term by term, to OUT/pool-terms.csv.

    Fp32, heads of 64. Nothing large is allocated but on CUDA, where the lists that fit are recorded as well.
    """
    command = command_line("pool", run, locals())
    widths = parse_counts("multiples", multiples)
    for option, value in (("heads", heads), ("kv-heads", kv_heads), ("rows", rows), ("context", context)):
        require(option, value, 1)
    if heads % kv_heads:
        raise BenchRefused(f"--heads: wanted a multiple of {kv_heads} K/V heads, got {heads}")
    device = default_device()
    lists = by_multiple(widths, Heads(heads, kv_heads), rows, context, device)
    bill = priced(rows, context, device=device)
    show(lists)
    show(bill)
    return [
        write_csv(lists.assign(max_rows=rows, max_context=context), out / "pool-simulated.csv", device, command),
        write_csv(bill.assign(command=command), out / "pool-terms.csv"),
    ]
