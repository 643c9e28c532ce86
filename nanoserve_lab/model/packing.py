"""A model whose weights are laid out for the CPU's matrix products."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanoserve_lab.model.linear import Linear
from nanoserve_lab.model.transformer import Transformer

_packed: WeakKeyDictionary[Transformer, Transformer] = WeakKeyDictionary()


class PackedWeight:
    """A weight in oneDNN's blocked layout, the one that inductor gives to frozen weights.

    bfloat16 products without the processor's own instructions are many times slower than float32 ones, so there the
    packed copy is float32: ``x`` is widened and the result rounded, which loses nothing against bfloat16 products, as
    they accumulate in float32 too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.dtype = weight.dtype
        native = weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.compute = weight.dtype if native else torch.float32
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self.compute), rows)
        self.bias = None if bias is None else bias.detach().to(self.compute)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x.to(self.compute), self.weight, self.bias, "none", [], "")
        return out.to(self.dtype)


def can_pack(model: Transformer) -> bool:
    """Whether this build of PyTorch can pack ``model``'s weights: on the CPU, in float32 or bfloat16, with oneDNN."""
    dtypes = (torch.float32, torch.bfloat16)
    return model.device.type == "cpu" and model.dtype in dtypes and torch.backends.mkldnn.is_available()


@torch.no_grad()
def packed_model(model: Transformer, rows: int = 8) -> Transformer:
    """``model`` with a packed copy of every matrix, laid out for products of about ``rows`` tokens.

    The two share their parameters; ``model`` itself stays as it is, and is packed once however often it is asked for.
    """
    twin = _packed.get(model)
    if twin is None:
        twin = Transformer.from_state(model.config, model.state_dict())
        for module in twin.modules():
            if isinstance(module, Linear):
                module.packed = PackedWeight(module.weight, module.bias, rows)
        if twin.lm_head is None:
            twin.tied_head = PackedWeight(twin.embed.weight, None, rows)
        _packed[model] = twin
    return twin
