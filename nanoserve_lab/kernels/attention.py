"""The decode read of the paged K/V cache where it lies: no gather, and no work past a row's own context."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import carray, njit, prange
from torch import Tensor

from nanoserve_lab.kernels.jit import (
    FAST,
    Launch,
    address,
    as_numbers,
    exponential,
    kernel,
    largest,
    layout,
    load,
    operator,
    pointer,
    share_threads,
    store,
)

#: Tokens of a row that one task reads; their scores stay in the processor's first cache.
PART = 64


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor, context_lens: Tensor) -> Tensor:
    """Attention of one new token per row over that row's context, ``[rows, heads, head_dim]``.

    CPU tensors: ``q`` ``[rows, heads, head_dim]``, ``keys`` and ``values`` ``[slots, kv_heads, head_dim]``, contiguous,
    of one dtype of `jit.ELEMENTS`; ``slot_mapping`` ``[rows, width]`` int64, its columns side by side, and
    ``context_lens`` ``[rows]`` int64. Only the slots of a row's first ``context_lens[row]`` columns are read, so what
    the others hold does not matter; a row of length 0 is all zero.

    A long row is read in parts by several threads, each with a softmax of its own, which are joined at the end
    (Flash-Decoding, Dao et al. 2023). bfloat16 is computed in float32 and rounded once.
    """
    out = q.new_empty(q.shape)
    _paged_attention(q.contiguous(), keys, values, slot_mapping, context_lens, out=out)
    return out


@operator(
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor slot_mapping, Tensor context_lens,"
    " *, Tensor(a!) out) -> ()"
)
def _paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor, context_lens: Tensor, *, out: Tensor
) -> Launch:
    share_threads()
    rows, heads, head_dim = q.shape
    slots, kv_heads, _ = keys.shape
    addresses = map(address, (out, q, keys, values, slot_mapping, context_lens))
    sizes = (rows, slots, slot_mapping.shape[1], slot_mapping.stride(0), kv_heads, heads // kv_heads)
    return _for_head_dim(head_dim), (*addresses, *sizes, *layout(q))


@functools.cache
def _for_head_dim(head_dim: int) -> Any:
    """The kernel for heads of one length: loops whose length the compiler knows become registers."""

    @kernel(parallel=True)
    def attend(
        out: int,
        q: int,
        keys: int,
        values: int,
        mapping: int,
        lens: int,
        rows: int,
        slots: int,
        width: int,
        stride: int,
        kv_heads: int,
        group: int,
        like: Any,
        computed: Any,
    ) -> None:
        heads = kv_heads * group
        queries = as_numbers(q, like, computed, rows * heads, head_dim)
        k = carray(pointer(keys), (slots, kv_heads, head_dim), like.dtype)
        v = carray(pointer(values), (slots, kv_heads, head_dim), like.dtype)
        table = carray(pointer(mapping), ((rows - 1) * stride + width,), np.int64)
        lengths = carray(pointer(lens), (rows,), np.int64)
        results = carray(pointer(out), (rows * heads, head_dim), like.dtype)
        parts = (width + PART - 1) // PART
        tops = np.empty((rows * heads, parts), computed.dtype)
        totals = np.empty((rows * heads, parts), computed.dtype)
        sums = np.empty((rows * heads, parts, head_dim), computed.dtype)
        for task in prange(rows * parts):
            row, part = task // parts, task % parts
            start, stop = row * stride + part * PART, row * stride + min(part * PART + PART, lengths[row], width)
            own = slice(row * heads, row * heads + heads)
            if start < stop:
                into = tops[own, part], totals[own, part], sums[own, part]
                _read(queries[own], k, v, table[start:stop], *into, kv_heads, group, head_dim)
        for row in range(rows):
            used = (min(lengths[row], width) + PART - 1) // PART
            for i in range(row * heads, row * heads + heads):
                _join(results[i], tops[i, :used], totals[i, :used], sums[i])

    return attend


@njit(fastmath=FAST, error_model="numpy")
def _read(
    q: Any,
    keys: Any,
    values: Any,
    slots: Any,
    tops: Any,
    totals: Any,
    sums: Any,
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    """Of some tokens: each head's largest score, the sum of its weights, and the weighted sum of V."""
    weights, scale = np.empty((kv_heads * group, PART), q.dtype), q.dtype.type(1 / math.sqrt(head_dim))
    for t in range(slots.shape[0]):
        key = keys[slots[t]]
        for kv in range(kv_heads):
            for head in range(kv * group, kv * group + group):
                score = q.dtype.type(0)
                for j in range(head_dim):
                    score += q[head, j] * load(key[kv, j])
                weights[head, t] = score * scale
    for head in range(kv_heads * group):
        weight, total = weights[head, : slots.shape[0]], q.dtype.type(0)
        top = largest(weight)
        for t in range(slots.shape[0]):
            weight[t] = exponential(weight[t] - top)
            total += weight[t]
        tops[head], totals[head] = top, total
    # An array of its own: its rows begin where whole registers are stored.
    own = np.empty((kv_heads * group, head_dim), q.dtype)
    for head in range(kv_heads * group):
        for j in range(head_dim):
            own[head, j] = 0
    for t in range(slots.shape[0]):
        value = values[slots[t]]
        for kv in range(kv_heads):
            for head in range(kv * group, kv * group + group):
                share = weights[head, t]
                for j in range(head_dim):
                    own[head, j] += share * load(value[kv, j])
    for head in range(kv_heads * group):
        for j in range(head_dim):
            sums[head, j] = own[head, j]


@njit(fastmath=FAST, error_model="numpy")
def _join(result: Any, tops: Any, totals: Any, sums: Any) -> None:
    """The attention of one head from its parts, a row of ``sums`` each; zero where there are none."""
    parts = tops.shape[0]
    factors = np.empty(parts, sums.dtype)
    total = sums.dtype.type(0)
    for part in range(parts):
        factors[part] = exponential(tops[part] - largest(tops))
        total += factors[part] * totals[part]
    for j in range(result.shape[0]):
        s = sums.dtype.type(0)
        for part in range(parts):
            s += factors[part] * sums[part, j]
        store(result, j, s / total if parts else s)
