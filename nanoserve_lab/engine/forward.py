"""The decode step's forward as a function of tensors alone: what is compiled, padded and recorded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import Module

from nanoserve_lab.cache.attention import DecodeRead
from nanoserve_lab.cache.fused import FusedDecodeRead, GatherBuffers
from nanoserve_lab.cache.pool import SINK_SLOT, KVPool
from nanoserve_lab.inputs import Addresses, DecodeInputs
from nanoserve_lab.model.packing import PackedNorm, PackedWeight
from nanoserve_lab.model.transformer import Read, Transformer
from nanoserve_lab.slots import SlotTable


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

    def clear_sink(self) -> None:
        """Zero the sink: recording a step writes its padded rows there."""
        self.pool.data[:, :, SINK_SLOT].zero_()

    def addresses(self, inputs: DecodeInputs, table: SlotTable) -> Addresses:
        """Everything that a recorded step reads where it lies: inputs, slot table, K/V pool, weights."""
        found = Addresses()
        for name, buffer in inputs.buffers.items():
            found.add(name, lambda buffer=buffer: buffer.buffer)  # type: ignore[misc]
        found.add("slot table", lambda: table.data)
        pool, model = self.pool, self.model
        found.add("K/V pool", lambda: pool.data)
        for layer in range(len(pool.layers)):
            for place, name in enumerate(("keys", "values")):
                found.add(f"K/V pool, {name} of layer {layer}", lambda at=(layer, place): pool.layers[at[0]][at[1]])  # type: ignore[misc]
        found.add_module("weights", model)
        for path, part in model.named_modules():
            packed = part.tied_head if isinstance(part, Transformer) else getattr(part, "packed", None)
            if isinstance(packed, PackedWeight | PackedNorm):
                found.add(f"packed weights {path or 'head'}", _packed_of(part))
        return found


def _packed_of(part: Module) -> Callable[[], Tensor]:
    holder = "tied_head" if isinstance(part, Transformer) else "packed"
    return lambda: getattr(part, holder).weight
