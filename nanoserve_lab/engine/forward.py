"""The decode step's forward as a function of tensors alone: what is compiled, padded and recorded."""

from __future__ import annotations

from torch import Tensor

from nanoserve_lab.cache.attention import DecodeRead
from nanoserve_lab.cache.fused import FusedDecodeRead, GatherBuffers
from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.model.transformer import Read, Transformer


class DecodeForward:
    """One new token a row through ``model``, its K and V written to ``pool``.

    ``fused`` reads K and V through `cache.fused` instead of the plain rectangle: faster on a CPU, the same but for low
    bits.
    """

    def __init__(self, model: Transformer, pool: KVPool, fused: bool) -> None:
        self.model, self.pool = model, pool
        self._buffers = GatherBuffers() if fused else None

    def __call__(
        self, input_ids: Tensor, positions: Tensor, write_slots: Tensor, context_lens: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """Logits ``[rows, vocab]`` of the rows' next token.

        All arguments int64 on the model's device: ``input_ids`` and ``positions`` ``[rows, 1]``, ``write_slots`` and
        ``context_lens`` ``[rows]``, ``slot_mapping`` ``[rows, width]``; see `plan.DecodePlan`.
        """
        if self._buffers is None:
            read: Read = DecodeRead(slot_mapping, context_lens)
        else:
            read = FusedDecodeRead(slot_mapping, context_lens, self.pool, self._buffers)
        return self.model(input_ids.view(-1), positions.view(-1), write_slots, self.pool.layers, read)
