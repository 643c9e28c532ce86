"""Checkpoints in Hugging Face layout: checked whole, then memory-mapped in this package's parameter names."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoserve_lab.model.config import CheckpointError, ModelConfig, read_config, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: The dtypes a weight may have in a file, by their safetensors names.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

#: Buffers that older exporters wrote although they follow from the configuration.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")

#: Bytes copied at a time; bounds how much of the mapped file is resident beside the copies.
CHUNK_BYTES = 32 << 20

Shape = tuple[int, ...]


def parameter_table(config: ModelConfig) -> dict[str, dict[str, Shape]]:
    """Every parameter of the model: our name -> {Hugging Face name: shape}, parts in the order they are stacked.

    A fused parameter has several parts, stacked along dimension 0; the others have one. ``lm_head.weight`` is absent
    when the embeddings are tied.
    """
    hidden, mlp, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    layer: dict[str, dict[str, Shape]] = {
        "attn_norm.weight": {"input_layernorm.weight": (hidden,)},
        "attn.qkv.weight": {
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
        },
        "attn.o.weight": {"self_attn.o_proj.weight": (hidden, q)},
        "mlp_norm.weight": {"post_attention_layernorm.weight": (hidden,)},
        "mlp.gate_up.weight": {"mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden)},
        "mlp.down.weight": {"mlp.down_proj.weight": (hidden, mlp)},
    }
    if config.qkv_bias:
        layer["attn.qkv.bias"] = {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    if config.o_bias:
        layer["attn.o.bias"] = {"self_attn.o_proj.bias": (hidden,)}
    if config.qk_norm:
        layer["attn.q_norm.weight"] = {"self_attn.q_norm.weight": (config.head_dim,)}
        layer["attn.k_norm.weight"] = {"self_attn.k_norm.weight": (config.head_dim,)}

    vocabulary = (config.vocab_size, hidden)
    table: dict[str, dict[str, Shape]] = {"embed.weight": {"model.embed_tokens.weight": vocabulary}}
    for n in range(config.num_layers):
        for name, parts in layer.items():
            table[f"layers.{n}.{name}"] = {f"model.layers.{n}.{part}": shape for part, shape in parts.items()}
    table["norm.weight"] = {"model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        table["lm_head.weight"] = {"lm_head.weight": vocabulary}
    return table


@dataclass(frozen=True)
class _Entry:
    """One tensor as a shard's header describes it; ``begin`` and ``end`` are byte offsets in the file."""

    file: Path
    dtype: str
    shape: Shape
    begin: int
    end: int

    @property
    def aligned(self) -> bool:
        return self.begin % DTYPES[self.dtype].itemsize == 0


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """``eos_token_id`` of ``config.json`` and ``generation_config.json`` together; a file that is absent adds none.

    Raises `CheckpointError` for a file that is not a JSON object, or a value that is neither an id nor a list of ids.
    """
    ids: list[int] = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        if not path.exists():
            continue
        value = read_json(path).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and i >= 0 for i in values):
            raise CheckpointError(f"{path}: eos_token_id: wanted an id or a list of ids, saw {value!r}")
        ids += values
    return tuple(dict.fromkeys(ids))


def read_checkpoint(
    folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the weights of a folder in Hugging Face layout (single file or sharded safetensors).

    The weights come in this package's names and shapes (`parameter_table`), every one of ``dtype`` (None: the
    matrices' own) on ``device``, ready for ``load_state_dict(state, assign=True)``. On the CPU a parameter whose parts
    already lie side by side with the wanted dtype is a view of the memory-mapped file: nothing is read until it is
    used. Any other is copied into storage of its own.

    Raises `CheckpointError`, before any weight is read, for a missing, truncated or foreign file, a shard or tensor
    that is missing, a tensor the model has no place for, and a wrong shape or dtype.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise CheckpointError(f"dtype: wanted one of {', '.join(map(str, DTYPES.values()))}, saw {dtype}")
    device = torch.device(device)
    config = read_config(folder / "config.json")
    table = parameter_table(config)
    entries = _read_entries(folder)
    _check_entries(folder, entries, table, config.tie_embeddings)
    maps = {file: _MappedFile(file) for file in sorted({entry.file for entry in entries.values()})}
    if config.tie_embeddings and "lm_head.weight" in entries:
        _check_duplicate(maps, entries["lm_head.weight"], entries["model.embed_tokens.weight"])

    if dtype is None:
        matrices = (entries[name].dtype for parts in table.values() for name, shape in parts.items() if len(shape) == 2)
        dtype = reduce(torch.promote_types, {DTYPES[name] for name in matrices})
    state = {}
    for ours, parts in table.items():
        state[ours] = _build_parameter(maps, [entries[name] for name in parts], dtype, device)
    return config, state


def _read_entries(folder: Path) -> dict[str, _Entry]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return _read_header(single)
    if not index.exists():
        pickled = " (pickled weights are not loaded)" if any(folder.glob("pytorch_model*.bin")) else ""
        raise CheckpointError(f"{folder}: wanted {SINGLE_FILE} or {INDEX_FILE}, saw neither{pickled}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: wanted a JSON object of tensor name -> file name in this folder")
    shards = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name}: not there; {INDEX_FILE} names it as a shard")
        shards[name] = _read_header(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{folder / name}: tensor {tensor}: missing, {INDEX_FILE} says that it is here")
    strays = {tensor: entry for shard in shards.values() for tensor, entry in shard.items()}
    return {**strays, **{tensor: shards[name][tensor] for tensor, name in weight_map.items()}}


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _read_header(file: Path) -> dict[str, _Entry]:
    try:
        with safe_open(file, framework="pt"):
            pass  # refuses a broken header, and data that does not fill the file exactly
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.is_file() else None
        seen = f"{size:,} bytes" if size is not None else "no regular file"
        raise CheckpointError(f"{file}: wanted a whole safetensors file, saw {seen} ({error})") from None
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {
        name: _Entry(file, fields["dtype"], tuple(fields["shape"]), *(8 + length + i for i in fields["data_offsets"]))
        for name, fields in header.items()
        if name != "__metadata__"
    }


def _check_entries(
    folder: Path, entries: Mapping[str, _Entry], table: Mapping[str, Mapping[str, Shape]], tied: bool
) -> None:
    wanted = {name: shape for parts in table.values() for name, shape in parts.items()}
    problems = list(_find_problems(folder, entries, wanted, tied))
    if problems:
        more = f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)


def _find_problems(
    folder: Path, entries: Mapping[str, _Entry], wanted: Mapping[str, Shape], tied: bool
) -> Iterator[str]:
    whole = folder / (SINGLE_FILE if (folder / SINGLE_FILE).exists() else INDEX_FILE)
    for name, shape in wanted.items():
        entry = entries.get(name)
        if entry is None:
            yield f"{whole}: tensor {name}: wanted shape {list(shape)}, saw no such tensor"
        elif entry.shape != shape:
            yield f"{entry.file}: tensor {name}: wanted shape {list(shape)}, saw {list(entry.shape)}"
        elif entry.dtype not in DTYPES:
            yield f"{entry.file}: tensor {name}: wanted dtype {', '.join(DTYPES)}, saw {entry.dtype}"
    for name in sorted(set(entries) - set(wanted)):
        if not name.endswith(IGNORED_SUFFIXES) and not (tied and name == "lm_head.weight"):
            entry = entries[name]
            yield f"{entry.file}: tensor {name}: wanted no such tensor, saw {entry.dtype} {list(entry.shape)}"


class _MappedFile:
    """A file mapped copy-on-write; ``data`` is one uint8 tensor over all of it. Tensors made from it keep it open."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    def drop(self, begin: int, end: int) -> None:
        """Lets go of the resident pages of bytes ``begin`` to ``end``.

        Legal while loading only: nothing has been written to the map yet, so that every page can come back from the
        file, and the range may be rounded outwards to whole pages.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def chunks(self, entry: _Entry) -> Iterator[Tensor]:
        """The bytes of ``entry`` in order, in uint8 pieces of `CHUNK_BYTES`; the pages of each are dropped after it."""
        for begin in range(entry.begin, entry.end, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, entry.end)
            yield self.data[begin:end]
            self.drop(begin, end)


def _build_parameter(
    maps: Mapping[Path, _MappedFile], parts: Sequence[_Entry], dtype: torch.dtype, device: torch.device
) -> Tensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    if device.type == "cpu" and parts[0].aligned and _side_by_side(parts, dtype):
        data = maps[parts[0].file].data
        return data[parts[0].begin : parts[-1].end].view(dtype).view(shape)
    fused = torch.empty(shape, dtype=dtype, device=device)
    _copy(maps, parts, fused.view(-1))
    return fused


def _side_by_side(parts: Sequence[_Entry], dtype: torch.dtype) -> bool:
    same_dtype = all(DTYPES[part.dtype] == dtype for part in parts)
    return same_dtype and all(a.file == b.file and a.end == b.begin for a, b in pairwise(parts))


def _copy(maps: Mapping[Path, _MappedFile], parts: Iterable[_Entry], target: Tensor) -> None:
    """Fills the flat ``target`` with the elements of ``parts``, one after the other, converted to its dtype."""
    filled = 0
    for part in parts:
        for piece in maps[part.file].chunks(part):
            source = (piece if part.aligned else piece.clone()).view(DTYPES[part.dtype])
            target[filled : filled + source.numel()].copy_(source)
            filled += source.numel()
    assert filled == math.prod(target.shape)


def _check_duplicate(maps: Mapping[Path, _MappedFile], head: _Entry, embedding: _Entry) -> None:
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        torch.equal(a, b)
        for a, b in zip(maps[head.file].chunks(head), maps[embedding.file].chunks(embedding), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{head.file}: tensor lm_head.weight: wanted the same values as model.embed_tokens.weight "
            "(tie_word_embeddings is set), saw others"
        )
