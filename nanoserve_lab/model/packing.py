"""A model whose weights and operations are laid out for a CPU."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab.model.linear import Linear
from nanoserve_lab.model.transformer import RMSNorm, Transformer

_packed: WeakKeyDictionary[Transformer, Transformer] = WeakKeyDictionary()


#: Above this many tokens a product is bound by arithmetic, and packing gains nothing.
MAX_PACKED_TOKENS = 64


def runs_packed(tokens: int) -> bool:
    """Whether a product of ``tokens`` tokens runs on the packed weight.

    oneDNN keeps a compiled product for each number of tokens that it has met, megabytes in all layers together; prompts
    come in any length. So few numbers are let through: those of small batches, and the multiples of four.
    """
    return tokens <= 8 or (tokens % 4 == 0 and tokens <= MAX_PACKED_TOKENS)


class PackedWeight:
    """A weight in oneDNN's blocked layout, the one that inductor gives to frozen weights, for products of few tokens.

    bfloat16 products without the processor's own instructions are many times slower than float32 ones, so there they
    are made in float32: ``x`` is widened and the result rounded, which loses nothing against bfloat16 products, as
    they accumulate in float32 too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.dtype = weight.dtype
        native = weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.compute = weight.dtype if native else torch.float32
        self.plain, self.plain_bias = weight.detach(), None if bias is None else bias.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.plain.to(self.compute), rows)
        self.bias = None if bias is None else bias.detach().to(self.compute)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, add: Tensor | None) -> Tensor:
        if self.compute != self.dtype:
            if x.shape[0] == 1:
                # A product of one row is a matrix-vector product, bound by the bytes of the weight: half of float32's.
                out = F.linear(x, self.plain, self.plain_bias)
                return out if add is None else add + out
            wide = self._multiply(x.to(self.compute), None if add is None else add.to(self.compute))
            return wide.to(self.dtype)
        return self._multiply(x, add)

    def _multiply(self, x: Tensor, add: Tensor | None) -> Tensor:
        if not runs_packed(x.shape[0]):
            out = F.linear(x, self.plain.to(self.compute), self.bias)
            return out if add is None else out.add_(add)
        if add is None:
            return self._product(x, self.weight, self.bias, "none", [], "")
        return self._product_and_sum(x, add, self.weight, self.bias, "add")


class PackedNorm:
    """RMS norm in four operations, for float32: PyTorch's own is made of ten on a CPU.

    ``x * (weight * sqrt(n)) / hypot(|x|, sqrt(n * eps))`` is the same but for low bits.
    """

    def __init__(self, norm: RMSNorm) -> None:
        size = norm.weight.numel()
        self.weight = norm.weight.detach() * math.sqrt(size)
        self.floor = norm.weight.new_tensor(math.sqrt(size * norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self.weight).div_(torch.hypot(length, self.floor))


def can_pack(model: Transformer) -> bool:
    """Whether this build of PyTorch can pack ``model``'s weights: on the CPU, in float32 or bfloat16, with oneDNN."""
    dtypes = (torch.float32, torch.bfloat16)
    return model.device.type == "cpu" and model.dtype in dtypes and torch.backends.mkldnn.is_available()


@torch.no_grad()
def packed_model(model: Transformer, rows: int = 8) -> Transformer:
    """``model`` with a packed copy of every matrix, laid out for products of about ``rows`` tokens, and norms of few
    operations.

    The two share their parameters; ``model`` itself stays as it is, and is packed once however often it is asked for.
    """
    twin = _packed.get(model)
    if twin is None:
        twin = Transformer.from_state(model.config, model.state_dict())
        for module in twin.modules():
            if isinstance(module, Linear):
                module.packed = PackedWeight(module.weight, module.bias, rows)
            elif isinstance(module, RMSNorm) and model.dtype == torch.float32:
                module.packed = PackedNorm(module)
        if twin.lm_head is None:
            twin.tied_head = PackedWeight(twin.embed.weight, None, rows)
        _packed[model] = twin
    return twin
