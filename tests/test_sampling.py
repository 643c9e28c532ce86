"""Sampling against the distribution written out, and its parameters refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from nanoserve_lab.engine import Engine, EngineConfig, sampling
from nanoserve_lab.engine.request import Request, SamplingParams
from nanoserve_lab.engine.sampling import Sampler
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import tiny_model

CPU = torch.device("cpu")


def request(params: SamplingParams, prompt: Sequence[int] = (0,)) -> Request:
    return Request(list(prompt), params, params.max_tokens, frozenset(), None)


class Chosen:
    """Stands for a generator where a test chooses the uniform number."""

    def __init__(self, uniform: float) -> None:
        self.uniform = uniform

    def random(self) -> float:
        return self.uniform


def draw(logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], uniform: float) -> int:
    one = request(params, prompt)
    one.rng = Chosen(uniform)  # type: ignore[assignment]
    return int(Sampler([one], CPU)(logits.unsqueeze(0)))


def kept_tokens(logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int]) -> list[tuple[int, float]]:
    """Tokens that may be drawn, likeliest first, and their probabilities, by the textbook and one at a time."""
    scores = logits.tolist()
    for token, bias in params.bias:
        scores[token] += bias
    for token in set(prompt):
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    weights = [math.exp((score - max(scores)) / params.temperature) for score in scores]
    probability = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(scores)), key=lambda i: (-np.float32(scores[i] / params.temperature), i))
    kept: list[int] = []
    mass = 0.0
    for token in order[: params.top_k or None]:
        assume(abs(mass - params.top_p) > 1e-9)
        if kept and (mass >= params.top_p or probability[token] < params.min_p * probability[order[0]] * (1 - 1e-12)):
            break
        kept.append(token)
        mass += probability[token]
    return [(token, probability[token] / mass) for token in kept]


def check_intervals(choose: Callable[[float], int], expected: Sequence[tuple[int, float]]) -> None:
    """Each token is drawn by the whole of its interval of the uniform number, and nothing else is drawn."""
    start = 0.0
    for token, probability in expected:
        # Rounding moves the ends by about 1e-15, so intervals of that order are left out.
        for inside in (0.001, 0.5, 0.999) if probability > 1e-9 else ():
            assert choose(start + probability * inside) == token
        start += probability
    assert choose(np.nextafter(1.0, 0.0)) in {token for token, _ in expected}


@pytest.mark.parametrize("max_window", [1024, 0], ids=["sorted", "searched"])
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 2.5]),
        top_k=st.integers(0, 14),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        logit_bias=st.dictionaries(st.integers(0, 1), st.sampled_from([-math.inf, -1.5, 0.75, 30.0]), max_size=1),
    ),
    prompt=st.lists(st.integers(0, 1), max_size=2),
)
def test_the_draw_follows_the_distribution(
    max_window: int, values: list[int], params: SamplingParams, prompt: list[int]
) -> None:
    logits = torch.tensor(values, dtype=torch.float64) / 10
    expected = kept_tokens(logits, params, prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "MAX_WINDOW", max_window)
        check_intervals(lambda uniform: draw(logits, params, prompt, uniform), expected)


def test_penalty_bias_and_min_p_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(1, 40, generator=generator, dtype=torch.float64) * 3
        prompt = torch.randint(0, 40, (1, 12), generator=generator)
        bias = {3: 2.5, 7: -4.0, int(prompt[0, 0]): 1.0}
        theirs = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(0.8),
                MinPLogitsWarper(0.02),
            ]
        )
        wanted = theirs(prompt, logits.clone()).softmax(-1)[0]
        assert 1 < int((wanted > 0).sum()) < 40
        params = SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.3, logit_bias=bias)
        order = [int(token) for token in wanted.argsort(descending=True) if wanted[token] > 0]
        expected = [(token, float(wanted[token])) for token in order]
        check_intervals(lambda uniform: draw(logits[0], params, prompt[0].tolist(), uniform), expected)  # noqa: B023


PLAIN = [
    SamplingParams(temperature=0.5, top_k=3, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2),
    SamplingParams(),
    SamplingParams(temperature=1.5, top_k=10, top_p=0.5, seed=3),
    SamplingParams(temperature=2.0, seed=4),
    SamplingParams(temperature=0.7, top_k=2000, top_p=0.3, seed=5),
]
SPECIAL = [
    SamplingParams(temperature=1.0, min_p=0.1, seed=6),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, seed=7),
    SamplingParams(repetition_penalty=2.0, logprobs=3),
    SamplingParams(temperature=1.3, logit_bias={4: 5.0, 9: -math.inf}, top_p=0.8, seed=8, logprobs=0),
]


def sampled(params: Sequence[SamplingParams], logits: torch.Tensor) -> torch.Tensor:
    """Tokens ``[steps, rows]`` for ``logits`` ``[steps, rows, vocab]``."""
    sampler = Sampler([request(one, [1, 2]) for one in params], CPU)
    return torch.stack([sampler(step) for step in logits])


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_draws_the_same_in_any_batch(vocab: int, dtype: torch.dtype) -> None:
    # In bfloat16 many of the scores are equal.
    logits = (torch.randn(12, 10, vocab, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    together = sampled([*PLAIN, *SPECIAL], logits)
    assert torch.equal(together[:, : len(PLAIN)], sampled(PLAIN, logits[:, : len(PLAIN)]))
    for row, one in enumerate([*PLAIN, *SPECIAL]):
        assert torch.equal(together[:, row : row + 1], sampled([one], logits[:, row : row + 1])), one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorting_a_window_and_searching_all_draw_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (torch.randn(40, 4, 700, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    params = [
        SamplingParams(temperature=0.9, top_k=k, top_p=p, min_p=m, seed=k)
        for k, p, m in [(5, 1.0, 0.0), (0, 1.0, 0.0), (0, 0.95, 0.0), (300, 0.99, 1e-4)]
    ]
    by_sorting = sampled(params, logits)
    monkeypatch.setattr(sampling, "MAX_WINDOW", 0)
    assert torch.equal(by_sorting, sampled(params, logits))
    assert len(by_sorting[:, 1].unique()) > 20


LAST = float(np.nextafter(1.0, 0.0))


@pytest.mark.parametrize("max_window", [1024, 0], ids=["sorted", "searched"])
def test_cuts_between_equal_scores_are_exact(max_window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_WINDOW", max_window)
    equal = torch.zeros(8)
    assert draw(equal, SamplingParams(temperature=1.0, top_p=0.5), [], LAST) == 3
    assert draw(equal, SamplingParams(temperature=1.0, top_k=5), [], LAST) == 4
    assert draw(equal, SamplingParams(temperature=1.0, min_p=1.0), [], LAST) == 7
    assert draw(torch.tensor([-0.0, 0.0]), SamplingParams(temperature=1.0, top_k=1), [], LAST) == 0


def test_a_top_p_of_one_cuts_nothing_beside_another() -> None:
    # The softmax of many equal scores adds up to a little less or more than one; the last token has less than that.
    sums = []
    for vocab in range(3000, 3010):
        logits = torch.zeros(2, vocab)
        logits[:, -1] = -20
        one, other = (request(SamplingParams(temperature=1.0, top_p=p)) for p in (1.0, 0.5))
        one.rng = Chosen(LAST)  # type: ignore[assignment]
        assert Sampler([one, other], CPU)(logits)[0] == vocab - 1
        sums.append(float(logits[0].softmax(-1).double().sum()))
    assert min(sums) < 1 < max(sums)


def test_extreme_values_do_not_break_the_batch() -> None:
    logits = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)) * 100
    coldest = SamplingParams(temperature=1e-300, seed=0)
    banned = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(1999), -math.inf), repetition_penalty=100)
    logits[2] = math.nan
    tokens = Sampler([request(p) for p in (coldest, banned, SamplingParams(temperature=1.0, top_p=0.9))], CPU)(
        logits[:3]
    )
    assert tokens[:2].tolist() == [int(logits[0].argmax()), 1999]
    assert 0 <= int(tokens[2]) < 2000


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    Sampler([request(one) for one in [*PLAIN, *SPECIAL]], CPU)(logits)
    assert torch.equal(logits, before)


def test_the_seen_tokens_outlive_the_batch() -> None:
    strong = SamplingParams(repetition_penalty=100.0)
    logits = torch.arange(8.0).unsqueeze(0) + 1  # each step takes the highest token that was not seen
    one, other = request(strong, [7]), request(strong, [6, 5])
    assert Sampler([one], CPU)(logits) == 6
    both = Sampler([other, one], CPU)
    assert both(logits.expand(2, -1)).tolist() == [7, 5]
    assert both(logits.expand(2, -1)).tolist() == [4, 4]
    assert Sampler([one], CPU)(logits) == 3
    # A request whose set was dropped starts from its prompt and what was read back.
    one.token_ids, one.seen = [6, 5, 4, 3], None
    assert Sampler([one], CPU)(logits) == 2


@pytest.mark.both_ways
def test_a_penalised_text_equals_its_tokens_asked_for_one_by_one() -> None:
    config = EngineConfig(max_rows=3, max_context=40, block_size=4, num_blocks=31)
    engine = Engine.build(tiny_model(dtype=torch.float64), None, config)
    params = SamplingParams(max_tokens=16, repetition_penalty=1.4)
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
        plain = engine.generate([prompt], SamplingParams(max_tokens=16))[0]
        assert completion.token_ids != plain.token_ids, "the penalty must matter for the comparison to mean something"
        for i, token in enumerate(completion.token_ids):
            one = SamplingParams(max_tokens=1, repetition_penalty=1.4)
            assert engine.generate([[*prompt, *completion.token_ids[:i]]], one)[0].token_ids == [token]


@pytest.mark.both_ways
def test_a_text_is_the_same_after_preemption() -> None:
    model = tiny_model(dtype=torch.float64)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=i, repetition_penalty=1.5, min_p=0.02) for i in range(3)
    ]
    roomy = Engine.build(model, None, EngineConfig(max_rows=1, max_context=32, block_size=4))
    alone = [roomy.generate([prompt], [one])[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    tight = Engine.build(model, None, EngineConfig(max_rows=3, max_context=32, block_size=4, num_blocks=10))
    together = [completion.token_ids for completion in tight.generate(prompts, params)]
    assert tight.stats().preemptions > 0
    assert together == alone


@pytest.mark.parametrize("vocab", [50, 3000])
def test_sampling_waits_for_nothing_and_uploads_the_uniform_numbers_only(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[Sequence[float]] = []
    upload = sampling._upload

    def counted(values: Sequence[float], device: torch.device) -> torch.Tensor:
        uploads.append(values)
        return upload(values, device)

    monkeypatch.setattr(sampling, "_upload", counted)
    logits = torch.randn(10, vocab)
    everything = Sampler([request(one) for one in [*PLAIN, *SPECIAL]], CPU)
    greedy = [SamplingParams(), SamplingParams(repetition_penalty=2.0, logit_bias={1: 2.0}, logprobs=2)]
    all_greedy = Sampler([request(one) for one in greedy], CPU)
    with StepTrace() as trace:
        everything(logits), all_greedy(logits[:2])
        uploads.clear()
        everything(logits)
        assert [len(values) for values in uploads] == [8]
        uploads.clear()
        all_greedy(logits[:2])
    assert uploads == []
    assert trace.syncs == []


def test_plain_greedy_rows_cost_one_argmax() -> None:
    sampler = Sampler([request(SamplingParams())] * 3, CPU)
    logits = torch.randn(3, 50)
    with StepTrace() as trace:
        sampler(logits)
    assert [launch.op for launch in trace.launches] == ["aten.argmax.default"]
    assert trace.allocations == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 60, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    params = [
        SamplingParams(logprobs=4, temperature=2.0, logit_bias={5: 20.0}, top_k=2, seed=0),
        SamplingParams(),
        SamplingParams(logprobs=2, repetition_penalty=1.5),
    ]
    requests = [request(one) for one in params]
    sampler = Sampler(requests, CPU)
    assert sampler.logprobs is None
    tokens = sampler(logits)
    assert sampler.logprobs is not None
    told, packed = sampler.logprobs
    assert list(told) == [requests[0], requests[2]]
    assert packed.shape == (2, 1 + 2 * 4)
    wanted = logits.float().log_softmax(-1)
    for line, row in zip(packed, (0, 2), strict=True):
        assert float(line[0]) == float(wanted[row, tokens[row]])
        order = sorted(range(60), key=lambda i: (-float(wanted[row, i]), i))[:4]
        assert line[5:].long().tolist() == order
        assert line[1:5].tolist() == wanted[row, order].double().tolist()
    assert int(tokens[0]) == 5
    assert Sampler(requests[1:2], CPU)(logits[1:2]) == tokens[1]
    # Equal ones come in order of id.
    ties = Sampler([request(SamplingParams(logprobs=20))], CPU)
    few = torch.arange(60).fmod(3).unsqueeze(0).to(dtype)
    ties(few)
    assert ties.logprobs is not None
    assert ties.logprobs.packed[0, 21:].tolist() == list(range(2, 60, 3))


def test_each_completion_of_a_prompt_has_its_own_generator() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    first, second, third = (
        Request([0], params, 9, frozenset(), None, index).rng.random(4).tolist() for index in range(3)
    )
    assert first == np.random.default_rng(5).random(4).tolist()
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    # A key of the list [seed, index] would be the seed of another request.
    assert second != np.random.default_rng([5, 1]).random(4).tolist()
    unseeded = [Request([0], SamplingParams(), 9, frozenset(), None).rng.random() for _ in range(2)]
    assert unseeded[0] != unseeded[1]
