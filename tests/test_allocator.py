"""The simulated caching allocator against layouts worked out by hand; lifetimes against functions counted by hand."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from nanoserve_lab.cache.attention import paged_attention_batched_reference
from nanoserve_lab.recorders import allocator
from nanoserve_lab.recorders.allocator import (
    Allocate,
    Block,
    CachingAllocator,
    Free,
    Lifetimes,
    lifetimes_of,
    pool_bytes,
)

KIB, MIB = 1 << 10, 1 << 20


def layout(pool: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Size and state of every block, a list a segment."""
    return [[(block.size, block.allocated) for block in segment.blocks] for segment in pool.segments]


def test_the_sizes_are_those_of_the_installed_torch() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    assert {name: int(value) for name, value in found.items()} == {
        "kMinBlockSize": allocator.MIN_BLOCK,
        "kSmallSize": allocator.SMALL_SIZE,
        "kSmallBuffer": allocator.SMALL_SEGMENT,
        "kMinLargeAlloc": allocator.MIN_LARGE,
        "kRoundLarge": allocator.ROUND_LARGE,
    }


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # Rounded first: from here on the request is no longer below 10 MiB.
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
        (13 * MIB, 14 * MIB, 14 * MIB),
    ],
)
def test_one_request(nbytes: int, block: int, segment: int) -> None:
    pool = CachingAllocator()
    got = pool.malloc(nbytes)
    assert (got.size, got.requested, got.address) == (block, nbytes, 0)
    assert (pool.reserved_bytes, pool.allocated_bytes, pool.peak_bytes) == (segment, block, block)


def test_a_small_remainder_is_split_off_down_to_512_bytes() -> None:
    pool = CachingAllocator()
    pool.malloc(MIB)
    pool.malloc(MIB - 512)
    assert layout(pool) == [[(MIB, True), (MIB - 512, True), (512, False)]]
    pool.malloc(1)
    assert layout(pool) == [[(MIB, True), (MIB - 512, True), (512, True)]]


def test_a_large_remainder_is_split_off_above_1_mib_only() -> None:
    pool = CachingAllocator()
    pool.malloc(11 * MIB)  # of a segment of 12: the 1 MiB that is left stays with the block
    pool.malloc(11 * MIB - 512)  # 512 bytes more are left: split
    assert layout(pool) == [[(12 * MIB, True)], [(11 * MIB - 512, True), (MIB + 512, False)]]
    assert pool.allocated_bytes == 23 * MIB - 512


def test_the_smallest_free_block_that_fits_is_taken_and_the_lowest_of_equals() -> None:
    pool = CachingAllocator()
    # One segment of 20 MiB: 6 2 4 2 4 2, all of it.
    six, _, four, _, last, _ = (pool.malloc(size * MIB) for size in (6, 2, 4, 2, 4, 2))
    for block in (last, six, four):
        pool.free(block)
    # 3 MiB go where 4 are free, first of the two; 1 MiB is left, which is not split off.
    assert (pool.malloc(3 * MIB).address, pool.malloc(3 * MIB).address) == (8 * MIB, 14 * MIB)
    # Then of the 6; 4.5 MiB of them are left.
    assert pool.malloc(MIB + 512 * KIB).address == 0
    assert layout(pool)[0][:3] == [(3 * MIB // 2, True), (9 * MIB // 2, False), (2 * MIB, True)]
    assert pool.reserved_bytes == 20 * MIB


def test_free_neighbours_become_one_block() -> None:
    pool = CachingAllocator()
    first, second, third = (pool.malloc(4 * MIB) for _ in range(3))
    pool.free(first)
    assert layout(pool) == [[(4 * MIB, False), (4 * MIB, True), (4 * MIB, True), (8 * MIB, False)]]
    pool.free(third)
    assert layout(pool) == [[(4 * MIB, False), (4 * MIB, True), (12 * MIB, False)]]
    pool.free(second)
    assert layout(pool) == [[(20 * MIB, False)]]
    assert (pool.allocated_bytes, pool.peak_bytes, pool.reserved_bytes) == (0, 12 * MIB, 20 * MIB)
    assert (pool.malloc(2 * MIB).address, pool.peak_bytes) == (0, 12 * MIB)


def test_small_and_large_requests_do_not_share_segments() -> None:
    pool = CachingAllocator()
    pool.free(pool.malloc(20 * MIB))
    pool.free(pool.malloc(1))
    pool.malloc(MIB + 1)
    assert layout(pool) == [[(MIB + 512, True), (19 * MIB - 512, False)], [(2 * MIB, False)]]


def test_bad_requests_are_refused() -> None:
    pool, other = CachingAllocator(), CachingAllocator()
    block = pool.malloc(1)
    with pytest.raises(ValueError, match="nbytes: wanted 1 or more, got 0"):
        pool.malloc(0)
    with pytest.raises(ValueError, match="not handed out by this pool"):
        other.free(block)
    pool.free(block)
    with pytest.raises(ValueError, match="not handed out by this pool"):
        pool.free(block)
    assert layout(pool) == [[(2 * MIB, False)]]


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 40 * MIB),
    st.builds(
        lambda edge, off: edge + off, st.sampled_from([MIB, 2 * MIB, 10 * MIB, 19 * MIB]), st.integers(-513, 513)
    ),
)


@given(st.lists(st.one_of(SIZES, st.integers(-1000, -1)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_order_of_requests_and_frees(program: list[int]) -> None:
    """A positive number asks for that many bytes, a negative one frees one of the blocks that are out."""
    pool = CachingAllocator()
    out: list[tuple[int, Block]] = []
    reserved = 0

    def check() -> None:
        assert sum(segment.size for segment in pool.segments) == pool.reserved_bytes >= pool.allocated_bytes
        assert pool.reserved_bytes >= reserved
        assert pool.allocated_bytes == sum(block.size for _, block in out) >= sum(nbytes for nbytes, _ in out)
        for segment in pool.segments:
            end = segment.address
            for block in segment.blocks:
                assert block.address == end
                end += block.size
            assert end == segment.address + segment.size
            states = [block.allocated for block in segment.blocks]
            assert (False, False) not in list(pairwise(states))
        handed_out = [block for segment in pool.segments for block in segment.blocks if block.allocated]
        assert {id(block) for block in handed_out} == {id(block) for _, block in out}

    for number in program:
        if number > 0:
            size = max(512, -(-number // 512) * 512)
            free = [b for s in pool.segments if s.small == (size <= MIB) for b in s.blocks if not b.allocated]
            fit = min(((b.size, b.address) for b in free if b.size >= size), default=None)
            block = pool.malloc(number)
            out.append((number, block))
            assert block.address == (fit[1] if fit else reserved)
            assert (pool.reserved_bytes > reserved) == (fit is None)
        elif out:
            pool.free(out.pop(number % len(out))[1])
        check()
        reserved = pool.reserved_bytes
    while out:
        pool.free(out.pop()[1])
        check()
    assert layout(pool) == [[(segment.size, False)] for segment in pool.segments]


def scratch(*mib: int, output: int = 0) -> Lifetimes:
    """A recording that allocates blocks of so many MiB, then an output of so many KiB, and frees all but the output."""
    events: list[Allocate | Free] = [Allocate(id, size * MIB) for id, size in enumerate(mib)]
    if output:
        events.append(Allocate(len(mib), output * KIB))
    events += [Free(id) for id in range(len(mib))]
    return Lifetimes(tuple(events), frozenset([len(mib)] if output else []))


def test_the_order_of_recordings_decides_what_is_reserved() -> None:
    # Largest first: 12 MiB are a segment, of which the 4 MiB take a part. Smallest first: 4 MiB open a segment of 20,
    # which takes the 12 too. Three that are large enough for a segment of their own: each is too small for the next.
    assert pool_bytes([scratch(4), scratch(12)], order="largest").reserved == 12 * MIB
    assert pool_bytes([scratch(4), scratch(12)], order="smallest").reserved == 20 * MIB
    three = [scratch(16), scratch(24), scratch(12)]
    assert pool_bytes(three, order="largest").reserved == 24 * MIB
    assert pool_bytes(three, order="smallest").reserved == (12 + 16 + 24) * MIB
    assert pool_bytes(three, order="given").reserved == (16 + 24) * MIB
    assert pool_bytes(three, order=[2, 1, 0]).reserved == (12 + 24) * MIB
    assert [r.index for r in pool_bytes(three, order="largest").recordings] == [1, 0, 2]


def test_private_pools_pay_for_every_segment() -> None:
    # 5 MiB cost a segment of 20 in a pool of their own; three of them after each other share one.
    recordings = [scratch(5), scratch(5), scratch(5)]
    shared, private = (pool_bytes(recordings, shared=shared) for shared in (True, False))
    assert (shared.reserved, shared.segments) == (20 * MIB, 1)
    assert (private.reserved, private.segments) == (60 * MIB, 3)
    assert [r.reserved for r in shared.recordings] == [20 * MIB, 0, 0]
    assert [r.reserved for r in private.recordings] == [20 * MIB] * 3
    assert {r.peak for r in shared.recordings + private.recordings} == {5 * MIB}


def test_a_held_output_is_not_reused() -> None:
    # An output of 1 MiB takes half a small segment. Held, three need two segments; else all use the same half.
    recordings = [scratch(30, output=1024)] * 3
    held, free = (pool_bytes(recordings, hold_outputs=hold) for hold in (True, False))
    assert (held.reserved, held.allocated) == ((30 + 2 + 2) * MIB, 3 * MIB)
    assert (free.reserved, free.allocated) == ((30 + 2) * MIB, 0)
    assert [(r.reserved, r.held, r.peak) for r in held.recordings] == [
        (32 * MIB, MIB, 31 * MIB),
        (0, MIB, 32 * MIB),
        (2 * MIB, MIB, 33 * MIB),
    ]


def test_a_peak_need_not_come_last() -> None:
    early = Lifetimes((Allocate(0, 30 * MIB), Free(0), Allocate(1, 30 * MIB), Free(1), Allocate(2, 12 * MIB), Free(2)))
    assert pool_bytes([early]).recordings[0].peak == early.peak_bytes == 30 * MIB
    assert [block.id for block in early.at_peak()] == [0]


def test_a_stashed_storage_stays_whether_outputs_are_held_or_not() -> None:
    stash = Lifetimes((Allocate(0, MIB), Allocate(1, MIB)), frozenset([1]))
    assert [pool_bytes([stash], hold_outputs=hold).allocated for hold in (True, False)] == [2 * MIB, MIB]


def test_a_random_order_is_one_of_its_seed() -> None:
    recordings = [scratch(size) for size in range(11, 31)]
    orders = [[r.index for r in pool_bytes(recordings, order="random", seed=s).recordings] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(20)) for order in orders)
    with pytest.raises(ValueError, match="order: wanted given, largest"):
        pool_bytes(recordings, order="biggest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="permutation of the 20 places"):
        pool_bytes(recordings, order=[0, 1])


@pytest.mark.parametrize(
    ("events", "outputs", "message"),
    [
        ([Allocate(0, 1), Allocate(0, 1)], [], "each id once"),
        ([Allocate(0, 1), Free(0), Allocate(0, 1)], [], "each id once"),
        ([Allocate(0, 0)], [], "1 byte or more"),
        ([Free(0)], [], "id 0 is freed while it is not allocated"),
        ([Allocate(0, 1), Free(0), Free(0)], [], "id 0 is freed"),
        ([Allocate(0, 1), Free(0)], [0], r"outputs: \[0\] are not alive"),
        ([Allocate(0, 1)], [1], r"outputs: \[1\] are not alive"),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[Any], outputs: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lifetimes(tuple(events), frozenset(outputs))


def story(lifetimes: Lifetimes) -> str:
    """The events in short: ``+id`` and ``-id``, ``*`` behind what is an output."""
    return " ".join(
        f"-{e.id}" if isinstance(e, Free) else f"+{e.id}" + "*" * (e.id in lifetimes.outputs) for e in lifetimes.events
    )


def test_a_small_function_counted_by_hand() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        y = x + 1  # 0, alive to the end of the function, as its name is
        z = F.linear(y.relu(), weight)  # 1 is relu's, with no name; 2 the product's
        z.mul_(2)  # in place: nothing
        return z[1:].exp().view(-1)  # 3; its view is the output

    lifetimes = lifetimes_of(step, (torch.zeros(4, 8), torch.zeros(16, 8)))
    assert story(lifetimes) == "+0 +1 +2 -1 +3* -0 -2"
    assert [e for e in lifetimes.events if isinstance(e, Allocate)] == [
        Allocate(0, 4 * 8 * 4, "aten.add.Tensor", (4, 8), "float32"),
        Allocate(1, 4 * 8 * 4, "aten.relu.default", (4, 8), "float32"),
        Allocate(2, 4 * 16 * 4, "aten.mm.default", (4, 16), "float32"),
        Allocate(3, 3 * 16 * 4, "aten.exp.default", (3, 16), "float32"),
    ]
    assert lifetimes.peak_bytes == (64 + 48 + 32) * 4
    assert [block.id for block in lifetimes.at_peak()] == [2, 3, 0]
    frame = lifetimes.frame()
    assert frame.born.tolist() == [0, 1, 2, 4]
    assert frame.died.tolist()[:3] == [5, 3, 6]
    assert frame.died.isna().tolist() == [False, False, False, True]


KEPT: list[Any] = []


def resized(x: Tensor) -> Tensor:
    out = torch.empty(0)  # no bytes, no block
    torch.add(x, 1, out=out)  # 0
    return out.resize_(64)  # 1 is taken before 0 is given back


def cyclic(x: Tensor) -> Tensor:
    loop: list[Any] = [x + 1]
    loop.append(loop)
    del loop
    assert [[] for _ in range(5000)]  # enough for a collection, if there were any
    return x + 2


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("step", "events"),
    [
        (lambda x: x.t()[1:], ""),  # views of what was there
        (lambda x: x.add_(1), ""),
        (lambda x: x.new_empty(0, 4), ""),
        (lambda x: (x.exp().sum(), {"twice": [x * 2]}), "+0 +1* -0 +2*"),
        (lambda x: KEPT.append(x.clone()), "+0"),
        (lambda x: F.rms_norm(x, (4,)), "+0*"),
        (lambda x: x.relu().relu().relu(), "+0 +1 -0 +2* -1"),
        (lambda x: torch.stack([x, x]).unbind(), "+0*"),
        (lambda x: torch.ones(4, device="meta") + 1, ""),  # not on the device of x
        (resized, "+0 +1* -0"),
        (lambda x: resized(x) * 2, "+0 +1 -0 +2* -1"),
        (cyclic, "+0 +1* -0"),
    ],
)
def test_what_counts_as_an_allocation(step: Callable[[Tensor], Any], events: str) -> None:
    try:
        assert story(lifetimes_of(step, (torch.zeros(4, 4),))) == events
    finally:
        KEPT.clear()


def test_a_refusal_or_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match=r"aten\.\S+: a tensor of layout torch\.sparse_coo has no storage"):
        lifetimes_of(lambda x: x.to_sparse(), (torch.eye(3),))
    with pytest.raises(ZeroDivisionError):
        lifetimes_of(lambda x: x.exp() + 1 // 0, (torch.eye(3),))
    assert gc.isenabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def read_args(rows: int, width: int, heads: int, kv_heads: int, device: str = "cpu") -> tuple[Tensor, ...]:
    cache = torch.zeros(rows * width, kv_heads, 64, device=device)
    slots = torch.zeros(rows, width, dtype=torch.int64, device=device)
    return torch.zeros(rows, heads, 64, device=device), cache, cache.clone(), slots, slots == 1


def test_real_fake_and_meta_tensors_live_alike() -> None:
    real, meta = (lifetimes_of(paged_attention_batched_reference, read_args(4, 16, 6, 2, d)) for d in ("cpu", "meta"))
    with FakeTensorMode():
        args = read_args(4, 16, 6, 2)
    assert real == meta == lifetimes_of(paged_attention_batched_reference, args)
    assert len(real.frame()) == 9


def test_a_fake_step_makes_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.zeros(1 << 40, 4)
    assert story(lifetimes_of(lambda x: x * torch.ones(4), (x,))) == "+0 +1* -0"


def test_the_first_run_of_a_process_is_like_any_other() -> None:
    # Where the first operation stands in a function that the step calls, its locals die with it all the same.
    program = """
import torch
from nanoserve_lab.recorders.allocator import lifetimes_of
def inner(x):
    y = x + 1
    return y.exp()
def step(x):
    return inner(x).exp()
first, second = (lifetimes_of(step, (torch.zeros(4),)) for _ in range(2))
assert first == second, first
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("heads", "kv_heads", "formula"), [(9, 3, 75_497_472), (32, 8, 268_435_456)])
def test_the_plain_read_of_256_rows_of_8192_tokens(heads: int, kv_heads: int, formula: int) -> None:
    with FakeTensorMode():
        args = read_args(256, 8192, heads, kv_heads)
    lifetimes = lifetimes_of(paged_attention_batched_reference, args)
    # By hand. The formula prices one rectangle of scores. Alive with it at the last product: K and V as gathered, V
    # once more, laid out for the product, the softmax of the masked scores, Q scaled, and the result.
    gathered, small = 256 * 8192 * kv_heads * 64 * 4, 256 * heads * 64 * 4
    assert formula == 256 * heads * 8192 * 4
    assert [(block.op.split(".")[1], block.nbytes) for block in lifetimes.at_peak()] == [
        ("index_select", gathered),
        ("index_select", gathered),
        ("clone", gathered),
        ("bmm", formula),
        ("_softmax", formula),
        ("mul", small),
        ("bmm", small),
    ]
    # The pool is larger still. K laid out dies at the first product; masked scores and weights are then cut from its
    # block, which V laid out no longer fits: a fourth block of that size. Q and the result go to one small segment (9
    # heads: 576 KiB each) or to one of 20 MiB (32 heads: 2 MiB each).
    got = pool_bytes([lifetimes])
    assert got.reserved == 4 * gathered + formula + (2 * MIB if small <= MIB else 20 * MIB)
    assert (got.allocated, got.recordings[0].peak) == (small, lifetimes.peak_bytes)
