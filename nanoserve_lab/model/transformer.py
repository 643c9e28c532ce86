"""One transformer for Llama, Qwen2 and Qwen3.

The forward takes tensors only: which slots of the K/V pool a token is written to and which it reads come in as
tensors (``cache.paged`` makes them), and the read itself is a function that is handed in (``cache.attention``). Prefill
and decode are the same forward over ``[tokens]``; they differ in the read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoserve_lab.model.config import ModelConfig
from nanoserve_lab.model.linear import Linear, Product
from nanoserve_lab.model.rope import rope_tables, rotate

#: ``read(q, k, v, keys, values) -> [tokens, heads, head_dim]``: attention of the queries ``q`` ``[tokens, heads,
#: head_dim]``; ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` are this step's own (already written), ``keys`` and
#: ``values`` ``[slots, kv_heads, head_dim]`` one layer of the pool.
Read = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: Keys and values of each layer, each ``[slots, kv_heads, head_dim]``.
LayerCaches = Sequence[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467).

    ``kernel`` computes it where it is set; see `cpu`.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.kernel: Callable[[Tensor, Tensor, float], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """One row of ``weight`` ``[vocab, hidden]`` a token. Not ``nn.Embedding``: its random initialisation on the meta
    device imports the compiler, 140 MB and more than a second, for weights that are replaced at once."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


def place(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` to ``slots`` ``[tokens]`` int64 of a layer's cache."""
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


class Attention(nn.Module):
    """Grouped-query attention over the paged pool; Q, K and V come out of one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, config.q_size + 2 * config.kv_size, bias=config.qkv_bias)
        self.o = Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
        self.place: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = place

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        write_slots: Tensor,
        cache: tuple[Tensor, Tensor],
        read: Read,
    ) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qkv[:, :heads]), self.k_norm(qkv[:, heads : heads + kv_heads])
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        else:
            q, k = self.rotate(qkv[:, : heads + kv_heads], cos, sin).split([heads, kv_heads], dim=1)
        v = qkv[:, heads + kv_heads :]
        keys, values = cache
        self.place(keys, values, write_slots, k, v)
        return self.o(read(q, k, v, keys, values).reshape(-1, heads * self.head_dim), residual)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` ``[tokens, size]`` of ``gate_up`` ``[tokens, 2 * size]`` (Shazeer 2020, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """The gated unit of `swiglu` between two products; gate and up come out of one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.swiglu: Callable[[Tensor], Tensor] = swiglu

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down(self.swiglu(self.gate_up(x)), residual)


class Layer(nn.Module):
    """One pre-norm residual layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, write_slots: Tensor, cache: tuple[Tensor, Tensor], read: Read
    ) -> Tensor:
        x = self.attn(self.attn_norm(x), x, cos, sin, write_slots, cache, read)
        return self.mlp(self.mlp_norm(x), x)


class Transformer(nn.Module):
    """The decoder: embedding, layers, final norm, LM head (the embedding itself where ``tie_embeddings``)."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head_kernel: Product | None = None
        self._build_rope()

    def _build_rope(self) -> None:
        config, like = self.config, self.embed.weight
        for name, table in zip(
            ("rope_cos", "rope_sin"),
            rope_tables(config.rope, config.head_dim, config.max_position, like.dtype),
            strict=True,
        ):
            self.register_buffer(name, table.to(like.device), persistent=False)

    @classmethod
    def from_state(cls, config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
        """The model around the tensors of ``state``, which become its parameters without a copy.

        Raises `RuntimeError` (from ``load_state_dict``) where ``state`` lacks a parameter or has one too many.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(dict(state), assign=True)
        model._build_rope()
        return model.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and logits."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        write_slots: Tensor,
        caches: LayerCaches,
        read: Read,
        logits_at: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[tokens, vocab]`` of the model's dtype for ``input_ids`` ``[tokens]`` int64.

        ``positions`` and ``write_slots`` are ``[tokens]`` int64; K and V of each token are written to its slot before
        ``read`` runs. With ``logits_at`` ``[n]`` int64 only those tokens go through the LM head: ``[n, vocab]``.
        """
        x = self.embed(input_ids)
        cos, sin = self.rope_cos[positions].unsqueeze(1), self.rope_sin[positions].unsqueeze(1)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cos, sin, write_slots, cache, read)
        if logits_at is not None:
            x = x[logits_at]
        return self._head(self.norm(x))

    def _head(self, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(x)
        if self.head_kernel is not None:
            return self.head_kernel(x, self.embed.weight, None, None)
        return F.linear(x, self.embed.weight)
