"""Matrix products, and the one seam behind which their weights are laid out for the machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: ``product(x)`` ``[tokens, out]`` for ``x`` ``[tokens, in]``.
Product = Callable[[Tensor], Tensor]


class Linear(nn.Module):
    """``x @ weight.T + bias`` for ``x`` ``[tokens, in]``, ``weight`` ``[out, in]``, ``bias`` ``[out]`` or None.

    ``packed`` takes the product over where it is set; see `packing`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)
