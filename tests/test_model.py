"""The transformer against `transformers`, through the paged cache: alone, ragged, prefilled and decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve_lab import Engine, EngineConfig, SamplingParams, load_model
from nanoserve_lab.cache.attention import DecodeRead, PrefillRead
from nanoserve_lab.cache.paged import PagedCache, PrefillChunk
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.model.checkpoint import read_checkpoint
from nanoserve_lab.model.config import RopeConfig
from nanoserve_lab.model.rope import inverse_frequencies
from nanoserve_lab.model.transformer import Transformer
from nanoserve_lab.plan import Planner

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name: (model type, configuration, arguments of save_pretrained)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 8}, {}),
    "llama-biased": ("Llama", {"attention_bias": True}, {}),
    "llama-head-dim": ("Llama", {"head_dim": 16}, {}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
        {},
    ),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3}, {}),
    "llama-sharded": ("Llama", {}, {"max_shard_size": "60KB"}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen2-tied-sharded": ("Qwen2", {"tie_word_embeddings": True}, {"max_shard_size": "60KB"}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {}),
    "qwen3-tied-theta": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {},
    ),
}
PROMPT_LENGTHS = (1, 7, 40)
STEPS = 20


def write_checkpoint(folder: Path, kind: str, extra: dict[str, Any], save: dict[str, Any]) -> Any:
    """A random `transformers` model saved to ``folder``, its norms and biases random too: none can be dropped."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | extra))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder, **save)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    kind, extra, save = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(folder, kind, extra, save)
    if "max_shard_size" in save:
        assert len(list(folder.glob("*.safetensors"))) > 1
    return reference, Transformer.from_state(*read_checkpoint(folder, torch.float32, "cpu"))


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@torch.inference_mode()
def reference_run(reference: Any, prompt: list[int]) -> tuple[Tensor, list[int]]:
    """Logits of every prompt token and of 20 greedy steps, ``[prompt + 20, vocab]``, and the greedy tokens."""
    ids = list(prompt)
    for _ in range(STEPS):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return reference(torch.tensor([ids])).logits[0], ids[len(prompt) :]


@torch.inference_mode()
def paged_run(model: Transformer, batch: list[list[int]], forced: list[list[int]], chunk: int = 64) -> list[Tensor]:
    """The same logits from a ragged prefill in chunks and 20 decode steps of the whole batch, fed ``forced`` tokens."""
    pool = KVPool(model.config, num_blocks=64, block_size=4, dtype=model.dtype, device="cpu")
    pool.data.fill_(float("nan"))  # nothing may be read that was not written
    cache = PagedCache(pool, max_rows=len(batch), max_context=64)
    blocks = [cache.reserve(len(prompt)) for prompt in batch]
    rows: list[list[Tensor]] = [[] for _ in batch]
    for start in range(0, max(map(len, batch)), chunk):
        parts = [(i, start, min(start + chunk, len(prompt))) for i, prompt in enumerate(batch) if start < len(prompt)]
        chunks = [PrefillChunk(blocks[i], start, stop) for i, start, stop in parts]
        positions, write_slots, spans = cache.prefill_addresses(chunks)
        ids = torch.tensor([token for i, start, stop in parts for token in batch[i][start:stop]])
        logits = model(ids, positions, write_slots, pool.layers, PrefillRead(spans))
        for (i, _, _), span in zip(parts, spans, strict=True):
            rows[i].append(logits[span.start : span.stop])
    for prompt, owned in zip(batch, blocks, strict=True):
        cache.add(owned, len(prompt))
    for step in range(STEPS):
        cache.grow()
        plan = Planner(cache).plan()
        read = DecodeRead(plan.slot_mapping, plan.context_lens)
        ids = torch.tensor([tokens[step] for tokens in forced])
        step_logits = model(ids, plan.positions.view(-1), plan.write_slots, pool.layers, read)
        for row, one in zip(rows, step_logits, strict=True):
            row.append(one.unsqueeze(0))
    return [torch.cat(row) for row in rows]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"largest difference {error:.1e} of the largest logit"


@pytest.mark.both_ways
def test_logits_and_greedy_text_equal_transformers(pair: tuple[Any, Transformer]) -> None:
    reference, model = pair
    batch = prompts(model.config.vocab_size)
    runs = [reference_run(reference, prompt) for prompt in batch]
    forced = [tokens for _, tokens in runs]
    for prompt, (logits, tokens) in zip(batch, runs, strict=True):
        assert_close(paged_run(model, [prompt], [tokens])[0], logits)
    for chunk in (64, 5):
        for ours, (logits, _) in zip(paged_run(model, batch, forced, chunk), runs, strict=True):
            assert_close(ours, logits)
    engine = Engine.build(model, None, EngineConfig(max_rows=3, max_context=64, block_size=4))
    completions = engine.generate(batch, SamplingParams(max_tokens=STEPS))
    assert [c.token_ids for c in completions] == forced


def test_logits_can_be_asked_for_at_some_tokens_only(pair: tuple[Any, Transformer]) -> None:
    _, model = pair
    pool = KVPool(model.config, num_blocks=8, block_size=4, dtype=model.dtype, device="cpu")
    cache = PagedCache(pool, max_rows=1, max_context=16)
    positions, write_slots, spans = cache.prefill_addresses([PrefillChunk(cache.reserve(6), 0, 6)])
    ids = torch.arange(6)
    with torch.inference_mode():
        every = model(ids, positions, write_slots, pool.layers, PrefillRead(spans))
        some = model(ids, positions, write_slots, pool.layers, PrefillRead(spans), torch.tensor([5, 2]))
    torch.testing.assert_close(some, every[[5, 2]], rtol=1e-5, atol=1e-5)


def test_llama3_frequencies_by_hand() -> None:
    rope = RopeConfig(
        10_000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    plain = 10_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    scaled = inverse_frequencies(rope, 16)
    turns = 64 * plain / (2 * torch.pi)
    high, low = turns > 4, turns < 1
    blended = ~(high | low)
    assert high.any()
    assert low.any()
    assert blended.any()
    assert torch.equal(scaled[high], plain[high])
    assert torch.equal(scaled[low], plain[low] / 8)
    share = (turns[blended] - 1) / 3
    torch.testing.assert_close(scaled[blended], share * plain[blended] + (1 - share) * plain[blended] / 8)


@pytest.fixture(scope="module")
def default_pair(default_model_folder: Path) -> tuple[Any, Any, Transformer]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32).eval()
    model, tokenizer = load_model(device="cpu", dtype=torch.float32)
    return reference, tokenizer, model


def test_default_model_speaks_as_transformers_says(default_pair: tuple[Any, Any, Transformer]) -> None:
    reference, tokenizer, model = default_pair
    engine = Engine.build(model, tokenizer, EngineConfig(max_rows=2, max_context=256))
    prompt = tokenizer.encode("The capital of France is")
    chat = tokenizer.encode_chat([{"role": "user", "content": "Name three rivers."}])
    for ids in (prompt, chat):
        theirs = reference.generate(
            torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(ids) :].tolist()
        ours = engine.generate([ids], SamplingParams(max_tokens=30, ignore_eos=True))[0]
        assert ours.token_ids == theirs
        if ids == prompt:
            assert ours.text.startswith(" Paris")
