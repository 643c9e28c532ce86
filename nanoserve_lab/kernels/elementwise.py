"""What is done token by token, each in one pass: RMS norm, the turn of a head by its position, the gated unit, K and V
put into the cache, the likeliest next token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from nanoserve_lab.kernels.jit import (
    ELEMENTS,
    Launch,
    address,
    exponential,
    kernel,
    largest,
    load,
    operator,
    pointer,
    share_threads,
    store,
)

#: Scores among which the largest is found before it is compared with that of others.
RUN = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in ``x``'s shape; CPU tensors of one dtype of
    `jit.ELEMENTS`. bfloat16 is computed in float32 and rounded once. PyTorch's own is made of ten operations here."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _rms_norm(x, weight, eps, out=out)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, head_dim]`` turned by ``cos`` and ``sin`` ``[tokens, 1, head_dim]`` of
    `model.rope.rope_tables`, as `model.rope.rotate` does it; the heads of a token lie side by side."""
    out = x.new_empty(x.shape)
    _rotate(x, cos, sin, out=out)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[tokens, size]``, of ``gate_up`` ``[tokens, 2 * size]``, the gate first."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _swiglu(gate_up, out=out)
    return out


def place(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """As `model.transformer.place`: ``k`` and ``v`` ``[tokens, kv_heads, head_dim]``, a token's heads side by side, to
    ``slots`` ``[tokens]`` int64 of ``keys`` and ``values`` ``[slots, kv_heads, head_dim]``, which are contiguous.

    Raises `IndexError` for a slot outside the pool; the tokens before it are written then.
    """
    _place(keys, values, slots, k, v)


def argmax(scores: Tensor) -> Tensor:
    """The place of the largest of each row of ``scores`` ``[rows, size]``, the first of several, ``[rows]`` int64.

    Where one is NaN it is any place of the row. PyTorch's own compares one number at a time, and bfloat16 slowest.
    """
    out = scores.new_empty(scores.shape[0], dtype=torch.int64)
    _argmax(scores.contiguous(), out=out)
    return out


@operator("rms_norm(Tensor x, Tensor weight, float eps, *, Tensor(a!) out) -> ()")
def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> Launch:
    size = weight.shape[0]
    return _normalize, (address(out), address(x), address(weight), x.numel() // size, size, eps, *ELEMENTS[x.dtype])


@operator("rotate(Tensor x, Tensor cos, Tensor sin, *, Tensor(a!) out) -> ()")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Launch:
    return _turn, (*map(address, (out, x, cos, sin)), *x.shape, x.stride(0), *ELEMENTS[x.dtype])


@operator("swiglu(Tensor gate_up, *, Tensor(a!) out) -> ()")
def _swiglu(gate_up: Tensor, *, out: Tensor) -> Launch:
    return _gate, (address(out), address(gate_up), *out.shape, *ELEMENTS[out.dtype])


@operator("place(Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor k, Tensor v) -> ()")
def _place(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> Launch:
    sizes = (keys.shape[0], slots.shape[0], keys[0].numel(), k.stride(0), v.stride(0))
    return _put, (*map(address, (keys, values, slots, k, v)), *sizes, ELEMENTS[keys.dtype][0])


@kernel()
def _put(
    keys: int,
    values: int,
    slots: int,
    k: int,
    v: int,
    pool: int,
    tokens: int,
    size: int,
    k_stride: int,
    v_stride: int,
    like: Any,
) -> None:
    all_keys = carray(pointer(keys), (pool, size), like.dtype)
    all_values = carray(pointer(values), (pool, size), like.dtype)
    new_keys = carray(pointer(k), (tokens * k_stride,), like.dtype)
    new_values = carray(pointer(v), (tokens * v_stride,), like.dtype)
    places = carray(pointer(slots), (tokens,), np.int64)
    for token in range(tokens):
        slot = places[token]
        if slot < 0 or slot >= pool:
            raise IndexError("write_slots: a slot outside the K/V pool")
        for j in range(size):
            all_keys[slot, j] = new_keys[token * k_stride + j]
            all_values[slot, j] = new_values[token * v_stride + j]


@operator("argmax(Tensor scores, *, Tensor(a!) out) -> ()")
def _argmax(scores: Tensor, *, out: Tensor) -> Launch:
    share_threads()
    return _find, (address(out), address(scores), *scores.shape, ELEMENTS[scores.dtype][0])


@kernel(parallel=True)
def _find(out: int, scores: int, rows: int, size: int, like: Any) -> None:
    places = carray(pointer(out), (rows,), np.int64)
    table = carray(pointer(scores), (rows, size), like.dtype)
    for row in prange(rows):
        # Whole registers are compared to find the run that holds the largest, and only that run is looked through.
        best, run = largest(table[row, :RUN]), 0
        for start in range(RUN, size, RUN):
            top = largest(table[row, start : start + RUN])
            if top > best:
                best, run = top, start
        at = run
        while at < min(run + RUN, size) - 1 and load(table[row, at]) != best:
            at += 1
        store(places, row, at)


@kernel()
def _normalize(out: int, x: int, weight: int, tokens: int, size: int, eps: float, like: Any, computed: Any) -> None:
    results = carray(pointer(out), (tokens, size), like.dtype)
    inputs = carray(pointer(x), (tokens, size), like.dtype)
    weights = carray(pointer(weight), (size,), like.dtype)
    for token in range(tokens):
        square = computed.dtype.type(0)
        for j in range(size):
            square += load(inputs[token, j]) * load(inputs[token, j])
        factor = computed.dtype.type(1 / math.sqrt(square / size + eps))
        for j in range(size):
            store(results, (token, j), load(inputs[token, j]) * factor * load(weights[j]))


@kernel()
def _turn(
    out: int, x: int, cos: int, sin: int, tokens: int, heads: int, head_dim: int, stride: int, like: Any, computed: Any
) -> None:
    results = carray(pointer(out), (tokens, heads, head_dim), like.dtype)
    inputs = carray(pointer(x), (tokens * stride,), like.dtype)
    cosines = carray(pointer(cos), (tokens, head_dim), like.dtype)
    sines = carray(pointer(sin), (tokens, head_dim), like.dtype)
    half = head_dim // 2
    for token in range(tokens):
        for head in range(heads):
            at = token * stride + head * head_dim
            for j in range(half):
                a, b = load(inputs[at + j]), load(inputs[at + half + j])
                store(results, (token, head, j), a * load(cosines[token, j]) + b * load(sines[token, j]))
                i = half + j
                store(results, (token, head, i), b * load(cosines[token, i]) + a * load(sines[token, i]))


@kernel()
def _gate(out: int, gate_up: int, tokens: int, size: int, like: Any, computed: Any) -> None:
    results = carray(pointer(out), (tokens, size), like.dtype)
    both = carray(pointer(gate_up), (tokens, 2, size), like.dtype)
    one = computed.dtype.type(1)
    for token in range(tokens):
        for j in range(size):
            gate = load(both[token, 0, j])
            # 1 / (1 + exp(-g)), by an exponential of what is not above 0.
            small = exponential(-abs(gate))
            share = (one if gate >= 0 else small) / (one + small)
            store(results, (token, j), gate * share * load(both[token, 1, j]))
