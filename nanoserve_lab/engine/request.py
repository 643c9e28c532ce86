"""A request from submission to completion: its parameters, checked by name, and the text it has grown so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nanoserve_lab.model.tokenizer import TextStream, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


class RequestRefused(ValueError):
    """A request that can never be served as asked. Raised by ``submit``; nothing was queued."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    ``temperature`` 0 is greedy. Otherwise the softmax of ``logits / temperature`` is cut to the ``top_k`` likeliest
    tokens (0: all), then to the smallest set whose probability reaches ``top_p``, and drawn from with the request's own
    generator: with a ``seed`` the text repeats, alone or in any batch. The request ends after ``max_tokens`` tokens,
    at a token of ``stop_ids``, at the tokenizer's end token (unless ``ignore_eos``), or where one of the strings of
    ``stop`` appears; the stop string is not part of the text.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def check(self) -> None:
        """Raise `RequestRefused` naming the first value that is out of range."""
        _require_int("max_tokens", self.max_tokens, at_least=1)
        _require_int("top_k", self.top_k, at_least=0)
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise RequestRefused(f"temperature: wanted a number of 0 or more, got {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestRefused(f"top_p: wanted a number above 0 and at most 1, got {self.top_p!r}")
        if self.seed is not None:
            _require_int("seed", self.seed, at_least=0)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestRefused(f"stop: wanted a list of non-empty strings, got {self.stop!r}")
        for token in self.stop_ids:
            _require_int("stop_ids", token, at_least=0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_int(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise RequestRefused(f"{name}: wanted an integer of {at_least} or more, got {value!r}")


@dataclass(frozen=True)
class Completion:
    """What a request came to. ``token_ids`` include the stop token that ended it; ``text`` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_ids: list[int]


@dataclass(frozen=True)
class TokenEvent:
    """One token of one request, as ``step`` hands it out.

    ``text`` is the text that is certain now: it may lag behind the token (half a character, the beginning of a stop
    string) or be empty. The last event of a request carries ``finish_reason`` and ``completion``; ``token_id`` is None
    where a request ends without a new token (cancelled).
    """

    request_id: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


class StopScanner:
    """Passes text through up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The part of the text so far that is certain and new; after a stop string ``stopped`` is set."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The stop that is complete first counts, so that the cut does not depend on how the text came in pieces.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends in."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


_ids = itertools.count()


@dataclass(eq=False)
class Request:
    """A submitted request and its state. ``issued`` counts the tokens sampled for it so far, those not yet read back
    included; ``max_tokens`` is the params' own, cut to what the context leaves."""

    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    tokenizer: Tokenizer | None
    id: int = field(default_factory=lambda: next(_ids))
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    issued: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.params.seed)
        self._stream: TextStream | None = self.tokenizer.text_stream() if self.tokenizer else None
        self._scanner = StopScanner(self.params.stop)

    @property
    def max_context(self) -> int:
        """Tokens whose K and V the request writes at most: the last token it generates is never written."""
        return len(self.prompt_ids) + self.max_tokens - 1

    def accept(self, token: int) -> TokenEvent:
        """Take the next token that was read back; the event that tells of it."""
        self.token_ids.append(token)
        piece = ""
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif self._stream is not None:
            piece = self._scanner.push(self._stream.push(token))
        if self.finish_reason is None and self._scanner.stopped:
            self.finish_reason = "stop"
        elif self.finish_reason is None and len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length"
        return self._event(token, piece)

    def cancel(self) -> TokenEvent:
        """End the request where it is; the event that tells of it."""
        self.finish_reason = "cancelled"
        return self._event(None, "")

    def _event(self, token: int | None, piece: str) -> TokenEvent:
        if self.finish_reason is None:
            self.text += piece
            return TokenEvent(self.id, token, piece)
        if self._stream is not None and not self._scanner.stopped:
            piece += self._scanner.push(self._stream.flush())
            if not self._scanner.stopped:
                piece += self._scanner.flush()
        self.text += piece
        completion = Completion(self.text, self.token_ids, self.finish_reason, self.prompt_ids)
        return TokenEvent(self.id, token, piece, self.finish_reason, completion)
