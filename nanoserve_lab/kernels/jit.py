"""What the kernels share: arrays over the storage of tensors, threads, and bfloat16, which NumPy does not have.

A kernel sees a bfloat16 tensor as the 16 bits of its elements, computes in float32 and rounds once, when it stores.
float32 and float64 are computed in their own precision.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor, library

from nanoserve_lab.folders import cache_dir

#: Sums may be reordered and products fused, so that loops run on whole registers. NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}

#: For each dtype of a tensor, an empty array that tells a kernel how its elements lie in memory, and one that tells
#: what it computes in.
ELEMENTS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.empty(0, np.float32), np.empty((0, 0), np.float32)),
    torch.float64: (np.empty(0, np.float64), np.empty((0, 0), np.float64)),
    torch.bfloat16: (np.empty(0, np.uint16), np.empty((0, 0), np.float32)),
}

#: Operators of the kernels, in torch's dispatcher: a recording sees each of them as one operation.
LIBRARY = library.Library("nanoserve_lab", "DEF")

#: A compiled kernel and its arguments: addresses, sizes and what they need to stay alive, no tensors.
Launch = tuple[Callable[..., None], tuple[Any, ...]]

_threads = threading.local()


def operator(schema: str) -> Callable[[Callable[..., Launch]], Any]:
    """Make the operator of ``schema``, which returns nothing and writes into arguments, of a function that makes the
    `Launch` for given CPU tensors. An argument that it writes all of is ``out``, by keyword.

    The launch is what a recording keeps, as a CUDA graph keeps a kernel's parameters; see `recorders.calls.choose`.
    """

    def define(prepare: Callable[..., Launch]) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            kernel, arguments = prepare(*args, **kwargs)
            kernel(*arguments)

        LIBRARY.define(schema)
        name = schema.partition("(")[0]
        LIBRARY.impl(name, run, "CPU")
        LIBRARY.impl(name, lambda *_, **__: None, "Meta")
        overload = getattr(torch.ops.nanoserve_lab, name).default
        overload.prepare = prepare
        return overload

    return define


def _sources() -> str:
    """A name for the kernels as they are written now."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Compile a function whose machine code is kept for the next process, in a folder named after the sources of all
    kernels: Numba itself would not see that a helper in another file has changed."""

    def compiled(function: Callable[..., None]) -> Any:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(cache_dir() / "kernels" / _sources())
        try:
            return njit(fastmath=FAST, error_model="numpy", cache=True, **options)(function)
        except RuntimeError:  # the folder cannot be written
            return njit(fastmath=FAST, error_model="numpy", **options)(function)
        finally:
            numba.config.CACHE_DIR = before

    return compiled


def share_threads() -> None:
    """Let this thread's kernels run on as many threads as torch's operations do."""
    wanted = torch.get_num_threads()
    if getattr(_threads, "number", None) != wanted:
        numba.set_num_threads(min(wanted, numba.config.NUMBA_NUM_THREADS))
        _threads.number = wanted


def address(tensor: Tensor | None) -> int:
    """Where a tensor's elements begin; 0 for none. Asking for no value, it is legal while a step is recorded."""
    return 0 if tensor is None else tensor.data_ptr()


def layout(tensor: Tensor) -> tuple[Any, Any]:
    """Two arrays: of no elements, in which those of ``tensor`` lie in memory; and, of the dtype that they are computed
    in, ``[rows, last axis]`` for a bfloat16 tensor to be widened into, and of no elements for others."""
    elements, computed = ELEMENTS[tensor.dtype]
    if elements.dtype != computed.dtype:
        size = tensor.shape[-1]
        computed = np.empty((tensor.numel() // size, size), computed.dtype)
    return elements, computed


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """The address, an integer, as a pointer that ``numba.carray`` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def load(element: Any) -> Any:
    """An element as a number; 16 bits are a bfloat16, widened to float32."""


@overload(load, jit_options={"fastmath": FAST}, strict=False)
def _load(element: Any) -> Any:
    if element == types.uint16:
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return lambda element: element


def store(array: Any, index: Any, number: Any) -> None:
    """Write a number as an element of the array; to 16 bits it is rounded to the nearest, ties to even.

    A call: in a parallel loop Numba takes a plain assignment to an array that nobody seems to read for dead code.
    """


@overload(store, jit_options={"fastmath": FAST}, strict=False)
def _store(array: Any, index: Any, number: Any) -> Any:
    if array.dtype == types.uint16:

        def rounded(array: Any, index: Any, number: Any) -> None:
            # A NaN of 16 widened bits has zeros in its lower half, which rounding cannot carry out of.
            bits = np.float32(number).view(np.uint32)
            near = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            array[index] = np.uint16(near >> np.uint32(16))

        return rounded

    def plain(array: Any, index: Any, number: Any) -> None:
        array[index] = number

    return plain


@njit(fastmath=True)
def largest(numbers: Any) -> Any:
    """The largest of one or more; any of them where one is NaN, which the exponential then finds."""
    top = load(numbers[0])
    for i in range(numbers.shape[0]):
        top = max(top, load(numbers[i]))
    return top


def exponential(number: Any) -> Any:
    """``exp`` of a number that is not above 0; for float32 to 1e-7, in arithmetic that runs on whole registers."""


@overload(exponential, strict=False)
def _exponential(number: Any) -> Any:
    if number != types.float32:
        return lambda number: math.exp(number)

    @njit(fastmath={"contract"})
    def exp(number: Any) -> Any:
        # Cephes' expf: 2^n times a polynomial of what is left. Sums must not be reordered here.
        x = max(number, np.float32(-87))
        n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * r * r + r + np.float32(1)
        power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        return p * power if number == number else number

    return lambda number: exp(number)


@njit
def as_numbers(elements: int, like: Any, computed: Any, rows: int, size: int) -> Any:
    """The ``[rows, size]`` elements as the numbers that they are computed as: where they lie, or widened first.

    An array without an owner, that no thread counts references to.
    """
    if computed.size == 0:
        return carray(pointer(elements), (rows, size), computed.dtype)
    narrow = carray(pointer(elements), (rows, size), like.dtype)
    wide = carray(pointer(computed.ctypes.data), (rows, size), computed.dtype)
    for i in range(rows):
        for j in range(size):
            wide[i, j] = load(narrow[i, j])
    return wide
