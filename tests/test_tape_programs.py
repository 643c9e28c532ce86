"""Random programs: recorded once and replayed on new values, they give eager's bits, or are refused by name."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tape_programs import KINDS, PROGRAMS, REFUSED, Program, inputs, run_program, steps
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.recorders import RecordingRefused, tape_recorder
from nanoserve_lab.recorders.calls import same_bits


def check(program: Program, arena: bool, gradients: bool = False) -> None:
    args = tuple(t.clone().requires_grad_(gradients and t.is_floating_point()) for t in inputs(0))
    recording = tape_recorder(lambda *args: run_program(program, *args), args, arena=arena)
    for seed in (1, 2):
        for arg, value in zip(args, inputs(seed), strict=True):
            arg.detach().copy_(value)
        theirs = tuple(t.clone().requires_grad_(arg.requires_grad) for t, arg in zip(inputs(seed), args, strict=True))
        torch.manual_seed(seed)
        recording.replay()
        torch.manual_seed(seed)
        with torch.no_grad():
            wanted = run_program(program, *theirs)
        for got, want in zip((*recording.output, *args), (*wanted, *theirs), strict=True):
            assert got.stride() == want.stride()
            assert same_bits(got, want)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_alone(kind: str) -> None:
    check([(kind, 0, 1)], arena=False)
    check([("add", 0, 1), (kind, 2, 0), (kind, 2, 3)], arena=True)


def test_there_are_kinds_enough() -> None:
    assert len(KINDS) >= 100
    args = inputs(0)
    every = tape_recorder(lambda *args: run_program([(kind, 0, 1) for kind in KINDS], *args), args)
    assert len({node.operation for node in every.nodes}) >= 90


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_on_parameters(kind: str) -> None:
    check([(kind, 0, 1)], arena=False, gradients=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, st.booleans())
def test_programs(program: Program, arena: bool) -> None:
    check(program, arena)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps(sorted(KINDS)), min_size=1, max_size=30), st.booleans())
def test_long_programs(program: Program, arena: bool) -> None:
    check(program, arena)


@pytest.mark.parametrize("kind", sorted(REFUSED))
@settings(max_examples=5, deadline=None)
@given(before=PROGRAMS, after=PROGRAMS)
def test_programs_that_must_be_refused(kind: str, before: Program, after: Program) -> None:
    program = [*before, (kind, 0, 1), *after]
    args = tuple(t.clone() for t in inputs(0))
    with pytest.raises(RecordingRefused, match=REFUSED[kind][1]):
        tape_recorder(lambda *args: run_program(program, *args), args)


def launched(program: Program, mode: Any) -> list[str]:
    args = tuple(t.clone() for t in inputs(0))
    with mode:
        recording = tape_recorder(lambda *args: run_program(program, *args), args)
    frame = recording.launches()
    return (frame.op + " " + frame.shapes).tolist()


@settings(max_examples=15, deadline=None)
@given(PROGRAMS)
def test_the_same_launches_in_every_mode(program: Program) -> None:
    lists = [launched(program, mode) for mode in (torch.no_grad(), torch.inference_mode(), nullcontext())]
    assert lists[0] == lists[1] == lists[2]


@settings(max_examples=15, deadline=None)
@given(PROGRAMS)
def test_the_trace_sees_the_launches_of_the_recording(program: Program) -> None:
    columns = ["op", "kind", "module", "shapes", "bytes_read", "bytes_written"]
    recorded = tape_recorder(lambda *args: run_program(program, *args), inputs(0)).launches()
    args = inputs(0)
    with StepTrace() as trace:
        run_program(program, *args)
    assert trace.frame()[columns].to_numpy().tolist() == recorded[columns].to_numpy().tolist()


def test_a_composite_is_taken_apart_as_eager_takes_it() -> None:
    def parts(x: Tensor) -> Tensor:
        with torch.inference_mode(False):  # here the dispatcher itself takes composites apart
            return torch.nn.functional.linear(x.clone(), x, x[:, 0])

    def whole(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.clone(), x, x[:, 0])

    ops = [tape_recorder(step, (inputs(0)[0],)).launches().op.tolist() for step in (parts, whole)]
    assert ops[0] == ops[1] == ["aten.clone.default", "aten.addmm.default"]


def test_a_decomposition_in_python_does_not_come_before_the_kernel() -> None:
    importlib.import_module("torch._decomp")  # registers them, as the compiler does
    recording = tape_recorder(lambda x: F.interpolate(x[None], scale_factor=2), (inputs(0)[0],))
    assert recording.launches().op.tolist() == ["aten.upsample_nearest1d.default"]
