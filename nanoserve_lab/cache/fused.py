"""The decode read for a CPU: gathers into buffers that stay, then one fused attention operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab.cache.pool import SINK_SLOT, KVPool

#: K and V gathered at a time, in bytes; they are read back at once, while the processor's cache still holds them.
GATHERED_BYTES = 8 << 20


class GatherBuffers:
    """Storage for the gathered K and V of one layer, reused by every layer and step; it grows to the largest shape.

    Fresh megabytes cost more than the copy itself on a CPU: the allocator hands large blocks back to the system, and
    every page is faulted in anew.
    """

    def __init__(self) -> None:
        self._flat: list[Tensor] = []

    def take(self, cells: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two ``[cells, *like.shape[1:]]`` tensors of ``like``'s dtype and device, holding anything."""
        size = cells * like[0].numel()
        if not self._flat or self._flat[0].numel() < size or self._flat[0].dtype != like.dtype:
            self._flat = [torch.empty(size, dtype=like.dtype, device=like.device) for _ in range(2)]
        k, v = (flat[:size].view(cells, *like.shape[1:]) for flat in self._flat)
        return k, v


class FusedDecodeRead:
    """The read of a decode step, equal to `attention.DecodeRead` but for low bits.

    The queries that share a K/V head are handed over as that many positions of one head, so that K and V are not
    repeated. Rows are read in groups whose K and V stay in the processor's cache between gather and use. The sink is
    zeroed before the step: a masked column weighs nothing, but 0 times NaN is NaN.
    """

    def __init__(self, slot_mapping: Tensor, context_lens: Tensor, pool: KVPool, buffers: GatherBuffers) -> None:
        self.slot_mapping, self.context_lens, self._buffers = slot_mapping, context_lens, buffers
        rows, width = slot_mapping.shape
        pool.data[:, :, SINK_SLOT].zero_()
        unseen = torch.arange(width, device=slot_mapping.device) >= context_lens.unsqueeze(1)
        bias = torch.zeros(rows, width, dtype=pool.data.dtype, device=slot_mapping.device)
        bias = bias.masked_fill_(unseen, float("-inf")).view(rows, 1, 1, width)
        at_once = max(1, GATHERED_BYTES // (2 * width * pool.layers[0][0][0].nbytes))
        parts = [slice(start, start + at_once) for start in range(0, rows, at_once)]
        self._groups = [(part, slot_mapping[part].reshape(-1), bias[part]) for part in parts]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        read = [self._read(q[rows], slots, bias, keys, values) for rows, slots, bias in self._groups]
        return read[0] if len(read) == 1 else torch.cat(read)

    def _read(self, q: Tensor, slots: Tensor, bias: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        k, v = self._buffers.take(len(slots), keys)
        torch.index_select(keys, 0, slots, out=k)
        torch.index_select(values, 0, slots, out=v)
        k, v = (x.view(rows, -1, kv_heads, head_dim).transpose(1, 2) for x in (k, v))
        grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias).reshape(rows, heads, head_dim)
