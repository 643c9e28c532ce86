"""Sampled tokens stay on the device and are read back some steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanoserve_lab.engine.request import Request


class DeferredReadback:
    """A window of steps whose tokens are on their way home.

    ``push`` starts a copy of the step's tokens into a host mirror (pinned when the tokens are on CUDA) and returns;
    the tokens of a step are read when more than ``lag`` later steps' copies are under way, so the host never waits for
    the step that it has just launched. The mirrors form a ring, allocated once and read through their NumPy views.
    """

    def __init__(self, lag: int, max_rows: int, device: torch.device) -> None:
        if lag < 0:
            raise ValueError(f"lag: wanted 0 or more steps, got {lag}")
        self.lag = lag
        self._cuda = device.type == "cuda"
        self._mirrors = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(lag + 1)]
        self._views = [mirror.numpy() for mirror in self._mirrors]
        self._events = [torch.cuda.Event() for _ in self._mirrors] if self._cuda else []
        self._window: deque[tuple[int, Sequence[Request]]] = deque()
        self._next = 0

    def __len__(self) -> int:
        """Steps whose tokens have not been read."""
        return len(self._window)

    def push(self, tokens: Tensor, requests: Sequence[Request]) -> None:
        """Send ``tokens`` ``[rows]`` int64, one a request, on their way; at most ``lag + 1`` steps are under way."""
        assert len(self._window) < len(self._mirrors), "read what is due before the next push"
        at = self._next
        self._mirrors[at][: len(requests)].copy_(tokens, non_blocking=True)
        if self._cuda:
            self._events[at].record()
        self._window.append((at, requests))
        self._next = (at + 1) % len(self._mirrors)

    def due(self, drain: bool = False) -> Iterator[tuple[Request, int]]:
        """Requests and tokens of every step that is due; of all steps when ``drain``."""
        while len(self._window) > (0 if drain else self.lag):
            at, requests = self._window.popleft()
            if self._cuda:
                self._events[at].synchronize()
            yield from zip(requests, self._views[at][: len(requests)].tolist(), strict=True)
