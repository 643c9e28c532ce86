"""Which requests run: first come, first served, as rows and blocks allow."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from nanoserve_lab.cache.paged import PagedCache, PrefillChunk
from nanoserve_lab.engine.request import Request


@dataclass
class Prefill:
    """A request on its way into a row: its blocks are taken, ``done`` of its ``token_ids`` are prefilled."""

    request: Request
    token_ids: list[int]
    blocks: list[int]
    done: int = 0


class Scheduler:
    """The waiting line, the request being prefilled in pieces, and the running rows.

    ``running[row]`` is the request of batch row ``row``; all of them decode. At most one request is partly prefilled
    between two steps. Nobody overtakes: a request that does not fit yet holds the line. When blocks run out the
    youngest request goes back to its place in the line, to be prefilled again with what it has said so far; the oldest
    therefore always goes on, and everyone's turn comes.
    """

    def __init__(self, cache: PagedCache, max_step_tokens: int) -> None:
        self.cache, self.max_step_tokens = cache, max_step_tokens
        self.waiting: deque[Request] = deque()
        self.prefill: Prefill | None = None
        self.running: list[Request] = []
        # Steps in which no running row can come to its last token; rows are counted again when somebody joins them.
        self._quiet = 0

    def chunks(self) -> list[tuple[Prefill, PrefillChunk]]:
        """What to prefill in this step: every running row's token comes first, prompts share the rest of the budget."""
        budget = self.max_step_tokens - len(self.running)
        chunks: list[tuple[Prefill, PrefillChunk]] = []
        while budget > 0:
            prefill = self.prefill or self._admit(len(chunks))
            if prefill is None:
                break
            stop = min(prefill.done + budget, len(prefill.token_ids))
            chunks.append((prefill, PrefillChunk(prefill.blocks, prefill.done, stop)))
            budget -= stop - prefill.done
            prefill.done = stop
            self.prefill = prefill if stop < len(prefill.token_ids) else None
        return chunks

    def _admit(self, newcomers: int) -> Prefill | None:
        """The head of the line with its blocks taken, where a row is free for it and the pool can bear it.

        Beside its own blocks one must stay free for each row that runs (or is about to), so that the newcomer does not
        push somebody out at the next block boundary.
        """
        rows = len(self.running) + newcomers
        if not self.waiting or rows == self.cache.max_rows:
            return None
        request = self.waiting[0]
        token_ids = request.prompt_ids + request.token_ids
        if self.cache.pool.blocks_for(len(token_ids)) + rows > self.cache.pool.allocator.num_free:
            return None
        self.waiting.popleft()
        return Prefill(request, token_ids, self.cache.reserve(len(token_ids)))

    def start(self, prefill: Prefill) -> None:
        """Put a request whose last chunk has run into a row."""
        self.cache.add(prefill.blocks, len(prefill.token_ids))
        self.running.append(prefill.request)
        self._quiet = 0

    def complete(self) -> list[int]:
        """The rows that have all of their tokens with those sampled in this step, from the end; asked once a step."""
        if self._quiet > 0:
            self._quiet -= 1
            return []
        lengths = self.cache.lengths.tolist()
        left = [request.max_context - lengths[row] for row, request in enumerate(self.running)]
        self._quiet = min(filter(None, left), default=1) - 1
        return [row for row in reversed(range(len(left))) if not left[row]]

    def retire(self, row: int) -> int | None:
        """Take the request of ``row`` out of the batch; the row that moved into its place, or None."""
        moved = self.cache.remove(row)
        last = self.running.pop()
        if moved is not None:
            self.running[row] = last
        return moved

    def abandon_prefill(self) -> None:
        """Give back the blocks of the request that is partly prefilled."""
        assert self.prefill is not None
        self.cache.pool.allocator.give_back(self.prefill.blocks)
        self.prefill = None

    def requeue(self, request: Request) -> None:
        """Put a request that lost its blocks back into the line, before all younger ones."""
        bisect.insort(self.waiting, request, key=attrgetter("id"))

    def youngest(self) -> Request:
        """The request that came last of those that own blocks."""
        partly = [self.prefill.request] if self.prefill else []
        return max([*self.running, *partly], key=attrgetter("id"))
