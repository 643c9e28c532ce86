"""Which requests run: first come, first served, as rows and blocks allow."""

from __future__ import annotations

from collections import deque

from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.engine.request import Request


class Scheduler:
    """The waiting line and the running rows; ``running[row]`` is the request of batch row ``row``.

    A request is admitted when a row is free and the blocks that it may ever need are not promised to others, so a
    running row never finds the pool empty. Nobody overtakes: a request that does not fit yet holds the line.
    """

    def __init__(self, cache: PagedCache, max_prefill_tokens: int) -> None:
        self.cache, self.max_prefill_tokens = cache, max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._promised = 0

    def blocks_for(self, request: Request) -> int:
        """Blocks that ``request`` may need in all."""
        return self.cache.pool.blocks_for(request.max_context)

    def admit(self) -> range:
        """Move requests from the line into rows while they fit, within ``max_prefill_tokens`` prompt tokens a step (the
        first is admitted however long it is); the new rows."""
        first, tokens = len(self.running), 0
        while self.waiting and len(self.running) < self.cache.max_rows:
            request = self.waiting[0]
            tokens += len(request.prompt_ids)
            if len(self.running) > first and tokens > self.max_prefill_tokens:
                break
            if self._promised + self.blocks_for(request) > self.cache.pool.allocator.capacity:
                break
            self.cache.add(len(request.prompt_ids))
            self._promised += self.blocks_for(request)
            self.running.append(self.waiting.popleft())
        return range(first, len(self.running))

    def retire(self, row: int) -> int | None:
        """Take the request of ``row`` out of the batch; the row that moved into its place, or None."""
        self._promised -= self.blocks_for(self.running[row])
        moved = self.cache.remove(row)
        last = self.running.pop()
        if moved is not None:
            self.running[row] = last
        return moved
