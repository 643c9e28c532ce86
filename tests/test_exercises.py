"""What the lessons lean on: checkers that say what is off, the ledger, the bench of one step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanoserve_lab.bench.provenance import PROVENANCE
from nanoserve_lab.bench.step import kv_bytes, readback_timeline, trace_step, two_rows, weight_bytes
from nanoserve_lab.exercises import check_crossing, check_launches
from nanoserve_lab.ledger import LESSONS, forward_tensors, ledger
from nanoserve_lab.model.tiny import TINY, tiny_model


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda layers: 25 * layers + 9, "right for 1, 2, 3 and 5 layers"),
        (lambda layers: 25 * layers + 6, "Always off by -3: the layers are right"),
        (lambda layers: 28 * layers + 9, "count the launches of one layer again"),
        (lambda layers: 23 * layers + 9, "a step of one row"),
        (lambda layers: 34 if layers == 1 else 0, "2 layers: 0, counted 59"),
        (lambda layers: None, "a whole number was wanted"),
    ],
)
def test_the_launch_checker_says_what_is_off(answer: Callable[[int], int], told: str) -> None:
    assert told in check_launches(answer)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda size, launches, host_s: size / (launches * host_s) / 1e9, "right"),
        (lambda size, launches, host_s: size / (launches * host_s), "bytes per second"),
        (lambda size, launches, host_s: launches * host_s / size, "upside down"),
        (lambda size, launches, host_s: launches * host_s / size / 1e9, "upside down"),
        (lambda size, launches, host_s: size / host_s / 1e9, "the bytes take 0.01 ms and the launches 7.63 ms"),
        (lambda size, launches, host_s: 0.0, "the bytes take inf ms"),
        (lambda size, launches, host_s: None, "a number was wanted"),
    ],
)
def test_the_crossing_checker_says_what_is_off(answer: Callable[[int, int, float], float], told: str) -> None:
    assert told in check_crossing(answer)


def test_the_first_row_of_the_ledger() -> None:
    frame = ledger("00_decode_step")
    assert frame.index.tolist() == ["00_decode_step"]
    row = frame.iloc[0]
    assert row.launches == 2 * 25 + 9
    assert row.host_syncs == 0
    assert row.moving_addresses == 6, "nothing that the step is handed stays where it was"
    assert row.allocations >= 2 * 20
    assert row.bytes_moved > weight_bytes(tiny_model())
    with pytest.raises(ValueError, match="99_no_lesson"):
        ledger("99_no_lesson")
    assert list(LESSONS) == sorted(LESSONS)


def test_what_the_forward_was_handed() -> None:
    engine = two_rows()
    engine.step()
    first = forward_tensors(engine)
    assert first["slot_mapping"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert first["write_slots"].tolist() == [7, 11]
    assert forward_tensors(engine)["slot_mapping"].shape == (2, 5), "a column more in every step"
    assert len(first) == 6
    assert not engine.model._forward_hooks, "the hook must be gone after the step"


@pytest.mark.parametrize(("lag", "vain"), [(0, 0), (1, 1), (2, 2), (5, 4)])
def test_the_timeline_of_the_readback(lag: int, vain: int) -> None:
    frame = readback_timeline(two_rows(lag=lag))
    assert (~frame.kept).sum() == vain
    assert (frame.row == "B").sum() == 7
    kept = frame[frame.kept & (frame.row == "A")]
    assert kept.step.tolist() == [0, 1, 2]
    # Step 6 is the last: nothing runs after it, so what is still under way is read at once.
    assert kept.read_at.tolist() == [min(step + lag, 6) for step in kept.step]
    assert frame.read_at.max() == 6
    assert set(PROVENANCE) <= set(frame.columns)


def test_the_trace_of_a_step() -> None:
    frame = trace_step(tiny_model(), rows=2, context=5, repeats=2)
    assert len(frame) == 59
    assert (frame.seconds > 0).all()
    assert set(PROVENANCE) <= set(frame.columns)
    assert len(trace_step(tiny_model(), rows=1, context=5, repeats=1)) == 59 - 2 * TINY.num_layers


def test_bytes_by_hand() -> None:
    model = tiny_model()
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert weight_bytes(model) == 4 * (2 * layer + 32 + 64 * 32), "the embedding table is not read, its head is"
    assert kv_bytes(model, 10) == 10 * 2 * 2 * 2 * 8 * 4
