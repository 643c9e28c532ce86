"""Sampling against the distribution written out, and its parameters refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve_lab.engine.request import RequestRefused, SamplingParams, StopScanner
from nanoserve_lab.engine.sampling import sample


def column(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    args = column(temperature), column(top_k or 2**62, dtype=torch.int64), column(top_p), column(uniform)
    return int(sample(logits.unsqueeze(0), *args))


def kept_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token to probability, by the textbook: softmax, cut to k, then to the smallest set that reaches p."""
    probability = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda i: (-float(probability[i]), i))[: top_k or len(logits)]
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += float(probability[token])
    return {token: float(probability[token]) / mass for token in kept}


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 14),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_the_draw_follows_the_distribution(values: list[int], temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor(values, dtype=torch.float64) / 10
    expected = kept_tokens(logits, temperature, top_k, top_p)
    start = 0.0
    for token, probability in sorted(expected.items(), key=lambda item: (-item[1], item[0])):
        # The whole interval [start, start + probability) of the uniform number maps to this token.
        # (Rounding moves its ends by about 1e-16, so intervals of that order are left out.)
        for inside in (0.001, 0.5, 0.999) if probability > 1e-9 else ():
            assert draw(logits, temperature, top_k, top_p, start + probability * inside) == token
        start += probability
    assert draw(logits, temperature, top_k, top_p, np.nextafter(1.0, 0.0)) in expected


def test_rows_do_not_disturb_each_other() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    args = (
        column(0.5, 1.0, 1.5, 2.0, 0.7),
        column(3, 2**62, 10, 1, 50, dtype=torch.int64),
        column(1.0, 0.9, 0.5, 1.0, 0.3),
        column(0.1, 0.99, 0.5, 0.7, 0.0),
    )
    together = sample(logits, *args)
    alone = torch.cat([sample(logits[i : i + 1], *(a[i : i + 1] for a in args)) for i in range(5)])
    assert torch.equal(together, alone)


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


def test_ordinary_values_pass() -> None:
    SamplingParams().check()
    SamplingParams(1, 0.7, 40, 0.9, 0, ["\n\n", "END"], [2]).check()
    SamplingParams(temperature=2, top_p=1).check()


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
