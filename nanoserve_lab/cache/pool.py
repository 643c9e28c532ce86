"""The K/V pool: one tensor of slots, handed out in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from nanoserve_lab.model.config import ModelConfig

#: Block 0 is never handed out; its first slot takes the writes of padded rows. Zero-filled storage is therefore a legal
#: block table, slot mapping and write slot everywhere.
SINK_BLOCK = 0
SINK_SLOT = 0


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was taken."""


class BlockAllocator:
    """Which blocks of the pool are free. Each block is owned by one holder at most; the sink by nobody, ever."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: wanted 2 or more (the sink and one to give out), got {num_blocks}")
        self.num_blocks = num_blocks
        # Taken from the end: low blocks go first, and a block freed last is warm and goes out next.
        self._free = list(range(num_blocks - 1, SINK_BLOCK, -1))
        self._is_free = bytearray([0] + [1] * (num_blocks - 1))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be taken when all are free: every block but the sink."""
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """``count`` blocks, now owned by the caller. Raises `OutOfBlocks`, taking none, where too few are free."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.capacity} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks. Raises `ValueError`, returning none, for the sink, a free block or a block given twice."""
        blocks = list(blocks)
        for block in blocks:
            if not SINK_BLOCK < block < self.num_blocks or self._is_free[block]:
                raise ValueError(f"block {block} is not one that this allocator has handed out")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is given back twice in one call: {sorted(blocks)}")
        for block in reversed(blocks):
            self._is_free[block] = 1
            self._free.append(block)


class KVPool:
    """K and V of every layer: ``data`` ``[layers, 2, num_blocks * block_size, kv_heads, head_dim]``, zero-filled.

    A slot is ``block * block_size + offset``; ``layers[i]`` is the pair of ``[slots, kv_heads, head_dim]`` views.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: wanted 1 or more tokens, got {block_size}")
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        shape = (config.num_layers, 2, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.data: Tensor = _zeros(shape, dtype, torch.device(device))
        self.layers = [(layer[0], layer[1]) for layer in self.data]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy's zeros come from calloc: a page of the pool becomes memory when it is first used. torch.zeros would write
    # gigabytes here.
    size, line = math.prod(shape) * dtype.itemsize, 64
    raw = torch.from_numpy(np.zeros(size + line, dtype=np.uint8))
    start = -raw.data_ptr() % line
    return raw[start : start + size].view(dtype).view(shape)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of ``block_size`` tokens in every layer."""
    return config.num_layers * 2 * block_size * config.kv_size * dtype.itemsize
