"""Matrix products, and the seam behind which a machine has its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: ``product(x, weight, bias, add)`` ``[tokens, out]``; the arguments are those of `Linear`.
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


class Linear(nn.Module):
    """``x @ weight.T + bias + add`` for ``x`` ``[tokens, in]``, ``weight`` ``[out, in]``, ``bias`` ``[out]`` or None.

    ``add`` ``[tokens, out]`` is the residual where the product ends a branch.

    ``kernel`` computes it where it is set; see `cpu`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.kernel: Product | None = None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.bias, add)
        out = F.linear(x, self.weight, self.bias)
        return out if add is None else add + out
