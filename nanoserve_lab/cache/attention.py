"""Reads of the paged K/V cache in plain PyTorch: the oracle that every faster read is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def paged_attention_reference(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """Attention of the last tokens of one sequence over all of it, ``[tokens, heads, head_dim]``.

    ``q`` ``[tokens, heads, head_dim]`` are the queries of the sequence's last ``tokens`` positions; ``slots``
    ``[context]`` int64 says where K and V of positions ``0 .. context - 1`` lie in ``keys`` and ``values`` ``[slots,
    kv_heads, head_dim]``. Causal: query ``i`` sees the positions up to ``context - tokens + i``.
    """
    tokens, heads, head_dim = q.shape
    context, kv_heads = slots.shape[0], keys.shape[1]
    k, v = keys[slots], values[slots]
    grouped = q.view(tokens, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("tkgd,ckd->kgtc", grouped, k) * head_dim**-0.5
    position = torch.arange(context, device=q.device)
    unseen = position > (context - tokens + position[:tokens]).unsqueeze(1)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("kgtc,ckd->tkgd", weights, v).reshape(tokens, heads, head_dim)


def paged_attention_batched_reference(
    q: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor, unseen: Tensor
) -> Tensor:
    """Attention of one new token per row over that row's context, ``[rows, heads, head_dim]``.

    ``slot_mapping`` ``[rows, width]`` int64 says where each row's K and V lie; ``unseen`` ``[rows, width]`` bool which
    of those columns lie past the row's context. These may hold anything, NaN included: their scores are masked and
    their V zeroed, because a weight of 0 times NaN is NaN. The intermediates are two gathers ``[rows, width, kv_heads,
    head_dim]`` and the score rectangle ``[rows, heads, 1, width]``.
    """
    rows, heads, head_dim = q.shape
    width, kv_heads = slot_mapping.shape[1], keys.shape[1]
    flat = slot_mapping.reshape(-1)
    k = keys.index_select(0, flat).view(rows, width, kv_heads, head_dim)
    v = values.index_select(0, flat).view(rows, width, kv_heads, head_dim)
    v.masked_fill_(unseen[:, :, None, None], 0.0)
    grouped = (q * head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, head_dim)
    scores = grouped @ k.permute(0, 2, 3, 1)
    weights = scores.masked_fill(unseen[:, None, None, :], float("-inf")).softmax(-1)
    return (weights @ v.transpose(1, 2)).view(rows, heads, head_dim)


class DecodeRead:
    """The read of a decode step: one token a row. What is made of the rectangle is made once and serves every layer."""

    def __init__(self, slot_mapping: Tensor, context_lens: Tensor) -> None:
        self.slot_mapping, self.context_lens = slot_mapping, context_lens
        columns = torch.arange(slot_mapping.shape[1], device=slot_mapping.device)
        self.unseen = columns >= context_lens.unsqueeze(1)
        # A window on a wider table is no list of slots; one copy of it is.
        self._slots = slot_mapping.contiguous()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return paged_attention_batched_reference(q, keys, values, self._slots, self.unseen)


@dataclass(frozen=True)
class Span:
    """One sequence's part of a ragged prefill: tokens ``start .. stop - 1`` of the batch.

    ``slots`` ``[context]`` int64 lists the sequence's slots from position 0 to its last token in this batch. Where the
    batch holds the whole context, its own K and V are read instead of the pool's.
    """

    start: int
    stop: int
    slots: Tensor


class PrefillRead:
    """The read of a ragged prefill: sequences side by side on one token axis, each causal over its own context."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        # None stands for the plain triangle of a whole context; a later chunk sees all that came before it too.
        self._masks = [_causal(span) if span.slots.shape[0] > span.stop - span.start else None for span in spans]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat(
            [self._one(span, mask, q, k, v, keys, values) for span, mask in zip(self.spans, self._masks, strict=True)]
        )

    @staticmethod
    def _one(span: Span, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x[span.start : span.stop] for x in (q, k, v))
        if mask is not None:
            k, v = keys[span.slots], values[span.slots]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


def _causal(span: Span) -> Tensor:
    """``[tokens, context]`` bool: query ``i`` of the span sees the positions up to ``context - tokens + i``."""
    tokens, context = span.stop - span.start, span.slots.shape[0]
    seen = torch.ones(tokens, context, dtype=torch.bool, device=span.slots.device)
    return seen.tril(context - tokens)
