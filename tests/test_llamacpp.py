"""The peer llama.cpp gets the very weights; where it is installed, it says the same tokens."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from nanoserve_lab.bench import decode, llamacpp
from nanoserve_lab.bench.peers import Peer, PeerMissing
from nanoserve_lab.bench.timing import made_up_prompt
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.model.checkpoint import read_checkpoint
from nanoserve_lab.model.convert import permute, unpermute
from nanoserve_lab.model.transformer import Transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_rows_of_heads_go_there_and_back() -> None:
    weight = np.arange(48, dtype=np.float32).reshape(24, 2)
    assert np.array_equal(unpermute(permute(weight, 3), 3), weight)
    assert np.array_equal(permute(unpermute(weight, 3), 3), weight)
    assert not np.array_equal(permute(weight, 3), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_holds_the_weights(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    llamacpp.write_gguf(folder, tmp_path / "model.gguf", dtype)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    heads = {"q_proj": 4, "k_proj": 2}
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    source = load_file(folder / "model.safetensors")
    assert len(stored) == len(source)
    for name, weight in source.items():
        tensor = stored[str(names.get_name(name, try_suffixes=(".weight",)))]
        ours = gguf.dequantize(tensor.data, tensor.tensor_type)
        rows = heads.get(name.split(".")[-2])
        wanted = torch.from_numpy(weight)
        wanted = wanted.to(dtype).float() if weight.ndim == 2 else wanted
        assert np.array_equal(ours if rows is None else unpermute(ours, rows), wanted.numpy()), name


def test_where_it_is_missing_the_message_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    llamacpp._library.cache_clear()
    monkeypatch.setattr(llamacpp, "import_module", missing)
    with pytest.raises(PeerMissing, match="pip install llama-cpp-python"):
        llamacpp.LlamaCpp(folder, torch.float32)


def test_it_says_what_the_engine_says(folder: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = Transformer.from_state(*read_checkpoint(folder))
    prompt = made_up_prompt(128, 20)
    decoder = llamacpp.LlamaCpp(folder, torch.float32).decoder(prompt, 3, 12)
    assert decoder.seconds_per_step(8, 2) > 0
    engine = Engine.build(model, None, EngineConfig(max_rows=3, max_context=64))
    [ours] = engine.generate([prompt], SamplingParams(max_tokens=11))
    assert decoder.sequences.tolist() == [[*prompt, *ours.token_ids]] * 3
    peer = Peer(folder, torch.float32, torch.device("cpu"))
    cell = decode.measure_cell(model, peer, 2, 20, 2, 1, llama_cpp=llamacpp.LlamaCpp(folder, torch.float32))
    assert cell.engine.tolist()[-1] == "llama.cpp"
    assert cell.ratio[cell.engine.str.startswith("transformers")].max() == 1
