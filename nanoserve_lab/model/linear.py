"""Matrix products, and the one seam behind which their weights are laid out for the machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: ``product(x, add)`` ``[tokens, out]`` for ``x`` ``[tokens, in]`` and ``add`` ``[tokens, out]`` or None.
Product = Callable[[Tensor, Tensor | None], Tensor]


class Linear(nn.Module):
    """``x @ weight.T + bias + add`` for ``x`` ``[tokens, in]``, ``weight`` ``[out, in]``, ``bias`` ``[out]`` or None.

    ``add`` ``[tokens, out]`` is the residual where the product ends a branch.

    ``packed`` takes the product over where it is set; see `packing`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: Product | None = None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if self.packed is not None:
            return self.packed(x, add)
        out = F.linear(x, self.weight, self.bias)
        return out if add is None else add + out
