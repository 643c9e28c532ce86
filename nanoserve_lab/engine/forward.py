"""The decode step's forward as a function of tensors alone: what is compiled, padded and recorded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanoserve_lab.cache.attention import DecodeRead
from nanoserve_lab.cache.pool import SINK_SLOT, KVPool
from nanoserve_lab.inputs import Addresses, DecodeInputs
from nanoserve_lab.model.transformer import Read, Transformer
from nanoserve_lab.slots import SlotTable


class DecodeForward:
    """One new token a row through ``model``, its K and V written to ``pool``.

    ``kernels`` reads K and V where they lie instead of gathering the rectangle: faster on a CPU, the same but for low
    bits.
    """

    def __init__(self, model: Transformer, pool: KVPool, kernels: bool) -> None:
        self.model, self.pool = model, pool
        self._read: Callable[[Tensor, Tensor], Read] = _kernel_read() if kernels else DecodeRead

    def __call__(
        self, input_ids: Tensor, positions: Tensor, write_slots: Tensor, context_lens: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """Logits ``[rows, vocab]`` of the rows' next token.

        All arguments int64 on the model's device: ``input_ids`` and ``positions`` ``[rows, 1]``, ``write_slots`` and
        ``context_lens`` ``[rows]``, ``slot_mapping`` ``[rows, width]``; see `plan.DecodePlan`.
        """
        read = self._read(slot_mapping, context_lens)
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
        return found


def _kernel_read() -> Callable[[Tensor, Tensor], Read]:
    from nanoserve_lab.kernels import paged_attention  # imports Numba

    def read(slot_mapping: Tensor, context_lens: Tensor) -> Read:
        return lambda q, k, v, keys, values: paged_attention(q, keys, values, slot_mapping, context_lens)

    return read
