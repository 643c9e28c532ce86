"""The deferred readback: tokens and their log-probabilities come home together, `lag` steps late and in order."""

from __future__ import annotations

import pytest
import torch

from nanoserve_lab.engine.deferred import DeferredReadback
from nanoserve_lab.engine.request import MAX_LOGPROBS, Request, SamplingParams
from nanoserve_lab.engine.sampling import Sampler
from nanoserve_lab.instruments import StepTrace

CPU = torch.device("cpu")


def request(params: SamplingParams) -> Request:
    return Request([0], params, params.max_tokens, frozenset(), None)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_tokens_are_due_when_more_than_lag_steps_are_under_way(lag: int) -> None:
    readback = DeferredReadback(lag, 2, CPU)
    first, second = request(SamplingParams()), request(SamplingParams())
    home: list[tuple[Request, int]] = []
    for step in range(10):
        # Rows change place from step to step; a token belongs to the request that it was pushed with.
        requests = (first, second) if step % 2 else (second, first)
        tokens = torch.tensor([step, 100 + step]) if step % 2 else torch.tensor([100 + step, step])
        readback.push(tokens, requests)
        tokens.zero_()
        home += readback.due()
        assert len(readback) == min(step + 1, lag)
    assert [token for owner, token in home if owner is first] == list(range(10 - lag))
    home += readback.due(drain=True)
    assert [token for owner, token in home if owner is first] == list(range(10))
    assert [token for owner, token in home if owner is second] == list(range(100, 110))
    assert len(readback) == 0


@pytest.mark.parametrize("lag", [0, 2])
def test_logprobs_come_home_with_their_token(lag: int) -> None:
    generator = torch.Generator().manual_seed(0)
    asked = [request(SamplingParams(temperature=1.0, seed=0, logprobs=n)) for n in (3, 0, MAX_LOGPROBS)]
    silent = request(SamplingParams())
    readback = DeferredReadback(lag, 4, CPU)
    # Two samplers a step, as a step that decodes and prefills has.
    decode, prefill = Sampler([asked[0], silent], CPU), Sampler(asked[1:], CPU)
    wanted: dict[int, list[tuple[float, list[int]]]] = {one.id: [] for one in asked}
    events = []
    for step in range(8):
        logits = torch.randn(4, 64, generator=generator)
        tokens = torch.cat([decode(logits[:2]), prefill(logits[2:])])
        assert decode.logprobs is not None
        assert prefill.logprobs is not None
        readback.attach(decode.logprobs)
        readback.attach(prefill.logprobs)
        readback.push(tokens, (asked[0], silent, *asked[1:]))
        reference = logits.log_softmax(-1)
        for row, one in ((0, asked[0]), (2, asked[1]), (3, asked[2])):
            likeliest = reference[row].argsort(descending=True)[: one.params.logprobs].tolist()
            wanted[one.id].append((float(reference[row, tokens[row]]), likeliest))
        events += [one.accept(token) for one, token in readback.due(drain=step == 7)]
    for one in asked:
        assert [(told.logprob, [token for token, _ in told.top]) for told in one.logprobs] == wanted[one.id]
        assert [event.logprobs for event in events if event.request_id == one.id] == one.logprobs
        assert one.cancel().completion.logprobs == one.logprobs  # type: ignore[union-attr]
    top = asked[0].logprobs[0].top
    assert len(top) == 3
    assert top[0][1] > top[1][1] > top[2][1]
    assert all(event.logprobs is None for event in events if event.request_id == silent.id)
    ended = silent.cancel()
    assert ended.completion is not None
    assert ended.completion.logprobs is None


def test_a_request_that_has_ended_is_told_no_more() -> None:
    one = request(SamplingParams(logprobs=1))
    readback = DeferredReadback(2, 1, CPU)
    sampler = Sampler([one], CPU)
    for _ in range(3):
        tokens = sampler(torch.randn(1, 8))
        assert sampler.logprobs is not None
        readback.attach(sampler.logprobs)
        readback.push(tokens, [one])
    for owner, token in readback.due():
        owner.accept(token)
    event = one.cancel()
    assert event.logprobs is None
    assert len(list(readback.due(drain=True))) == 2
    assert event.completion is not None
    assert event.completion.logprobs is not None
    assert len(event.completion.logprobs) == len(event.completion.token_ids) == 1


def test_mirrors_are_allocated_once_and_for_logprobs_only_where_asked() -> None:
    readback = DeferredReadback(1, 2, CPU)
    plain, asking = request(SamplingParams()), request(SamplingParams(logprobs=2))
    silent, telling = Sampler([plain], CPU), Sampler([plain, asking], CPU)
    logits = torch.randn(2, 50)

    def step(sampler: Sampler, requests: list[Request]) -> None:
        tokens = sampler(logits[: len(requests)])
        if sampler.logprobs is not None:
            readback.attach(sampler.logprobs)
        readback.push(tokens, requests)
        list(readback.due())

    step(silent, [plain])
    step(telling, [plain, asking])
    with StepTrace() as trace:
        sampled = silent(logits[:1])
        before = trace.allocations
        readback.push(sampled, [plain])
        list(readback.due())
        assert trace.allocations == before
        telling(logits)
        before = trace.allocations
        assert telling.logprobs is not None
        readback.attach(telling.logprobs)
        assert trace.allocations == before
    fresh = DeferredReadback(1, 2, CPU)
    fresh.push(torch.tensor([3]), [plain])
    assert fresh._logprob_mirrors == []


def test_pushing_what_is_not_due_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="lag: wanted 0 or more steps, got -1"):
        DeferredReadback(-1, 2, CPU)
    readback = DeferredReadback(0, 1, CPU)
    readback.push(torch.tensor([1]), [request(SamplingParams())])
    with pytest.raises(AssertionError, match="read what is due"):
        readback.push(torch.tensor([1]), [request(SamplingParams())])
