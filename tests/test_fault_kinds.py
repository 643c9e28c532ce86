"""Faults of public engines that belong to padding and limits: what must hold, and the symptom without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine import MODES, build
from torch import Tensor

from nanoserve_lab.buckets import BucketsUnsound
from nanoserve_lab.engine import Engine, RequestRefused, SamplingParams

QUICK = [mode for mode in MODES if "compiled" not in mode]
PADDED = [mode for mode in QUICK if "bucketed" in mode or mode == "recorded"]


@pytest.mark.parametrize("mode", QUICK)
def test_the_context_limit_is_exact_in_every_mode(mode: str) -> None:
    engine = build(max_context=10, **MODES[mode])
    last = engine.generate([[1] * 9], SamplingParams(max_tokens=50))[0]
    assert (len(last.token_ids), last.finish_reason) == (2, "length"), "one decode fills the tenth place"
    assert len(engine.generate([[1] * 10], SamplingParams(max_tokens=50))[0].token_ids) == 1
    before = engine.cache.pool.data.clone()
    with pytest.raises(RequestRefused, match="11 tokens can never fit, the maximum context is 10"):
        engine.submit([1] * 11)
    assert torch.equal(engine.cache.pool.data, before)


def five_of_eight(strict: bool, mode: str = "persistent and bucketed") -> Engine:
    """Eight rows have decoded, three have ended: five rows in a bucket of eight."""
    engine = build(strict=strict, **{**MODES[mode], "width_multiple": 8, "max_rows": 8, "num_blocks": 70})
    for row in range(8):
        engine.submit([1 + row, 2, 3], SamplingParams(max_tokens=3 if row < 3 else 20))
    while engine.cache.rows != 5:
        engine.step()
    return engine


def nobodys_slots(engine: Engine) -> Tensor:
    """K and V of every slot that no running row owns, the sink aside."""
    size, cache = engine.cache.pool.block_size, engine.cache
    owned = {block * size + at for row in range(cache.rows) for block in cache.owned(row) for at in range(size)}
    free = [slot for slot in range(size, engine.cache.pool.data.shape[2]) if slot not in owned]
    return engine.cache.pool.data[:, :, free].clone()


@pytest.mark.parametrize("mode", PADDED)
def test_padded_rows_write_nobodys_history(mode: str) -> None:
    engine = five_of_eight(True, mode)
    before = nobodys_slots(engine)
    padded = engine.stats().padded_rows
    engine.step()
    assert engine.stats().padded_rows == padded + 3
    assert torch.equal(nobodys_slots(engine), before)


def keep_old_slots(engine: Engine) -> None:
    """The planner leaves in the padded rows what the rows before them wrote."""
    plan = engine.planner.plan

    def stale() -> Any:
        made = plan()
        made.write_slots[made.live :] = torch.arange(200, 200 + len(made.rows) - made.live)
        return made

    engine.planner.plan = stale  # type: ignore[method-assign]


def test_padded_rows_that_keep_old_slots_are_refused_and_would_write_there() -> None:
    engine = five_of_eight(strict=True)
    keep_old_slots(engine)
    with pytest.raises(BucketsUnsound, match="write_slots: padded row 5 holds 200"):
        engine.step()
    engine = five_of_eight(strict=False)
    keep_old_slots(engine)
    before = nobodys_slots(engine)
    engine.step()
    assert not torch.equal(nobodys_slots(engine), before), "without the gate somebody's history is overwritten"


def test_the_smallest_covering_shape_is_replayed() -> None:
    engine = build(**{**MODES["recorded"], "max_rows": 8, "num_blocks": 70, "width_multiple": 8})
    for row in range(8):
        engine.submit([1 + row] * (1 + row % 3), SamplingParams(max_tokens=4 + 3 * row))
    replayed = []
    while engine.has_work:
        rows, longest = engine.cache.rows, int(engine.cache.lengths.max(initial=0)) + 1
        before = {shape: graph.replays for shape, graph in engine.decode_graphs.graphs.items()}
        engine.step()
        for shape, graph in engine.decode_graphs.graphs.items():
            if graph.replays != before.get(shape, 0):
                replayed.append((rows, longest, *shape))
    assert len(replayed) == engine.stats().decode_steps
    for rows, longest, bucket, width in replayed:
        assert (bucket, width) == (min(b for b in (1, 2, 4, 8) if b >= rows), -(-longest // 8) * 8)
    assert len({shape for *_, shape in replayed}) > 1
