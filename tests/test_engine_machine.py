"""The loop under requests that arrive, decode, stop, finish, are cancelled and preempted in any order, in any mode."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_cache import check_invariants
from test_engine import MODES, alone, build

from nanoserve_lab.captured import eager_recorder, tape_recorder
from nanoserve_lab.engine import Completion, SamplingParams, TokenEvent

prompts = st.lists(st.integers(0, 63), min_size=1, max_size=14).map(tuple)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, 1]),
    stop_ids=st.lists(st.integers(0, 63), max_size=8).map(tuple),
)


class EngineMachine(RuleBasedStateMachine):
    """Requests arrive, decode, stop, finish, are cancelled and preempted in any order, in a pool too small for all."""

    modes: ClassVar = [mode for mode in MODES if "compiled" not in mode and "recorded" not in mode]
    recorders: ClassVar = [tape_recorder]

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.heard: dict[int, list[int]] = {}
        self.done: dict[int, Completion] = {}
        self.cancelled: set[int] = set()

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        # Eight blocks: one sequence at full context takes all of them. Nine tokens a step: prompts come in chunks.
        mode = data.draw(st.sampled_from(self.modes))
        recorder = data.draw(st.sampled_from(self.recorders))
        self.engine = build(recorder, num_blocks=9, max_step_tokens=9, strict=True, **MODES[mode])
        # The sink may hold anything: no live row reads it.
        self.engine.cache.pool.data[:, :, 0] = float("nan")

    @rule(prompt=prompts, params=params)
    def submit(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.asked[self.engine.submit(prompt, params)] = (prompt, params)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._take(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        ended = request_id in self.done or request_id in self.cancelled
        assert self.engine.cancel(request_id) == (not ended)
        self.cancelled |= set() if ended else {request_id}

    # Steps within which the oldest request must end: 32 tokens of context, prefilled 6 or more a step while two other
    # rows decode and again after a preemption (when it was not yet the oldest), and the readback's lag.
    PATIENCE = 60

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.done, "an event after the last"
            if event.token_id is not None:
                self.heard.setdefault(event.request_id, []).append(event.token_id)
            if event.completion is not None:
                self.done[event.request_id] = event.completion
                self._compare(event.request_id, event.completion)

    def _compare(self, request_id: int, completion: Completion) -> None:
        tokens, reason = alone(*self.asked[request_id])
        assert completion.token_ids == self.heard.get(request_id, [])
        if request_id in self.cancelled:
            assert completion.finish_reason == "cancelled"
            assert tuple(completion.token_ids) == tokens[: len(completion.token_ids)]
        else:
            assert (tuple(completion.token_ids), completion.finish_reason) == (tokens, reason)

    @invariant()
    def tables_agree(self) -> None:
        scheduler = self.engine.scheduler
        check_invariants(self.engine.cache, scheduler.prefill.blocks if scheduler.prefill else ())
        assert len(scheduler.running) == self.engine.cache.rows
        line = [request.id for request in scheduler.waiting]
        assert line == sorted(line), "somebody was overtaken"
        for row, request in enumerate(scheduler.running):
            # The newest token is sampled but not written yet.
            under_way = sum(request in requests for _, requests, _ in self.engine.readback._window)
            sampled = len(request.token_ids) + under_way
            assert self.engine.cache.lengths[row] == len(request.prompt_ids) + sampled - 1
            assert sampled < request.max_tokens, "a row that has all of its tokens must leave in the same step"
        if self.engine.table is not None:
            wanted = np.zeros_like(self.engine.table.mirror)
            for row in range(len(scheduler.running)):
                slots = self.engine.cache.slots(row)
                wanted[row, : len(slots)] = slots
            assert np.array_equal(self.engine.table.data.numpy(), wanted), "the table keeps what no row owns"

    def teardown(self) -> None:
        while self.engine.has_work:
            oldest = min(self.engine._live, default=None)
            for _ in range(self.PATIENCE):
                self._take(self.engine.step())
            assert oldest is None or oldest in self.done, "the oldest request starves"
        assert set(self.done) == set(self.asked), "a request was lost"
        stats = self.engine.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.finished == Counter(completion.finish_reason for completion in self.done.values())
        assert stats.submitted == len(self.asked)
        assert stats.recompiles == 0
        assert stats.graphs <= 2
        if self.engine.config.capture_decode:
            assert stats.replays == stats.decode_steps
            assert stats.eager_steps == {}
        else:
            assert stats.eager_steps.get("off", 0) == stats.decode_steps


class TestEngineMachine(EngineMachine.TestCase):
    settings: ClassVar = settings(max_examples=60, stateful_step_count=30, deadline=None)


class RecordedEngineMachine(EngineMachine):
    """The same with a step that is recorded."""

    modes: ClassVar = ["recorded"]


class TestRecordedEngineMachine(RecordedEngineMachine.TestCase):
    settings: ClassVar = settings(max_examples=10, stateful_step_count=30, deadline=None)


class CompiledEngineMachine(EngineMachine):
    """The same with a forward that is compiled, and recorded or not, which takes most of the time."""

    modes: ClassVar = [mode for mode in MODES if "compiled" in mode]
    recorders: ClassVar = [tape_recorder, eager_recorder]


class TestCompiledEngineMachine(CompiledEngineMachine.TestCase):
    settings: ClassVar = settings(max_examples=8, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestEngineMachineAtLength(EngineMachine.TestCase):
    settings: ClassVar = settings(max_examples=2000, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestRecordedEngineMachineAtLength(RecordedEngineMachine.TestCase):
    settings: ClassVar = settings(max_examples=500, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestCompiledEngineMachineAtLength(CompiledEngineMachine.TestCase):
    settings: ClassVar = settings(max_examples=300, stateful_step_count=50, deadline=None)
