"""Sampled tokens stay on the device and are read back some steps later."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanoserve_lab.engine.request import MAX_LOGPROBS, Request, TokenLogprobs
from nanoserve_lab.engine.sampling import Logprobs

# Places of one request's log-probabilities in a mirror: its own, the likeliest's, and the ids of these.
_PLACES = 1 + 2 * MAX_LOGPROBS


class DeferredReadback:
    """A window of steps whose tokens are on their way home.

    ``push`` starts a copy of the step's tokens into a host mirror (pinned when the tokens are on CUDA) and returns;
    the tokens of a step are read when more than ``lag`` later steps' copies are under way, so the host never waits for
    the step that it has just launched. The mirrors form a ring, allocated once and read through their NumPy views;
    those of log-probabilities come into being when the first are attached.
    """

    def __init__(self, lag: int, max_rows: int, device: torch.device) -> None:
        if lag < 0:
            raise ValueError(f"lag: wanted 0 or more steps, got {lag}")
        self.lag = lag
        self._cuda = device.type == "cuda"
        self._mirrors = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(lag + 1)]
        self._views = [mirror.numpy() for mirror in self._mirrors]
        # Each mirror cut to the rows of the last push, whose number seldom changes.
        self._rows, self._cut = max_rows, self._mirrors
        self._events = [torch.cuda.Event() for _ in self._mirrors] if self._cuda else []
        self._logprob_mirrors: list[Tensor] = []
        self._attached: list[Logprobs] = []
        self._window: deque[tuple[int, Sequence[Request], list[Logprobs]]] = deque()
        self._next = 0

    def __len__(self) -> int:
        """Steps whose tokens have not been read."""
        return len(self._window)

    def attach(self, logprobs: Logprobs) -> None:
        """Send ``logprobs`` along with the tokens that are pushed next; each request in at most one of them."""
        assert len(self._window) < len(self._mirrors), "read what is due before the next push"
        if not self._logprob_mirrors:
            size = len(self._mirrors[0]) * _PLACES
            self._logprob_mirrors = [
                torch.zeros(size, dtype=torch.float64, pin_memory=self._cuda) for _ in self._mirrors
            ]
        start = sum(part.packed.numel() for part in self._attached)
        packed = logprobs.packed
        home = self._logprob_mirrors[self._next][start : start + packed.numel()].view(packed.shape)
        home.copy_(packed, non_blocking=True)
        self._attached.append(Logprobs(logprobs.requests, home))

    def push(self, tokens: Tensor, requests: Sequence[Request]) -> None:
        """Send ``tokens`` ``[rows]`` int64, one a request, on their way; at most ``lag + 1`` steps are under way."""
        assert len(self._window) < len(self._mirrors), "read what is due before the next push"
        at = self._next
        if self._rows != len(requests):
            self._rows = len(requests)
            self._cut = [mirror[: self._rows] for mirror in self._mirrors]
        self._cut[at].copy_(tokens, non_blocking=True)
        if self._cuda:
            self._events[at].record()
        self._window.append((at, requests, self._attached))
        self._attached = []
        self._next = (at + 1) % len(self._mirrors)

    def due(self, drain: bool = False) -> Iterator[tuple[Request, int]]:
        """Requests and tokens of every step that is due; of all steps when ``drain``.

        A request that has not ended gets the token's log-probabilities, where it asked for them, just before.
        """
        return itertools.chain.from_iterable(self._due(drain))

    def _due(self, drain: bool) -> Iterator[Iterator[tuple[Request, int]]]:
        while len(self._window) > (0 if drain else self.lag):
            at, requests, attached = self._window.popleft()
            if self._cuda:
                self._events[at].synchronize()
            for request, logprobs in itertools.chain.from_iterable(map(_unpack, attached)):
                if request.finish_reason is None:
                    request.logprobs.append(logprobs)
            yield zip(requests, self._views[at][: len(requests)].tolist(), strict=True)


def _unpack(part: Logprobs) -> Iterator[tuple[Request, TokenLogprobs]]:
    """Requests and log-probabilities; each request gets as many of the likeliest as it asked for."""
    top = part.packed.shape[1] // 2
    for request, row in zip(part.requests, part.packed.numpy().tolist(), strict=True):
        wanted = request.params.logprobs or 0
        ids, values = row[1 + top : 1 + top + wanted], row[1 : 1 + wanted]
        yield request, TokenLogprobs(row[0], tuple(zip(map(int, ids), values, strict=True)))
