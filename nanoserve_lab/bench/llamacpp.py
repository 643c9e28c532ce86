"""The other peer of `bench decode`: llama.cpp through `llama-cpp-python`, on the same weights, in the same process.

`llama_cpp` is imported when a peer is made: the package does not need it, and installing it compiles llama.cpp.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from nanoserve_lab.bench.peers import PeerMissing
from nanoserve_lab.model.checkpoint import SINGLE_FILE
from nanoserve_lab.model.config import ModelConfig, read_config
from nanoserve_lab.model.convert import permute

_KINDS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write_gguf(folder: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the Llama checkpoint of ``folder`` (Hugging Face layout, one safetensors file) as GGUF without a tokenizer.

    Matrices become ``dtype`` (float32 or bfloat16), vectors float32.
    """
    config = read_config(folder / "config.json")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    writer = gguf.GGUFWriter(path, "llama")
    _write_sizes(writer, config)
    with safe_open(folder / SINGLE_FILE, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118, it is no mapping
            weight = tensors.get_tensor(name).float().numpy()
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
            weight = weight if heads is None else permute(weight, heads)
            kind = _KINDS[dtype] if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
            key = names.get_name(name, try_suffixes=(".weight",))
            if key is None:
                raise ValueError(f"{name}: GGUF has no name for this tensor in a Llama model")
            writer.add_tensor(key, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


@functools.cache
def _library() -> Any:
    try:
        api: Any = import_module("llama_cpp.llama_cpp")
    except ImportError:
        raise PeerMissing("llama.cpp is not installed: pip install llama-cpp-python (it compiles)") from None
    # The library calls it until the process ends, so nothing may free it.
    api.silence = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(api.silence, None)
    return api


class LlamaCpp:
    """llama.cpp with the weights of ``folder`` in ``dtype``; greedy, and it never stops early.

    Raises `PeerMissing` where ``llama_cpp`` cannot be imported.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.api = _library()
        self.dtype = dtype
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "model.gguf"
            write_gguf(folder, path, dtype)
            options = self.api.llama_model_default_params()
            options.use_mmap = False  # the file is gone when this returns
            self.model = self.api.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load the weights of {folder}")

    def decoder(self, prompt: Sequence[int], rows: int, steps: int) -> LlamaCppDecoder:
        """A batch of ``rows`` times ``prompt``, prefilled, with room for ``steps`` decode steps.

        The prompt is computed once and its K and V copied to the other rows.
        """
        return LlamaCppDecoder(self, prompt, rows, steps)


class LlamaCppDecoder:
    """A batch in the middle of decoding; ``sequences`` ``[rows, tokens]`` grow with every `seconds_per_step`."""

    def __init__(self, peer: LlamaCpp, prompt: Sequence[int], rows: int, steps: int) -> None:
        self.api, self.peer, self.rows = peer.api, peer, rows
        room = -(-(len(prompt) + steps + 1) // 256) * 256
        options = self.api.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = room * rows, rows, False
        options.n_batch = options.n_ubatch = max(len(prompt), rows)
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = int(_KINDS[peer.dtype])
        self.context = self.api.llama_init_from_model(peer.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {rows} rows of {room} tokens")
        self._batch = self.api.llama_batch_init(max(len(prompt), rows), 0, 1)
        self._position = len(prompt)
        first = self._decode([(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)], 1)
        memory = self.api.llama_get_memory(self.context)
        for row in range(1, rows):
            self.api.llama_memory_seq_cp(memory, 0, row, -1, -1)
        self.sequences = np.repeat(np.array([[*prompt, first[0]]]), rows, axis=0)

    def _decode(self, tokens: list[tuple[int, int, int, bool]], outputs: int) -> np.ndarray[Any, Any]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp could not decode")
        vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.peer.model))
        logits = np.ctypeslib.as_array(self.api.llama_get_logits(self.context), shape=(outputs, vocab))
        return logits.argmax(axis=1)

    def seconds_per_step(self, steps: int, dropped: int = 1) -> float:
        """Decode ``dropped + steps`` tokens a row; the mean seconds of the last ``steps``."""
        start = 0.0
        for step in range(dropped + steps):
            if step == dropped:
                start = time.perf_counter()
            newest = self.sequences[:, -1].tolist()
            batch = [(token, self._position, row, True) for row, token in enumerate(newest)]
            self.sequences = np.column_stack([self.sequences, self._decode(batch, self.rows)])
            self._position += 1
        return (time.perf_counter() - start) / steps

    def __del__(self) -> None:
        if getattr(self, "context", None):
            self.api.llama_batch_free(self._batch)
            self.api.llama_free(self.context)
