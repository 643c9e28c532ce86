"""From logits to tokens, on the device, for the whole batch at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve_lab.device import upload
from nanoserve_lab.engine.request import Request, SamplingParams

#: Probabilities are summed as integers of this fraction of one: such sums are exact in any order, so a row draws the
#: same token alone and in any batch, however the batch is searched. A token below it is never drawn.
UNIT = 2**50

#: Up to this many tokens are sorted: rows with a top_k of at most this, and vocabularies no larger.
MAX_WINDOW = 1024

# On a CPU, scores of rows drawn together: what is computed from them should stay in the cache.
_CELLS_AT_ONCE = 1 << 16

# Division by a lower temperature may overflow float32.
_MIN_TEMPERATURE = 1e-6


class Logprobs(NamedTuple):
    """Log-probabilities of one step's tokens, on the device, for the requests that asked for them.

    ``packed`` is ``[len(requests), 1 + 2 * top]`` float64: the chosen token's, then the ``top`` largest in falling
    order, then the ids of these.
    """

    requests: Sequence[Request]
    packed: Tensor


def argmax(scores: Tensor) -> Tensor:
    """The token of the highest score, the first of several, a row of ``scores`` ``[rows, vocab]``: ``[rows]`` int64."""
    return scores.argmax(-1)


class Sampler:
    """Samples one token a row; what the parameters ask for lives in tensors that are built anew when the rows change.

    The order of work is bias, repetition penalty, temperature, the cuts (``top_k``, ``top_p``, ``min_p``), the draw;
    each touches the rows that use it; greedy rows go to ``argmax``. Randomness is one uniform number a token, drawn on
    the host from the request's own generator, and inverted through the cumulative distribution on the device. Nothing
    is read back. ``logprobs`` are those of the last call's tokens, None where no row asked.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        device: torch.device,
        argmax: Callable[[Tensor], Tensor] = argmax,
    ) -> None:
        biased = [row for row, request in enumerate(requests) if request.params.bias]
        penalised = [row for row, request in enumerate(requests) if request.params.repetition_penalty != 1]
        random = [row for row, request in enumerate(requests) if request.params.temperature > 0]
        told = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        self._bias = _Bias(requests, biased, device) if biased else None
        self._penalty = _RepetitionPenalty(requests, penalised, device) if penalised else None
        self._random = _RandomRows(requests, random, device) if random else None
        self._report = _Report(requests, told, device) if told else None
        self._argmax = argmax
        self._all_random = len(random) == len(requests)
        self.logprobs: Logprobs | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """One token a row, ``[rows]`` int64, from ``logits`` ``[rows, vocab]``, which are left as they are."""
        scores = logits
        if self._bias is not None or self._penalty is not None:
            scores = logits.to(_wide(logits.dtype), copy=True)
        if self._bias is not None:
            self._bias.add_to(scores)
        if self._penalty is not None:
            self._penalty.apply_to(scores)
        tokens = logits.new_empty(len(logits), dtype=torch.int64) if self._all_random else self._argmax(scores)
        if self._random is not None:
            self._random.draw_into(tokens, scores)
        if self._penalty is not None:
            self._penalty.note(tokens)
        if self._report is not None:
            self.logprobs = self._report(logits, tokens)
        return tokens


class _Bias:
    """The biases of ``rows``, as row, token id and value side by side."""

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], device: torch.device) -> None:
        triples = [(row, *pair) for row in rows for pair in requests[row].params.bias]
        self._rows, self._ids, self._values = (_upload(values, device) for values in zip(*triples, strict=True))

    def add_to(self, scores: Tensor) -> None:
        """Add the biases to ``scores`` ``[rows, vocab]`` in place."""
        cells = self._rows * scores.shape[1] + self._ids
        scores.view(-1).index_add_(0, cells, self._values.to(scores.dtype))


class _RepetitionPenalty:
    """The tokens that ``rows`` have seen, prompt and generated ones, as a bool tensor ``[len(rows), vocab]``.

    Each request points at its row of it, so that the set outlives the batch: the next batch that the request is in
    starts from there, although its newest tokens have not been read back.
    """

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], device: torch.device) -> None:
        self._requests = [requests[row] for row in rows]
        self._rows = _upload(rows, device)
        self._penalty = _column((request.params.repetition_penalty for request in self._requests), device)
        self._seen: Tensor | None = None

    def apply_to(self, scores: Tensor) -> None:
        """Make seen tokens less likely in place: positive scores divided by the penalty, others multiplied."""
        if self._seen is None:
            self._seen = self._gather(scores)
        penalty, own = self._penalty.to(scores.dtype), scores.index_select(0, self._rows)
        lowered = torch.where(own > 0, own / penalty, own * penalty)
        scores.index_copy_(0, self._rows, torch.where(self._seen, lowered, own))

    def note(self, tokens: Tensor) -> None:
        """Add the tokens just chosen, ``[rows]`` of the whole batch, to the sets."""
        assert self._seen is not None, "apply_to comes first"
        self._seen.scatter_(1, tokens.index_select(0, self._rows).unsqueeze(1), True)

    def _gather(self, scores: Tensor) -> Tensor:
        seen = scores.new_zeros(len(self._requests), scores.shape[1], dtype=torch.bool)
        for row, request in zip(seen, self._requests, strict=True):
            if request.seen is None:
                ids = np.array([*request.prompt_ids, *request.token_ids], dtype=np.int64)
                row.index_fill_(0, upload(ids, scores.device), True)
            else:
                row.copy_(request.seen)
            request.seen = row
        return seen


class _RandomRows:
    """The rows that are drawn, in groups that are drawn in the same way."""

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], device: torch.device) -> None:
        self._requests, self._device = requests, device
        self._rows = sorted(rows, key=self._windowed)
        self._rngs = [requests[row].rng for row in self._rows]
        self._groups: list[tuple[Tensor, Cuts]] = []

    def draw_into(self, tokens: Tensor, scores: Tensor) -> None:
        """Write the tokens drawn from ``scores`` ``[rows, vocab]`` into their places of ``tokens`` ``[rows]``."""
        if not self._groups:
            self._groups = [
                (_upload(rows, self._device), Cuts([self._requests[row].params for row in rows], self._device))
                for rows in self._split(scores.shape[1])
            ]
        uniform = _column((rng.random() for rng in self._rngs), self._device)
        start = 0
        for rows, cuts in self._groups:
            part = uniform[start : start + len(rows)]
            tokens.index_copy_(0, rows, draw(scores.index_select(0, rows), part, cuts))
            start += len(rows)

    def _split(self, vocab: int) -> Iterator[list[int]]:
        at_once = max(1, _CELLS_AT_ONCE // vocab) if self._device.type == "cpu" else len(self._rows)
        for _, alike in itertools.groupby(self._rows, key=self._windowed):
            rows = list(alike)
            for start in range(0, len(rows), at_once):
                yield rows[start : start + at_once]

    def _windowed(self, row: int) -> bool:
        return is_windowed(self._requests[row].params)


class _Report:
    """The log-probabilities of the chosen and the likeliest tokens of ``rows``, before bias, penalty and cuts."""

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], device: torch.device) -> None:
        self._requests = [requests[row] for row in rows]
        self._rows = _upload(rows, device)
        self._top = max(request.params.logprobs or 0 for request in self._requests)

    def __call__(self, logits: Tensor, tokens: Tensor) -> Logprobs:
        own = logits.index_select(0, self._rows)
        logprobs = own.to(_wide(own.dtype)).log_softmax(-1)
        chosen = tokens.index_select(0, self._rows).unsqueeze(1)
        likeliest = _likeliest(_rank(own), self._top)
        values = logprobs.gather(1, torch.cat([chosen, likeliest], 1))
        return Logprobs(self._requests, torch.cat([values.double(), likeliest.double()], 1))


def is_windowed(params: SamplingParams) -> bool:
    """Whether a row's draw needs no more than a window of its likeliest tokens."""
    return 0 < params.top_k <= MAX_WINDOW


class Cuts:
    """Temperature and cuts of a batch's random rows as columns ``[rows, 1]``; None where no row makes the cut."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.temperature = _column((max(p.temperature, _MIN_TEMPERATURE) for p in params), device)
        self.widest = max(p.top_k for p in params)
        self.windowed = all(map(is_windowed, params))
        self.top_k = _column((p.top_k for p in params), device) if self.widest else None
        # Softmax may add up to a little more than one; a top_p of 1 cuts nothing all the same.
        reach = [math.ceil(p.top_p * UNIT) if p.top_p < 1 else 2**62 for p in params]
        self.top_p = _column(reach, device) if any(p.top_p < 1 for p in params) else None
        self.min_p = _column((p.min_p for p in params), device) if any(p.min_p > 0 for p in params) else None


def draw(scores: Tensor, uniform: Tensor, cuts: Cuts) -> Tensor:
    """Tokens ``[rows]`` int64 drawn from ``scores`` ``[rows, vocab]`` with ``uniform`` ``[rows, 1]`` of [0, 1).

    The tokens are ordered by falling score (compared in float32, equal ones by id); each cut keeps a beginning of that
    order; the draw is the first token whose cumulative probability exceeds ``uniform`` times the mass that is kept.
    """
    wide = _wide(scores.dtype)
    scaled = scores.to(wide) / cuts.temperature.to(wide)
    probability = scaled.softmax(-1)
    mass = (probability * UNIT).long()
    rank = _rank(scaled)
    kept = mass.sum(-1, keepdim=True)
    vocab = mass.shape[1]
    search: _Window | _Radix
    if cuts.windowed or vocab <= MAX_WINDOW:
        search = _Window(rank, mass, min(cuts.widest, vocab) if cuts.windowed else vocab)
    else:
        search = _Radix(rank, mass)
    if cuts.top_k is not None:
        window = search if isinstance(search, _Window) else _Window(rank, mass, min(cuts.widest, vocab))
        kept = torch.where(cuts.top_k > 0, window.mass_of(cuts.top_k), kept)
    # Each cut leaves a beginning of the order, so the smallest of their masses is the mass of what passes all.
    if cuts.top_p is not None:
        kept = torch.minimum(kept, search.find(torch.minimum(cuts.top_p, kept) - 1)[1])
    if cuts.min_p is not None:
        likely = probability >= probability.amax(-1, keepdim=True) * cuts.min_p.to(probability.dtype)
        kept = torch.minimum(kept, torch.where(likely, mass, 0).sum(-1, keepdim=True))
    token, _ = search.find((uniform * kept).long())
    return token.squeeze(1)


class _Window:
    """The likeliest tokens of each row in order, and their cumulative mass, ``[rows, width]``."""

    def __init__(self, rank: Tensor, mass: Tensor, width: int) -> None:
        self._ids = _likeliest(rank, width)
        self._cumulative = mass.gather(1, self._ids).cumsum(-1)

    def mass_of(self, count: Tensor) -> Tensor:
        """Mass of the ``count`` likeliest, ``[rows, 1]``; of all where there are fewer."""
        return self._cumulative.gather(1, (count - 1).clamp(0, self._ids.shape[1] - 1))

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The first token whose cumulative mass exceeds ``target``, and that mass; all ``[rows, 1]``."""
        at = _first_above(self._cumulative, target)
        return self._ids.gather(1, at), self._cumulative.gather(1, at)


class _Radix:
    """All tokens of each row, searched in order without sorting: by the high half of the rank, the low half, the id."""

    def __init__(self, rank: Tensor, mass: Tensor) -> None:
        self._mass = mass
        self._high, self._low = ((rank >> 16) + 0x8000).long(), (rank & 0xFFFF).long()
        self._cumulative = self._by_digit(self._high, mass)

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """As `_Window.find`."""
        rest, mass = target, self._mass
        for digit, cumulative in ((self._high, self._cumulative), (self._low, None)):
            cumulative = self._by_digit(digit, mass) if cumulative is None else cumulative
            at = _first_above(cumulative, rest)
            mass = torch.where(digit == at, mass, 0)
            before = cumulative.gather(1, (at - 1).clamp(min=0))
            rest = rest - torch.where(at > 0, before, 0)
        # What is left are tokens of one score, in order of id.
        cumulative = mass.cumsum(-1)
        token = _first_above(cumulative, rest)
        return token, target - rest + cumulative.gather(1, token)

    @staticmethod
    def _by_digit(digit: Tensor, mass: Tensor) -> Tensor:
        return mass.new_zeros(len(mass), 1 << 16).scatter_add_(1, digit, mass).cumsum(-1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    # The clamp matters for logits that are not numbers only: their tokens mean nothing, and must not crash the batch.
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)


def _rank(scores: Tensor) -> Tensor:
    """int32 that rise where ``scores``, as float32, fall, and are equal where they are equal."""
    # The bits of a float order as the float does once the low 31 of negative ones are flipped. Adding 0 makes -0 zero.
    bits = (scores.float() + 0.0).view(torch.int32)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _likeliest(rank: Tensor, count: int) -> Tensor:
    """Ids of the first ``count`` tokens in order of ``rank``, then id, ``[rows, count]``."""
    keys = (rank.long() << 32) | torch.arange(rank.shape[1], device=rank.device)
    return keys.topk(count, largest=False).values & 0xFFFFFFFF


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _column(values: Iterable[float], device: torch.device) -> Tensor:
    return _upload(list(values), device).unsqueeze(1)


def _upload(values: Sequence[float], device: torch.device) -> Tensor:
    """Integers as int64, others as float64."""
    return upload(np.array(values), device)
