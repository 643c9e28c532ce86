"""A request's parameters, refused by name, and its text, cut at a stop string."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve_lab.engine.request import RequestRefused, SamplingParams, StopScanner


def test_params_can_be_hashed_whatever_they_were_given() -> None:
    lists = SamplingParams(stop=["a"], stop_ids=[3], logit_bias={7: 1.0, 2: -1.0})
    tuples = SamplingParams(stop=("a",), stop_ids=(3,), logit_bias=((2, -1.0), (7, 1.0)))
    assert lists == tuples
    assert hash(lists) == hash(tuples)
    assert lists.bias == ((2, -1.0), (7, 1.0))
    assert lists != SamplingParams(stop=["a"], stop_ids=[3], logit_bias={7: 1.0})
    bias = {1: 1.0}
    kept = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert kept.bias == ((1, 1.0),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("min_p", None),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.2),
        ("repetition_penalty", 101),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"the": 1.0}),
        ("logit_bias", {"the": 1.0, 3: 1.0}),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: 1e7}),
        ("logit_bias", {3: "up"}),
        ("logit_bias", [3, 4]),
        ("logit_bias", None),
        ("logit_bias", ((3, 1.0), (3, 2.0))),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("n", 0),
        ("n", 1.0),
        ("seed", -1),
        ("seed", 0.5),
        ("stop", "END"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_ids", [-2]),
        ("stop_ids", ["x"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestRefused, match=f"^{name}: "):
        SamplingParams(**{name: value}).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={3: 1.0, 10: 1.0}), "logit_bias: wanted token ids of 0 to 9, got 10"),
        (SamplingParams(logit_bias=dict.fromkeys(range(10), -math.inf)), "logit_bias: forbids all 10 tokens"),
        (SamplingParams(logprobs=11), "logprobs: wanted at most the vocabulary's 10 tokens, got 11"),
    ],
)
def test_values_that_the_vocabulary_cannot_serve_are_refused(params: SamplingParams, message: str) -> None:
    params.check()
    with pytest.raises(RequestRefused, match=f"^{message}$"):
        params.check_vocab(10)
    params.check_vocab(11)


def test_ordinary_values_pass() -> None:
    SamplingParams().check()
    SamplingParams(1, 0.7, 40, 0.9, 0, ["\n\n", "END"], [2]).check()
    SamplingParams(temperature=2, top_p=1, min_p=0, repetition_penalty=1).check()
    full = SamplingParams(min_p=0.1, repetition_penalty=1.2, logit_bias={0: 3, 9: -math.inf}, logprobs=10, n=4)
    full.check()
    full.check_vocab(10)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_scanner_equals_searching_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    scanner = StopScanner(stops)
    # The first stop to be complete wins; of two complete at the same character, the one that begins earlier.
    cut = None
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            cut = min(starts)
            break
    shown, at = "", 0
    while at < len(text) and not scanner.stopped:
        size = data.draw(st.integers(1, 5))
        shown += scanner.push(text[at : at + size])
        at += size
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
    if not scanner.stopped:
        shown += scanner.flush()
    assert scanner.stopped == (cut is not None)
    assert shown == (text if cut is None else text[:cut])
