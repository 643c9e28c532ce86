"""The K/V pool: no block lost or doubled, tables and lengths agree, reads equal plain attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoserve_lab.cache.attention import (
    DecodeRead,
    PrefillRead,
    Span,
    paged_attention_batched_reference,
    paged_attention_reference,
)
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import SINK_BLOCK, BlockAllocator, KVPool, OutOfBlocks, block_bytes
from nanoserve_lab.model.tiny import TINY
from nanoserve_lab.plan import Planner


def make_cache(num_blocks: int = 9, block_size: int = 4, max_rows: int = 3, max_context: int = 20) -> PagedCache:
    pool = KVPool(TINY, num_blocks, block_size, torch.float32, "cpu")
    return PagedCache(pool, max_rows, max_context)


def add(cache: PagedCache, tokens: int) -> int:
    return cache.add(cache.reserve(tokens), tokens)


def check_invariants(cache: PagedCache, outside: Sequence[int] = ()) -> None:
    """Tables, lengths and allocator agree; ``outside`` are the blocks that are owned by no row."""
    allocator = cache.pool.allocator
    owned = [block for row in range(cache.rows) for block in cache.owned(row)] + list(outside)
    assert SINK_BLOCK not in owned
    assert len(set(owned)) == len(owned), "a block has two owners"
    assert len(owned) + allocator.num_free == allocator.capacity, "a block is lost"
    for row in range(cache.rows):
        assert len(cache.owned(row)) == cache.pool.blocks_for(int(cache.lengths[row]))
        assert len(set(cache.slots(row).tolist())) == cache.lengths[row]
    assert not cache.lengths[cache.rows :].any()
    assert not cache.table[cache.rows :].any()


class CacheMachine(RuleBasedStateMachine):
    """Rows come, grow and go in any order; a list of Python lists is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.expected: list[list[int]] = []

    @rule(tokens=st.integers(1, 24))
    def add(self, tokens: int) -> None:
        if self.cache.pool.blocks_for(tokens) > self.cache.pool.allocator.num_free:
            with pytest.raises(OutOfBlocks):
                self.cache.reserve(tokens)
            return
        blocks = self.cache.reserve(tokens)
        if self.cache.rows == self.cache.max_rows or tokens > self.cache.max_context:
            with pytest.raises(ValueError, match=r"rows are taken|maximum context"):
                self.cache.add(blocks, tokens)
            self.cache.pool.allocator.give_back(blocks)
        else:
            row = self.cache.add(blocks, tokens)
            assert row == len(self.expected)
            self.expected.append(self.cache.slots(row).tolist())

    @precondition(lambda self: self.expected)
    @rule()
    def grow(self) -> None:
        need = sum(len(slots) % 4 == 0 for slots in self.expected)
        assert self.cache.blocks_to_grow() == need
        if max(map(len, self.expected)) + 1 > self.cache.max_context:
            with pytest.raises(ValueError, match="maximum context"):
                self.cache.grow()
        elif need > self.cache.pool.allocator.num_free:
            with pytest.raises(OutOfBlocks):
                self.cache.grow()
        else:
            self.cache.grow()
            for row, slots in enumerate(self.expected):
                slots.append(int(self.cache.slots(row)[-1]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.expected) - 1))
        moved = self.cache.remove(row)
        last = self.expected.pop()
        assert moved == (len(self.expected) if row < len(self.expected) else None)
        if moved is not None:
            self.expected[row] = last

    @invariant()
    def tables_agree(self) -> None:
        check_invariants(self.cache)
        assert [self.cache.slots(row).tolist() for row in range(self.cache.rows)] == self.expected

    @precondition(lambda self: self.expected)
    @invariant()
    def addresses_agree(self) -> None:
        plan = Planner(self.cache).plan()
        positions, write_slots, lengths, mapping = plan.tensors
        assert (plan.rows, plan.live) == (tuple(range(len(self.expected))), len(self.expected))
        for row, slots in enumerate(self.expected):
            assert lengths[row] == len(slots)
            assert positions[row].tolist() == [len(slots) - 1]
            assert write_slots[row] == slots[-1]
            assert mapping[row, : len(slots)].tolist() == slots
            assert not mapping[row, len(slots) :].any(), "columns past the length must point at the sink"


TestCacheMachine = CacheMachine.TestCase


def test_allocator_refuses_what_it_did_not_hand_out() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    for bad in ([0], [3, 9], [-1], [taken[0], taken[0]], [next(b for b in (1, 2, 3) if b not in taken)]):
        with pytest.raises(ValueError, match=r"block|twice"):
            allocator.give_back(bad)
        assert allocator.num_free == 1, "a refused give_back must return nothing"
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 3 free"):
        allocator.take(2)
    assert allocator.num_free == 1, "a refused take must take nothing"
    allocator.give_back(taken)
    assert sorted(allocator.take(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="num_blocks"):
        BlockAllocator(1)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_a_row_grows_to_the_limit_and_no_further(tokens: int) -> None:
    cache = make_cache(max_context=6)  # the limit lies within a block
    cache.add(cache.reserve(tokens), tokens)
    for _ in range(6 - tokens):
        cache.grow()
    with pytest.raises(ValueError, match="a sequence of 7 tokens exceeds the maximum context of 6"):
        cache.grow()
    assert cache.lengths[0] == 6, "a refused growth changes nothing"
    assert cache.slots(0).tolist() == [4, 5, 6, 7, 8, 9]


def test_zero_is_a_legal_address_everywhere() -> None:
    cache = make_cache()
    assert not cache.table.any()
    assert not cache.pool.data.any()
    add(cache, 5)
    assert 0 not in cache.slots(0)
    assert block_bytes(TINY, 4, torch.float32) * 9 == cache.pool.data.nbytes


def random_layer(slots: int, kv_heads: int = 2, head_dim: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (slots, kv_heads, head_dim)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the last ``len(q)`` tokens, one head and one query at a time."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        seen = k.shape[0] - q.shape[0] + i + 1
        for head in range(q.shape[1]):
            weights = (k[:seen, head // group] @ q[i, head] / q.shape[2] ** 0.5).softmax(0)
            out[i, head] = weights @ v[:seen, head // group]
    return out


def test_reads_equal_attention_written_out() -> None:
    keys, values = random_layer(40)
    generator = torch.Generator().manual_seed(1)
    contexts = [torch.randperm(39, generator=generator)[:n] + 1 for n in (1, 5, 12)]
    q = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    mapping = torch.zeros(3, 12, dtype=torch.int64)
    for row, slots in enumerate(contexts):
        mapping[row, : len(slots)] = slots
    lengths = torch.tensor([1, 5, 12])
    keys[0], values[0] = float("nan"), float("nan")  # a poisoned sink, read by every padded column
    read = DecodeRead(mapping, lengths)
    batched = read(q, q[:, :2], q[:, :2], keys, values)
    for row, slots in enumerate(contexts):
        expected = plain_attention(q[row : row + 1], keys[slots], values[slots])
        torch.testing.assert_close(batched[row : row + 1], expected)
        torch.testing.assert_close(paged_attention_reference(q[row : row + 1], keys, values, slots), expected)
    unseen = torch.arange(12) >= lengths[:, None]
    assert torch.equal(batched, paged_attention_batched_reference(q, keys, values, mapping, unseen))


@pytest.mark.parametrize("new", [1, 4, 12])
def test_prefill_read_is_causal_over_its_context(new: int) -> None:
    keys, values = random_layer(40)
    slots = torch.arange(12) + 3
    q = torch.randn(new, 4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    k, v = keys[slots[12 - new :]], values[slots[12 - new :]]
    out = PrefillRead([Span(0, new, slots)])(q, k, v, keys, values)
    torch.testing.assert_close(out, plain_attention(q, keys[slots], values[slots]))


def test_lengths_are_plain_integers_of_the_host() -> None:
    cache = make_cache()
    add(cache, 3)
    assert isinstance(cache.lengths, np.ndarray)
    before = Planner(cache).plan()
    cache.grow()
    assert before.context_lens.tolist() == [3], "a step's tensors must not follow the tables"
