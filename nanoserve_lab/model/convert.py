"""A Llama GGUF file as a folder in Hugging Face layout, weights dequantised to fp32."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from nanoserve_lab.model.checkpoint import SINGLE_FILE, Shape, parameter_table
from nanoserve_lab.model.config import CheckpointError, ModelConfig, parse_config

#: Data of a safetensors file that we write starts at a multiple of this (a cache line, and any vector register).
ALIGNMENT = 64

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TensorSource:
    """One fp32 tensor to be written: its shape, and a function that makes it when its turn comes."""

    name: str
    shape: Shape
    load: Callable[[], Array]


def write_safetensors(
    path: Path, tensors: Iterable[TensorSource], progress: Callable[[float], None] | None = None
) -> None:
    """Writes fp32 tensors to ``path`` in the order given, holding one in memory at a time, and syncs the file.

    The header is padded with spaces so that the data starts at a multiple of `ALIGNMENT` bytes. ``progress`` gets the
    fraction written. Raises ValueError where a tensor does not have the shape that its source announced.
    """
    sources = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in sources:
        begin, end = end, end + int(np.prod(source.shape)) * 4
        header[source.name] = {"dtype": "F32", "shape": list(source.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for source in sources:
            array = np.ascontiguousarray(source.load(), dtype="<f4")
            if array.shape != source.shape:
                raise ValueError(f"tensor {source.name}: announced {source.shape}, made {array.shape}")
            stream.write(array.data)
            if progress is not None:
                progress(header[source.name]["data_offsets"][1] / end)
        stream.flush()
        os.fsync(stream.fileno())


def convert_gguf(source: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Converts the GGUF file ``source`` to a model folder that this package and `transformers` load.

    Writes ``model.safetensors`` (fp32; the parts of fused parameters side by side, so that they load without a copy),
    ``config.json``, ``generation_config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which
    must exist. ``progress`` gets the fraction of the weights written. Raises `CheckpointError`, before anything is
    written, for a file that is not GGUF, is not Llama or lacks a tensor, and for a tokenizer other than SmolLM's.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{source}: not a whole GGUF file ({error})") from None
    try:
        fields = _Fields(reader)
        config_json = _config_json(fields, {tensor.name for tensor in reader.tensors})
        config = parse_config(config_json)
        tensors = _tensor_sources(reader, config)
        tokenizer = _build_tokenizer(fields)
        tokenizer_json = _tokenizer_config(fields, config)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    write_safetensors(folder / SINGLE_FILE, tensors, progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {name: config_json[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "config.json": config_json,
        "generation_config.json": special,
        "tokenizer_config.json": tokenizer_json,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Fields:
    """The metadata of a GGUF file by key."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise CheckpointError(f"metadata {key}: missing")
        return field.contents()

    def check(self, key: str, wanted: object) -> None:
        if self[key] != wanted:
            raise CheckpointError(f"metadata {key}: wanted {wanted!r}, saw {self[key]!r}")


def _config_json(fields: _Fields, tensor_names: set[str]) -> dict[str, Any]:
    fields.check("general.architecture", "llama")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    fields.check("llama.rope.dimension_count", hidden // heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tensor_sources(reader: gguf.GGUFReader, config: ModelConfig) -> list[TensorSource]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    sources = []
    for parts in parameter_table(config).values():
        for name, shape in parts.items():
            key = names.get_name(name, try_suffixes=(".weight", ".bias"))
            tensor = stored.pop(key or name, None)
            if tensor is None:
                raise CheckpointError(f"tensor {key or name}: wanted shape {list(shape)}, saw no such tensor")
            seen = tuple(int(size) for size in reversed(tensor.shape))
            if seen != shape:
                raise CheckpointError(f"tensor {key}: wanted shape {list(shape)}, saw {list(seen)}")
            sources.append(TensorSource(name, shape, _loader(tensor, name, config)))
    if stored:
        raise CheckpointError(f"tensor {min(stored)}: wanted no such tensor")
    return sources


def _loader(tensor: gguf.ReaderTensor, name: str, config: ModelConfig) -> Callable[[], Array]:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])

    def load() -> Array:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        return weight if heads is None else unpermute(weight, heads)

    return load


def unpermute(weight: Array, heads: int) -> Array:
    """Rows of a Q or K projection ``[heads * head_dim, hidden]`` from llama.cpp's order to Hugging Face's.

    llama.cpp turns neighbouring rows ``(2i, 2i + 1)`` of a head as a pair, Hugging Face ``(i, i + head_dim / 2)``.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def permute(weight: Array, heads: int) -> Array:
    """The opposite of `unpermute`."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _build_tokenizer(fields: _Fields) -> FastTokenizer:
    fields.check("tokenizer.ggml.model", "gpt2")
    fields.check("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = FastTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == gguf.TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: _Fields, config: ModelConfig) -> dict[str, Any]:
    fields.check("tokenizer.ggml.add_bos_token", False)
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
