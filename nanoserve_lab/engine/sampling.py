"""From logits to tokens, on the device, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve_lab.engine.request import Request


class Sampler:
    """Samples one token a row; the parameters live in tensors that are rebuilt only when the rows change.

    Randomness is one uniform number a token, drawn on the host from the request's own generator, and inverted through
    the cumulative distribution on the device. Nothing is read back.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self._rngs = [request.rng for request in requests]
        params = [request.params for request in requests]
        self._device = device
        self._greedy = all(p.temperature == 0 for p in params)
        if not self._greedy:
            self._is_greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
            self._temperature = self._column([p.temperature or 1.0 for p in params])
            self._top_k = self._column([p.top_k or 2**62 for p in params], torch.int64)
            self._top_p = self._column([p.top_p for p in params])

    def __call__(self, logits: Tensor) -> Tensor:
        """One token a row, ``[rows]`` int64, from ``logits`` ``[rows, vocab]``."""
        greedy = logits.argmax(-1)
        if self._greedy:
            return greedy
        uniform = self._column([rng.random() for rng in self._rngs])
        sampled = sample(logits, self._temperature, self._top_k, self._top_p, uniform)
        return torch.where(self._is_greedy, greedy, sampled)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Tokens ``[rows]`` int64 drawn from ``logits`` ``[rows, vocab]``; the other arguments are ``[rows, 1]``.

    The tokens are ordered by falling probability (equal ones by id); the draw is the first whose cumulative probability
    exceeds ``uniform`` times the mass that ``top_k`` and ``top_p`` leave. The order depends on the row alone, so a row
    draws the same token in any batch.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    temperature, top_p, uniform = (x.to(wide.dtype) for x in (temperature, top_p, uniform))
    ordered, ids = torch.sort(wide / temperature, dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    rank = torch.arange(mass.shape[-1], device=mass.device)
    # The likeliest token is always kept, whatever top_p; `before` is the mass of everything ahead of a token.
    kept = (rank < top_k) & ((before < top_p) | (rank == 0))
    cumulative = (mass * kept).cumsum(-1)
    drawn = (cumulative <= uniform * cumulative[:, -1:]).sum(-1, keepdim=True)
    # Rounding can leave the last cumulative value at or below the draw: the last token kept is meant then.
    last_kept = kept.sum(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(drawn, last_kept)).squeeze(1)
