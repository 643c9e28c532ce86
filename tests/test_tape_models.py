"""The tape on code that nobody here wrote: `transformers` models and modules of ``torch.nn``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoserve_lab.recorders import RecordingRefused, tape_recorder

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
TOKENS = 20


def build(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "GPT2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None)
        ).eval()
    extra = {"head_dim": 8} if kind == "Qwen3" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **extra)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


class Decoder:
    """Greedy decoding with a static cache; ``step`` is what is recorded."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        length = PROMPT.shape[1]
        with torch.inference_mode():
            logits = self.forward(PROMPT, torch.arange(length))
        self.token = logits.argmax(-1, keepdim=True).clone()
        self.position = torch.full((1,), length)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        output = self.model(
            token, past_key_values=self.cache, cache_position=position, position_ids=position[None], use_cache=True
        )
        return output.logits[:, -1]

    def accept(self, logits: Tensor) -> None:
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2"])
def test_twenty_tokens_from_a_static_cache(kind: str) -> None:
    model = build(kind)
    eager, recorded = Decoder(model), Decoder(model)
    recording = tape_recorder(recorded.forward, (recorded.token, recorded.position))
    tokens = []
    for step in range(1 + TOKENS):
        with torch.inference_mode():
            wanted = eager.forward(eager.token, eager.position)
        eager.accept(wanted)
        if step > 0:  # recording ran the first one, which moved the cache's own counter on
            recording.replay()
        assert torch.equal(recording.output, wanted)
        recorded.accept(recording.output)
        tokens.append(int(recorded.token))
    assert len(set(tokens)) > 2
    table = recording.externals()
    assert table[table.written].kept_by.str.startswith("StaticLayer").all()
    assert table.written.sum() >= 4
    assert table.kept_by.str.contains(f"{kind}.*lm_head.weight|{kind}.*wte.weight").any()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_the_moving_addresses_of_a_dynamic_cache_are_named(kind: str) -> None:
    model = build(kind)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(PROMPT, past_key_values=cache, use_cache=True)
    token, address = PROMPT[:, :1].clone(), cache.layers[0].keys.data_ptr()
    with pytest.raises(RecordingRefused, match=r"aten.cat.default reads a \(1, \d, 5, 8\).* address moves") as caught:
        tape_recorder(lambda token: model(token, past_key_values=cache, use_cache=True).logits, (token,))
    assert "self.keys" in caught.value.facts["source"]
    assert caught.value.facts["addresses"] == (address,)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, stride=2)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x.abs().mul(3).long().clamp(max=9))


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.register_buffer("state", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        for t in range(3):
            state = self.cell(x[t], self.state)
            self.state.copy_(state)
        return self.state * 1


class LongShort(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x)
        return torch.cat(self.cell(x, (h, c)))


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (Pooled, (2, 3, 12, 12)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2, dilation=2), (2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 2, stride=2), (1, 3, 4, 4)),
    "lstm cell": (LongShort, (4, 6)),
    "gru cell": (lambda: Recurrent(nn.GRUCell(6, 6)), (3, 4, 6)),
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2, batch_first=True), (2, 4, 6)),
    "gru": (lambda: nn.GRU(6, 5, bidirectional=True), (4, 2, 6)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)), (4, 6)),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.LocalResponseNorm(2)), (2, 4, 6)),
    "bags": (Bags, (3, 4)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (2, 4, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), (2, 4, 6)),
    "activations": (lambda: nn.Sequential(nn.PReLU(), nn.Hardswish(), nn.Mish(), nn.ELU(), nn.Softmax(-1)), (4, 6)),
    "shuffles": (lambda: nn.Sequential(nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear")), (1, 4, 3, 3)),
}  # fmt: skip


@pytest.fixture
def _general_attention() -> Iterator[None]:
    # The fast path of attention modules stands aside for every function mode, so a tape holds the general one.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.usefixtures("_general_attention")
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules(name: str, arena: bool) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    x = torch.randn(shape)
    args = (x, x, x) if name == "attention" else (x,)
    recording = tape_recorder(module, args, arena=arena)
    for _ in range(2):
        x.normal_()
        state = {key: value.clone() for key, value in module.state_dict().items()}
        with torch.inference_mode():
            wanted = torch.utils._pytree.tree_leaves(module(*args))
        module.load_state_dict(state)
        recording.replay()
        got = torch.utils._pytree.tree_leaves(recording.output)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
