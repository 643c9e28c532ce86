"""A recording says what memory its step takes, without running it again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tape_programs import KINDS, PROGRAMS, Program, inputs, run_program, steps
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab.recorders import eager_recorder, tape_recorder
from nanoserve_lab.recorders.allocator import pool_bytes
from nanoserve_lab.recorders.lifetimes import Allocate, Free, Lifetimes, lifetimes_of

MIB = 1 << 20


def events(lifetimes: Lifetimes) -> tuple[list[Allocate | Free], frozenset[int]]:
    """Events and outputs, with the frees between two allocations in the order of their ids.

    The tape looks who has died when the next operation comes, so their own order is lost; they commute in an allocator.
    """
    ordered: list[Allocate | Free] = []
    for _, group in groupby(lifetimes.events, lambda event: isinstance(event, Free)):
        ordered += sorted(group, key=lambda event: event.id)
    return ordered, lifetimes.outputs


def check(program: Program, arena: bool = False) -> None:
    def step(*args: Tensor) -> Any:
        return run_program(program, *args)

    recording = tape_recorder(step, inputs(0), arena=arena)
    assert events(recording.lifetimes()) == events(lifetimes_of(step, inputs(0)))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_alone(kind: str) -> None:
    check([(kind, 0, 1)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, st.booleans())
def test_programs(program: Program, arena: bool) -> None:
    check(program, arena)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps(sorted(KINDS)), min_size=1, max_size=30), st.booleans())
def test_long_programs(program: Program, arena: bool) -> None:
    check(program, arena)


def story(lifetimes: Lifetimes) -> str:
    """The events in short: ``+id`` and ``-id``, ``*`` behind what is an output."""
    ordered, outputs = events(lifetimes)
    return " ".join(f"-{e.id}" if isinstance(e, Free) else f"+{e.id}" + "*" * (e.id in outputs) for e in ordered)


def by_hand(x: Tensor) -> Tensor:
    y = x + 1  # 0: last used in the next line, alive to the end of the function, as its name is
    z = F.linear(y.relu(), x)  # 1 is relu's, with no name; 2 the product's
    z.mul_(2)
    return z[1:].exp().view(-1)  # 3; its view is the output


KEPT: list[Any] = []


def cyclic(x: Tensor) -> Tensor:
    loop: list[Any] = [x + 1]
    loop.append(loop)
    del loop
    return x + 2


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (by_hand, "+0 +1 +2 -1 +3* -0 -2"),
        (lambda x: (x, x.t()[1:]), ""),  # of what was there
        (lambda x: x.relu().relu().relu(), "+0 +1 -0 +2* -1"),
        (lambda x: torch.stack([x, x]).unbind()[1].t(), "+0*"),
        (lambda x: torch.empty(4, 4).copy_(x) + 1, "+0 +1* -0"),  # an empty is memory, though no launch
        (lambda x: (x.new_empty(0, 4), x.clone().index_fill_(0, x[0].long(), 2.0)), "+0* +1 -1"),
        (lambda x: KEPT.append(x.clone()), "+0"),  # stashed: alive, and no output
        (lambda x: F.rms_norm(x, (4,)).add_(1), "+0*"),
        (cyclic, "+0 +1* -0"),
    ],
)
def test_counted_by_hand(step: Callable[[Tensor], Any], told: str) -> None:
    try:
        assert story(tape_recorder(step, (torch.zeros(4, 4),)).lifetimes()) == told
    finally:
        KEPT.clear()


def test_the_bytes_are_those_of_a_pool() -> None:
    def step(x: Tensor) -> Tensor:
        return (x + 1).exp().sum()

    recording = tape_recorder(step, (torch.empty(3, MIB, device="meta"),))
    allocations = [event for event in recording.lifetimes().events if isinstance(event, Allocate)]
    assert [(a.nbytes, a.op, a.shape, a.dtype) for a in allocations] == [
        (12 * MIB, "aten.add.Tensor", (3, MIB), "float32"),
        (12 * MIB, "aten.exp.default", (3, MIB), "float32"),
        (4, "aten.sum.default", (), "float32"),
    ]
    assert pool_bytes([recording.lifetimes()]).reserved == (12 + 12 + 2) * MIB
    assert pool_bytes([recording.lifetimes()] * 2).reserved == (12 + 12 + 2) * MIB


def test_a_replay_changes_nothing_of_it() -> None:
    recording = tape_recorder(lambda x: x + 1, (torch.zeros(4),))
    before = recording.lifetimes()
    recording.replay()
    assert recording.lifetimes() == before


def test_a_recorder_that_does_not_know_says_so() -> None:
    with pytest.raises(ValueError, match="does not see what its step allocates"):
        eager_recorder(lambda x: x + 1, (torch.zeros(4),)).lifetimes()


def test_the_first_recording_of_a_process_is_like_any_other() -> None:
    program = """
import sys
import torch
from nanoserve_lab.recorders import tape_recorder
def inner(x):
    y = x + 1
    return y.exp()
def step(x):
    return inner(x).exp()
first, second = (tape_recorder(step, (torch.zeros(4),)).lifetimes() for _ in range(2))
assert first == second, first
assert "torch._dynamo" not in sys.modules, "no compiler is imported where nothing is compiled"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
