"""Matrix products of few tokens, bound by how fast the weight is read: once, from one end to the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, prange, types
from numba.extending import overload
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab.kernels.jit import (
    ELEMENTS,
    FAST,
    Launch,
    address,
    as_numbers,
    kernel,
    layout,
    load,
    operator,
    pointer,
    share_threads,
    store,
)

#: Above this many tokens a product is bound by arithmetic, and torch's libraries are ahead.
MAX_TOKENS = 64
#: A row of a bfloat16 weight is read as words of two elements, which cost one shift and one mask to widen.
PAIRS = np.empty(0, np.uint32)
#: Rows of a weight that stay in the processor's first cache while all tokens are multiplied with them.
BLOCK = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias + add``, ``[tokens, out]``, for CPU tensors ``x`` ``[tokens, in]``, ``weight`` ``[out,
    in]``, ``bias`` ``[out]`` and ``add`` ``[tokens, out]``, all of one dtype of `jit.ELEMENTS`.

    bfloat16 is computed in float32 and rounded once. More than `MAX_TOKENS` tokens, and bfloat16 rows of odd length,
    are left to torch; in float32 where the processor has no bfloat16 products of its own, because those that torch has
    are many times slower.
    """
    if x.shape[0] > MAX_TOKENS or (x.dtype == torch.bfloat16 and x.shape[1] % 2):
        return _of_many(x, weight, bias, add)
    out = x.new_empty(x.shape[0], weight.shape[0])
    _linear(x.contiguous(), weight, bias, None if add is None else add.contiguous(), out=out)
    return out


def _of_many(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    wide = weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if wide:
        x, weight, bias, add = (None if t is None else t.float() for t in (x, weight, bias, add))  # type: ignore[assignment]
    out = F.linear(x, weight, bias)
    out = out if add is None else out.add_(add)
    return out.bfloat16() if wide else out


@operator("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? add, *, Tensor(a!) out) -> ()")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, *, out: Tensor) -> Launch:
    share_threads()
    words = PAIRS if weight.dtype == torch.bfloat16 else ELEMENTS[weight.dtype][0]
    return _products, (*map(address, (out, x, weight, bias, add)), *x.shape, weight.shape[0], words, *layout(x))


@kernel(parallel=True)
def _products(
    out: int,
    x: int,
    weight: int,
    bias: int,
    add: int,
    tokens: int,
    inner: int,
    outer: int,
    words: Any,
    like: Any,
    computed: Any,
) -> None:
    results = carray(pointer(out), (tokens, outer), like.dtype)
    together = words.itemsize // like.itemsize
    inputs = as_numbers(x, like, computed, tokens, inner).reshape(tokens, together, inner // together)
    if together == 2:
        _deal(inputs)
    rows = carray(pointer(weight), (outer, inner // together), words.dtype)
    biases = carray(pointer(bias), (outer if bias else 0,), like.dtype)
    added = carray(pointer(add), (tokens if add else 0, outer), like.dtype)
    for block in prange((outer + BLOCK - 1) // BLOCK):
        start, stop = block * BLOCK, min(block * BLOCK + BLOCK, outer)
        sums = np.empty((tokens, BLOCK), computed.dtype)
        token = 0
        while token + 8 <= tokens:
            for i in range(start, stop):
                _eight(sums, inputs, rows, token, i)
            token += 8
        if token + 4 <= tokens:
            for i in range(start, stop):
                _four(sums, inputs, rows, token, i)
            token += 4
        while token < tokens:
            for i in range(start, stop):
                _one(sums, inputs, rows, token, i)
            token += 1
        for token in range(tokens):
            for i in range(start, stop):
                s = sums[token, i % BLOCK]
                if biases.shape[0]:
                    s += load(biases[i])
                if added.shape[0]:
                    s += load(added[token, i])
                store(results, (token, i), s)


@njit
def _deal(x: Any) -> None:
    """Put the elements at even places of each token, ``x[token]`` ``[2, inner / 2]``, before those at odd places."""
    dealt = np.empty(x.shape[1:], x.dtype)
    for t in range(x.shape[0]):
        token = x[t].reshape(-1)
        for j in range(x.shape[2]):
            dealt[0, j], dealt[1, j] = token[2 * j], token[2 * j + 1]
        for half in range(2):
            for j in range(x.shape[2]):
                x[t, half, j] = dealt[half, j]


def part(word: Any, half: int) -> Any:
    """The number in the low (0) or high (1) half of a word; a word of one number is that number."""


@overload(part, jit_options={"fastmath": FAST}, strict=False)
def _part(word: Any, half: int) -> Any:
    if word == types.uint32:
        # A bfloat16 is the upper half of the float32 of the same value.
        return lambda word, half: np.uint32(word & np.uint32(0xFFFF0000) if half else word << np.uint32(16)).view(
            np.float32
        )
    return lambda word, half: word


def times(word: Any, x: Any, t: int, j: int) -> Any:
    """The numbers of word ``j`` of a row of the weight times those of token ``t`` that they meet, summed."""


@overload(times, jit_options={"fastmath": FAST}, strict=False)
def _times(word: Any, x: Any, t: int, j: int) -> Any:
    if word == types.uint32:
        return lambda word, x, t, j: part(word, 0) * x[t, 0, j] + part(word, 1) * x[t, 1, j]
    return lambda word, x, t, j: word * x[t, 0, j]


# The sums of row i of the weight with the tokens t, t + 1, ... They are written out, so that each is a register, and
# index whole arrays: to hand on a part of one would count its references, in all threads. Up to four tokens take both
# halves of a word at once, so that memory is read without a rest; eight would run out of registers, and take a row,
# which the first cache holds by then, twice.


@njit(fastmath=FAST)
def _one(sums: Any, x: Any, w: Any, t: int, i: int) -> None:
    s = x.dtype.type(0)
    for j in range(w.shape[1]):
        s += times(w[i, j], x, t, j)
    sums[t, i % BLOCK] = s


@njit(fastmath=FAST)
def _four(sums: Any, x: Any, w: Any, t: int, i: int) -> None:
    s0 = s1 = s2 = s3 = x.dtype.type(0)
    for j in range(w.shape[1]):
        word = w[i, j]
        s0 += times(word, x, t, j)
        s1 += times(word, x, t + 1, j)
        s2 += times(word, x, t + 2, j)
        s3 += times(word, x, t + 3, j)
    for n, s in enumerate((s0, s1, s2, s3)):
        sums[t + n, i % BLOCK] = s


@njit(fastmath=FAST)
def _eight(sums: Any, x: Any, w: Any, t: int, i: int) -> None:
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = x.dtype.type(0)
    for half in range(x.shape[1]):
        for j in range(w.shape[1]):
            e = part(w[i, j], half)
            s0 += e * x[t, half, j]
            s1 += e * x[t + 1, half, j]
            s2 += e * x[t + 2, half, j]
            s3 += e * x[t + 3, half, j]
            s4 += e * x[t + 4, half, j]
            s5 += e * x[t + 5, half, j]
            s6 += e * x[t + 6, half, j]
            s7 += e * x[t + 7, half, j]
    for n, s in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
        sums[t + n, i % BLOCK] = s
