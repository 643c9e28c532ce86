"""Checkpoints written by transformers, and what is said about broken ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nanoserve_lab.model import CheckpointError, load_model
from nanoserve_lab.model.checkpoint import parameter_table, read_checkpoint, read_eos_ids
from nanoserve_lab.model.transformer import Transformer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied-biased": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
}


def save_random(config: PretrainedConfig, folder: Path, **options: str) -> dict[str, Tensor]:
    """A random checkpoint in ``folder``, and its tensors by their Hugging Face names."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **options)
    return dict(model.state_dict())


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole, untied Llama checkpoint."""
    save_random(CONFIGS["llama"], tmp_path)
    return tmp_path


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_state_is_what_transformers_wrote(kind: str, sharded: bool, tmp_path: Path) -> None:
    theirs = save_random(CONFIGS[kind], tmp_path, max_shard_size="10KB" if sharded else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not sharded
    config, state = read_checkpoint(tmp_path)
    for ours, parts in parameter_table(config).items():
        assert torch.equal(state[ours], torch.cat([theirs[part] for part in parts]))
        assert state[ours].dtype == torch.float32
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    qkv = [theirs[f"{attention}.{part}_proj.weight"] for part in "qkv"]
    gate_up = [theirs[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(state["layers.1.attn.qkv.weight"], torch.cat(qkv))
    assert torch.equal(state["layers.1.mlp.gate_up.weight"], torch.cat(gate_up))
    model = Transformer(config)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in state.items()
    }


@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_conversion_is_torchs_own(target: torch.dtype, folder: Path) -> None:
    _, state = read_checkpoint(folder)
    _, converted = read_checkpoint(folder, target)
    assert all(torch.equal(converted[name], tensor.to(target)) for name, tensor in state.items())
    assert {tensor.dtype for tensor in converted.values()} == {target}


def test_own_dtype_is_that_of_the_matrices(folder: Path) -> None:
    def narrow(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(torch.bfloat16) if tensor.ndim == 2 else tensor

    rewrite(folder, narrow)
    _, state = read_checkpoint(folder)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_end_ids_are_united(folder: Path) -> None:
    for name, ids in {"config.json": 5, "generation_config.json": [5, 2, 7]}.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    assert read_eos_ids(folder) == (5, 2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_eos_ids(folder) == (5, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id: wanted .* saw '</s>'"):
        read_eos_ids(folder)


def test_neighbours_in_the_file_are_one_view(default_model_folder: Path) -> None:
    _, state = read_checkpoint(default_model_folder)
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in state.values())


def move_data(path: Path, shift: int) -> int:
    """Moves a file's data by ``shift`` bytes, the header padded with spaces; the offset where the data starts now."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes((start - 8 + shift).to_bytes(8, "little") + data[8:start] + b" " * shift + data[start:])
    return start + shift


def test_data_that_is_not_aligned_is_copied(folder: Path) -> None:
    # Cloned: views of the mapped file would change with it.
    state = {name: tensor.clone() for name, tensor in read_checkpoint(folder)[1].items()}
    move_data(folder / "model.safetensors", 1)
    _, moved = read_checkpoint(folder)
    assert all(torch.equal(moved[name], tensor) for name, tensor in state.items())


def test_neighbouring_offsets_in_two_files_are_no_view(folder: Path) -> None:
    state = {name: tensor.clone() for name, tensor in read_checkpoint(folder)[1].items()}
    shards: dict[str, dict[str, Tensor]] = {"rest": load_file(folder / "model.safetensors")}
    (folder / "model.safetensors").unlink()
    for part in ("gate", "up"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        shards[part] = {name: shards["rest"].pop(name)}
    for shard, tensors in shards.items():
        save_file(tensors, folder / f"{shard}.safetensors")
    weight_map = {name: f"{shard}.safetensors" for shard, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    end = move_data(folder / "gate.safetensors", 0) + 48 * 32 * 4
    assert move_data(folder / "up.safetensors", end - move_data(folder / "up.safetensors", 0)) == end
    _, split = read_checkpoint(folder)
    assert all(torch.equal(split[name], tensor) for name, tensor in state.items())


def test_known_buffers_and_a_second_tied_head_are_passed_over(tmp_path: Path) -> None:
    save_random(CONFIGS["qwen2"], tmp_path)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, add)
    assert "lm_head.weight" not in read_checkpoint(tmp_path)[1]
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"][3, 5].add_(1))
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight: wanted the same values"):
        read_checkpoint(tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(Q), rf"model.safetensors: tensor {Q}: wanted shape \[32, 32\], saw no such tensor$"),
    "several": (lambda t: (t.pop(Q), t.pop("lm_head.weight")), r"saw no such tensor \(and 1 more like this\)$"),
    "stray": (lambda t: t.update(other=torch.ones(2)), r"tensor other: wanted no such tensor, saw F32 \[2\]"),
    "shape": (lambda t: t.update({Q: t[Q][:8].clone()}), rf"tensor {Q}: wanted shape \[32, 32\], saw \[8, 32\]"),
    "dtype": (lambda t: t.update({Q: t[Q].to(torch.int8)}), rf"tensor {Q}: wanted dtype F64, F32, F16, BF16, saw I8"),
}


@pytest.fixture
def nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which weights are mapped: the checks have to come first."""

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("a weight was mapped before the checkpoint was checked")

    monkeypatch.setattr(torch, "frombuffer", refuse)


@pytest.mark.usefixtures("nothing_mapped")
@pytest.mark.parametrize("fault", BROKEN)
def test_wrong_tensors_are_named(fault: str, folder: Path) -> None:
    change, message = BROKEN[fault]
    rewrite(folder, lambda tensors: (change(tensors), None)[1])
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.usefixtures("nothing_mapped")
def test_broken_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for size in (len(whole) - 1, 8 + length, 8 + length // 2, 5, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"model.safetensors: wanted a whole safetensors file, saw {size:,}"):
            read_checkpoint(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"model.safetensors: wanted a whole safetensors file"):
        read_checkpoint(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"wanted model.safetensors or .*, saw neither \(pickled weights"):
        read_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"dtype: wanted one of torch.float64, .* saw torch.int8"):
        read_checkpoint(folder, torch.int8)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: not there"):
        read_checkpoint(folder)


@pytest.mark.usefixtures("nothing_mapped")
def test_broken_indexes_are_named(tmp_path: Path) -> None:
    save_random(CONFIGS["llama"], tmp_path, max_shard_size="10KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    shard = index["weight_map"][Q]

    other = next(name for name in shards if name != shard)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], Q: other}}))
    with pytest.raises(CheckpointError, match=rf"{other}: tensor {Q}: missing, model.safetensors.index.json says"):
        read_checkpoint(tmp_path)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], Q: f"../{shard}"}}))
    with pytest.raises(CheckpointError, match=r"index.json: weight_map: wanted .* file name in this folder"):
        read_checkpoint(tmp_path)
    path.write_text(json.dumps(index))
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=rf"{shard}: not there; model.safetensors.index.json names it"):
        read_checkpoint(tmp_path)


def test_load_model(folder: Path, default_model_folder: Path) -> None:
    shutil.copy(default_model_folder / "tokenizer.json", folder)
    model, tokenizer = load_model(folder, "cpu")
    assert tokenizer.vocab_size == 49152
    assert not model.training
    assert {(p.dtype, p.device.type, p.requires_grad) for p in model.parameters()} == {(torch.float32, "cpu", False)}
    assert {p.dtype for p in load_model(str(folder), "cpu", torch.bfloat16)[0].parameters()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def rewritten_model_folder(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default model as transformers saves it: in alphabetical order, q, k and v apart."""
    folder = tmp_path_factory.mktemp("rewritten")
    AutoModelForCausalLM.from_pretrained(default_model_folder).save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)


PEAK = """
import sys, torch
from pathlib import Path
from nanoserve_lab.model.checkpoint import read_checkpoint

def high_water_mark():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024

before = high_water_mark()
state = read_checkpoint(Path(sys.argv[1]), getattr(torch, sys.argv[2]))[1]
weights = sum(tensor.nbytes for tensor in state.values())
print(weights, high_water_mark() - before - weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("default_model_folder", "float32"),
        ("default_model_folder", "bfloat16"),
        ("rewritten_model_folder", "float32"),
        ("rewritten_model_folder", "bfloat16"),
    ],
)
def test_peak_memory_of_loading(source: str, dtype: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(source)
    run = subprocess.run([sys.executable, "-c", PEAK, folder, dtype], capture_output=True, text=True, check=True)
    weights, beside = map(int, run.stdout.split())
    assert weights == 134_515_008 * getattr(torch, dtype).itemsize
    assert beside < 100e6  # a third of what is allowed: the embedding alone is 113 MB in fp32
