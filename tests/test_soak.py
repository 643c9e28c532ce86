"""Arrivals with a trace's moments, and the soak: its agenda, and what its checks notice."""

from __future__ import annotations

import math
import sys

import numpy as np
import pandas as pd
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve_lab import Engine, EngineConfig, SamplingParams
from nanoserve_lab.bench import load, soak
from nanoserve_lab.engine import Completion, TokenEvent
from nanoserve_lab.model.tiny import tiny_model

# --- load -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", load.TRACES.values(), ids=load.TRACES)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_arrivals_have_the_moments_of_their_trace(trace: load.Trace, seed: int) -> None:
    """Bounds of six standard errors or more: a right generator fails in one of 10**8 draws."""
    count = 400_000
    table = load.arrivals(trace, count, seed)
    gaps = np.diff(table.at_s, prepend=0.0)
    assert gaps.min() >= 0
    # Of a gamma distribution: the mean's relative error is cv / sqrt(n), that of the variance sqrt((2 + 6 cv^2) / n).
    mean_error = trace.gap_cv / count**0.5
    cv_error = mean_error + ((2 + 6 * trace.gap_cv**2) / count) ** 0.5 / 2
    assert gaps.mean() == pytest.approx(1 / trace.requests_per_s, rel=6 * mean_error)
    assert gaps.std() / gaps.mean() == pytest.approx(trace.gap_cv, rel=6 * cv_error)
    for column, (mean, deviation) in (("prompt_tokens", trace.prompt_log), ("output_tokens", trace.output_log)):
        tokens = table[column]
        assert tokens.min() >= 1
        for quantile, z in ((0.16, -0.9945), (0.5, 0.0), (0.84, 0.9945), (0.99, 2.3263)):
            # Rounding to whole tokens moves a quantile by half a token; the draw by some thousandths.
            expected = math.exp(mean + z * deviation)
            assert tokens.quantile(quantile) == pytest.approx(expected, rel=0.04, abs=0.51)


def test_scaling_moves_the_same_requests() -> None:
    trace = load.CONVERSATION
    plain = load.arrivals(trace, 500, seed=4)
    scaled = load.arrivals(trace, 500, seed=4, rate_scale=0.5, length_scale=0.1, max_prompt=200, max_output=30)
    assert scaled.at_s.to_numpy() == pytest.approx(2 * plain.at_s.to_numpy())
    assert plain.at_s.is_monotonic_increasing
    expected = (plain.prompt_tokens * 0.1).clip(1, 200)
    assert (scaled.prompt_tokens - expected).abs().max() <= 0.56
    assert scaled.prompt_tokens.max() == 200
    assert scaled.output_tokens.between(1, 30).all()
    assert not plain.equals(load.arrivals(trace, 500, seed=5))
    assert plain.equals(load.arrivals(trace, 500, seed=4))


# --- soak -----------------------------------------------------------------------------------------------------------

SMALL = EngineConfig(max_rows=4, max_context=64, block_size=4, num_blocks=33)


def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CANCELLED", 0.5)
    monkeypatch.setattr(soak, "PATIENCE_S", 0.02)
    # In its first seconds a process still warms up; what is flat and what is not has a test of its own.
    monkeypatch.setattr(soak, "FLAT_MB", math.inf)
    one = soak.Soak(Engine.build(tiny_model(), None, SMALL), load.CONVERSATION, 0.02, seed=1)
    frame = soak.measure(one, seconds=4, load=1.0)
    last = frame.iloc[-1]
    assert last.submitted == last.finished + last.cancelled > 0
    assert last.cancelled > 0
    assert last.running == last.waiting == 0
    assert frame[["submitted", "finished", "cancelled", "preemptions", "tokens"]].diff().min().min() >= 0
    assert frame.second.is_monotonic_increasing
    assert len(frame) >= 5
    lengths = [held for [held] in one.ledger.endings.values()]
    warmup = soak.WARMUP_REQUESTS
    assert len(lengths) == warmup + last.submitted
    assert last.tokens == sum(lengths[warmup:])
    assert frame.requests_per_s[0] == pytest.approx(frame.rate_scale[0] * load.CONVERSATION.requests_per_s)


def test_a_late_cancellation_and_an_arrival_are_on_the_agenda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CANCELLED", 1.0)
    one = soak.Soak(Engine.build(tiny_model(), None, SMALL), load.CODE, 0.02, seed=1)
    agenda = one.agenda(seconds=50.0, rate_scale=1.0)
    assert agenda == sorted(agenda, reverse=True)
    arrived = {number: at for at, number, prompt, _ in agenda if prompt}
    cancelled = {number: at for at, number, prompt, _ in agenda if not prompt}
    assert arrived.keys() == cancelled.keys()
    assert all(0 <= cancelled[n] - arrived[n] <= soak.PATIENCE_S for n in arrived)
    # All arrivals of the time, and none after it.
    table = one.requests(4096, 1.0, one.seed)
    assert table.at_s.iloc[-1] > 50
    assert sorted(arrived.values()) == table.at_s[table.at_s < 50].tolist()


def ended(request_id: int, *tokens: int) -> list[TokenEvent]:
    completion = Completion("", list(tokens), "length", [1])
    return [
        *(TokenEvent(request_id, token, "") for token in tokens[:-1]),
        TokenEvent(request_id, tokens[-1], "", "length", completion),
    ]


def test_the_ledger_notices_what_is_lost() -> None:
    def ledger(events: list[TokenEvent]) -> soak.Ledger:
        account = soak.Ledger()
        account.submitted(7)
        account.take(events)
        return account

    ledger(ended(7, 1, 2, 3)).check()
    with pytest.raises(soak.BenchFailed, match="request 7: wanted one ending, saw 0"):
        ledger(ended(7, 1, 2, 3)[:-1]).check()
    with pytest.raises(soak.BenchFailed, match="request 7: wanted one ending, saw 2"):
        ledger(ended(7, 1, 2) * 2).check()
    with pytest.raises(soak.BenchFailed, match="request 7: 2 tokens told, its completion holds 3"):
        ledger(ended(7, 1, 2, 3)[1:]).check()
    with pytest.raises(soak.BenchFailed, match="request 8: an event of a request that was not submitted"):
        ledger(ended(8, 1))


def test_what_an_engine_still_holds_is_noticed() -> None:
    engine = Engine.build(tiny_model(), None, SMALL)
    soak.check_empty(engine, 0)
    with pytest.raises(soak.BenchFailed, match=r"1 requests submitted, \{\} finished"):
        soak.check_empty(engine, 1)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(soak.BenchFailed, match="'waiting': 1"):
        soak.check_empty(engine, 1)
    engine.step()
    with pytest.raises(soak.BenchFailed, match="'running': 1, 'blocks': 1"):
        soak.check_empty(engine, 1)
    while engine.has_work:
        engine.step()
    soak.check_empty(engine, 1)


def test_rising_memory_is_noticed() -> None:
    second = np.arange(90.0)
    noise = np.random.default_rng(0).normal(0, 1, 90)
    for slope, refused in ((0.0, False), (4.0, False), (8.0, True), (-60.0, False)):
        samples = pd.DataFrame({"second": second, "rss_mb": 900 + slope * second / 60 + noise})
        found, error = soak.slope_mb_per_min(samples)
        reference = np.polyfit(second / 60, samples.rss_mb, 1, cov=True)
        assert (found, error) == pytest.approx((reference[0][0], reference[1][0, 0] ** 0.5))
        if refused:
            with pytest.raises(soak.BenchFailed, match=r"resident memory rises by \d+\.\d MB a minute"):
                soak.check_flat(samples)
        else:
            assert soak.check_flat(samples) == found
    with pytest.raises(soak.BenchFailed, match="three samples"):
        soak.check_flat(samples[:2])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be asked to give memory back")
def test_memory_in_use_is_counted_and_holes_are_not() -> None:
    process = psutil.Process()
    before = soak.held_mb(process)
    blocks = [bytearray(100_000) for _ in range(400)]
    full = soak.held_mb(process)
    assert full - before > 30
    del blocks[::2]  # half of the heap is holes now
    assert full - soak.held_mb(process) > 15
