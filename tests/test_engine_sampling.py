"""What the engine does with `n` completions and log-probabilities."""

from __future__ import annotations

import pytest
import torch

from nanoserve_lab.engine import Engine, EngineConfig, RequestRefused, SamplingParams
from nanoserve_lab.model.tiny import tiny_model

pytestmark = pytest.mark.both_ways


def build(**sizes: int) -> Engine:
    defaults = {"max_rows": 3, "max_context": 32, "block_size": 4, "num_blocks": 30}
    return Engine.build(tiny_model(dtype=torch.float64), None, EngineConfig(**(defaults | sizes)))  # type: ignore[arg-type]


def test_n_completions_stand_side_by_side_and_the_first_is_that_of_one() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3)
    completions = build().generate([[1, 2], [4]], [params, SamplingParams(max_tokens=5)])
    assert [completion.prompt_ids for completion in completions] == [[1, 2]] * 3 + [[4]]
    one = build().generate([[1, 2]], SamplingParams(max_tokens=8, temperature=1.0, seed=3))[0]
    texts = [tuple(completion.token_ids) for completion in completions[:3]]
    assert texts[0] == tuple(one.token_ids)
    assert len(set(texts)) == 3
    again = build(max_rows=1).generate([[1, 2]], params)
    assert [tuple(completion.token_ids) for completion in again] == texts


@pytest.mark.parametrize("lag", [0, 2])
def test_logprobs_of_a_text_are_the_models_own(lag: int) -> None:
    engine = build(readback_lag=lag)
    asking = SamplingParams(max_tokens=6, temperature=1.0, top_k=5, seed=1, logprobs=3)
    told, silent = engine.generate([[1, 2, 3], [5]], [asking, SamplingParams(max_tokens=9)])
    assert silent.logprobs is None
    assert told.logprobs is not None
    assert len(told.logprobs) == len(told.token_ids) == 6
    for i, (token, logprobs) in enumerate(zip(told.token_ids, told.logprobs, strict=True)):
        # The same distribution from a prompt of everything before, its likeliest token being what greedy takes.
        greedy = SamplingParams(max_tokens=1, logprobs=5)
        again = engine.generate([[1, 2, 3, *told.token_ids[:i]]], greedy)[0]
        assert again.logprobs is not None
        assert again.logprobs[0].top[0] == (again.token_ids[0], again.logprobs[0].logprob)
        assert [i for i, _ in logprobs.top] == [i for i, _ in again.logprobs[0].top[:3]]
        assert logprobs.logprob == pytest.approx(dict(again.logprobs[0].top)[token], abs=1e-9)
    events = list(engine.stream([1, 2, 3], asking))
    assert events[-1].completion is not None
    assert [event.logprobs for event in events] == events[-1].completion.logprobs
    assert [event.token_id for event in events] == told.token_ids


def test_what_the_engine_cannot_serve_is_refused_by_name() -> None:
    engine = build()
    with pytest.raises(RequestRefused, match=r"^n: 2 completions"):
        engine.submit([1], SamplingParams(n=2))
    with pytest.raises(RequestRefused, match=r"^n: wanted an integer of 1 or more"):
        engine.generate([[1]], SamplingParams(n=0))
    with pytest.raises(RequestRefused, match=r"^logit_bias: wanted token ids of 0 to 63, got 64"):
        engine.generate([[1], [2]], [SamplingParams(n=2), SamplingParams(logit_bias={64: 1.0})])
    assert not engine.stats().waiting
