"""Memory that the intermediates of one recording, and of several that share it, take in turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Of an intermediate's address; what the CPU allocator keeps to.
ALIGNMENT = 64


@dataclass(frozen=True)
class Lifetime:
    """``size`` bytes, needed by the operations ``first`` to ``last``, both included."""

    size: int
    first: int
    last: int


class _Segment:
    """The free intervals of one piece of memory, ``(start, stop)`` in order; the last may be open-ended."""

    def __init__(self, size: float) -> None:
        self.free: list[tuple[int, float]] = [(0, size)]
        self.peak = 0

    def take(self, size: int) -> int | None:
        """The start of the smallest free interval that holds ``size`` bytes."""
        fitting = [(stop - start, start, stop) for start, stop in self.free if stop - start >= size]
        if not fitting:
            return None
        _, start, stop = min(fitting)
        at = self.free.index((start, stop))
        self.free[at : at + 1] = [(start + size, stop)] if stop - start > size else []
        self.peak = max(self.peak, start + size)
        return start

    def give_back(self, start: int, size: int) -> None:
        merged: list[tuple[int, float]] = []
        for low, high in sorted([*self.free, (start, start + size)]):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self.free = merged


@dataclass(eq=False)  # a pool is itself: two that are still empty are two
class Arena:
    """Segments of memory on one device, as a pool that CUDA graphs share.

    Recordings that are handed the same arena place their intermediates in the same bytes, so only one of them may run
    at a time, and what one leaves there the next writes over.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    segments: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(segment.nbytes for segment in self.segments)

    def place(self, lifetimes: list[Lifetime]) -> list[tuple[Tensor, int]]:
        """A segment and an offset in bytes for each of ``lifetimes``; two that overlap in time never overlap in memory.

        The segments at hand are filled first; what does not fit makes one new one.
        """
        rooms = [_Segment(segment.nbytes) for segment in self.segments] + [_Segment(float("inf"))]
        order = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].first, -lifetimes[i].size))
        placed: dict[int, tuple[int, int]] = {}
        running: list[int] = []
        for index in order:
            ended = [other for other in running if lifetimes[other].last < lifetimes[index].first]
            for other in ended:
                room, start = placed[other]
                rooms[room].give_back(start, _aligned(lifetimes[other].size))
                running.remove(other)
            for room, segment in enumerate(rooms):
                found = segment.take(_aligned(lifetimes[index].size))
                if found is not None:
                    placed[index] = (room, found)
                    running.append(index)
                    break
        if rooms[-1].peak:
            self.segments.append(_reserve(rooms[-1].peak, self.device))
        return [(self.segments[room], start) for room, start in (placed[i] for i in range(len(lifetimes)))]


def _aligned(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def _reserve(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
