"""A request from submission to completion: its parameters, checked by name, and the text it has grown so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from nanoserve_lab.model.tokenizer import TextStream, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


class RequestRefused(ValueError):
    """A request that can never be served as asked. Raised by ``submit``; nothing was queued."""


#: Most log-probabilities a token that can be asked for beside its own.
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    ``logit_bias`` is added to the logits of its token ids (``-inf`` forbids one); then ``repetition_penalty`` divides
    the positive and multiplies the other scores of tokens that the prompt or the text so far holds. ``temperature`` 0
    takes the highest score. Otherwise the softmax of ``scores / temperature`` is cut to the ``top_k`` likeliest tokens
    (0: all), to the smallest set whose probability reaches ``top_p``, and to tokens of at least ``min_p`` times the
    likeliest's probability, and drawn from with the request's own generator: with a ``seed`` the text repeats, alone or
    in any batch.

    The request ends after ``max_tokens`` tokens, at a token of ``stop_ids``, at the tokenizer's end token (unless
    ``ignore_eos``), or where one of the strings of ``stop`` appears; the stop string is not part of the text.
    ``logprobs`` asks for the log-probability of each chosen token and of that many likeliest ones, from the model's
    logits before any of the above. ``n`` completions of the prompt are independent requests; the first is what ``n`` 1
    gives.

    Lists and mappings are kept as tuples, so that params can be hashed.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("stop", "stop_ids"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.logit_bias, Mapping):
            pairs = sorted(self.logit_bias.items(), key=lambda pair: (str(type(pair[0])), pair[0]))
            object.__setattr__(self, "logit_bias", tuple(pairs))

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of token id and bias."""
        return tuple(self.logit_bias.items()) if isinstance(self.logit_bias, Mapping) else self.logit_bias

    def check(self) -> None:
        """Raise `RequestRefused` naming the first value that is out of range."""
        _require_int("max_tokens", self.max_tokens, at_least=1)
        _require_int("top_k", self.top_k, at_least=0)
        _require("temperature", self.temperature, "a number of 0 or more", lambda x: 0 <= x < math.inf)
        _require("top_p", self.top_p, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        _require("min_p", self.min_p, "a number of 0 to 1", lambda x: 0 <= x <= 1)
        _require("repetition_penalty", self.repetition_penalty, "a number of 0.01 to 100", lambda x: 0.01 <= x <= 100)
        if self.seed is not None:
            _require_int("seed", self.seed, at_least=0)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestRefused(f"stop: wanted a list of non-empty strings, got {self.stop!r}")
        for token in self.stop_ids:
            _require_int("stop_ids", token, at_least=0)
        self._check_bias()
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, at_least=0, at_most=MAX_LOGPROBS)
        _require_int("n", self.n, at_least=1)

    def _check_bias(self) -> None:
        pairs = self.logit_bias
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise RequestRefused(f"logit_bias: wanted a mapping of token ids to numbers, got {pairs!r}")
        for token, bias in self.bias:
            _require_int("logit_bias", token, at_least=0)
            wanted = f"for token {token} a number of at most 1e6 in size, or -inf"
            _require("logit_bias", bias, wanted, lambda x: abs(x) <= 1e6 or x == -math.inf)
        if len(dict(self.bias)) != len(self.bias):
            raise RequestRefused("logit_bias: a token id appears twice")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `RequestRefused` for values, otherwise checked, that a vocabulary of ``vocab_size`` tokens cannot
        serve."""
        for token, _ in self.bias:
            if token >= vocab_size:
                raise RequestRefused(f"logit_bias: wanted token ids of 0 to {vocab_size - 1}, got {token}")
        if sum(bias == -math.inf for _, bias in self.bias) == vocab_size:
            raise RequestRefused(f"logit_bias: forbids all {vocab_size} tokens")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise RequestRefused(f"logprobs: wanted at most the vocabulary's {vocab_size} tokens, got {self.logprobs}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> None:
    if not (_is_number(value) and holds(value)):
        raise RequestRefused(f"{name}: wanted {wanted}, got {value!r}")


def _require_int(name: str, value: object, at_least: int, at_most: float = math.inf) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        wanted = f"{at_least} or more" if at_most == math.inf else f"{at_least} to {at_most}"
        raise RequestRefused(f"{name}: wanted an integer of {wanted}, got {value!r}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one token: its own, and ``(token id, log-probability)`` of the likeliest, in falling
    order."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """What a request came to. ``token_ids`` include the stop token that ended it; ``text`` does not. ``logprobs`` has
    an entry a token of ``token_ids``; None where they were not asked for."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class TokenEvent(NamedTuple):
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
    logprobs: TokenLogprobs | None = None


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


@dataclass(eq=False, slots=True)
class Request:
    """A submitted request and its state. ``token_ids`` are the tokens read back so far; ``max_tokens`` is the params'
    own, cut to what the context leaves. ``index`` says which of the params'
    ``n`` completions it is: each has a generator of its own. ``logprobs`` are put here by the readback, one a token,
    ahead of it. ``seen`` is the sampler's: the tokens that a repetition penalty applies to, on the device, those not
    yet read back included."""

    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    tokenizer: Tokenizer | None
    index: int = 0
    id: int = field(default_factory=lambda: next(_ids))
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    seen: Tensor | None = None
    rng: np.random.Generator = field(init=False, repr=False)
    _stream: TextStream | None = field(init=False, repr=False)
    _scanner: StopScanner = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Spawn keys keep the generators apart, whatever the seeds; the first has none, and is the seed's own.
        key = (self.index,) if self.index else ()
        self.rng = np.random.default_rng(np.random.SeedSequence(self.params.seed, spawn_key=key))
        self._stream = self.tokenizer.text_stream() if self.tokenizer else None
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
            if self._scanner.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None:
            if len(self.token_ids) < self.max_tokens:
                self.text += piece
                return TokenEvent(self.id, token, piece, None, None, self.logprobs[-1] if self.logprobs else None)
            self.finish_reason = "length"
        return self._last_event(token, piece)

    def cancel(self) -> TokenEvent:
        """End the request where it is; the event that tells of it."""
        self.finish_reason = "cancelled"
        return self._last_event(None, "")

    def _last_event(self, token: int | None, piece: str) -> TokenEvent:
        assert self.finish_reason is not None
        if self._stream is not None and not self._scanner.stopped:
            piece += self._scanner.push(self._stream.flush())
            if not self._scanner.stopped:
                piece += self._scanner.flush()
        self.text += piece
        told = self.logprobs if self.params.logprobs is not None else None
        completion = Completion(self.text, self.token_ids, self.finish_reason, self.prompt_ids, told)
        logprobs = self.logprobs[-1] if self.logprobs and token is not None else None
        return TokenEvent(self.id, token, piece, self.finish_reason, completion, logprobs)
