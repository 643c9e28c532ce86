"""What every recorder does, what the eager one misses, reading a recording, and the arena's placement."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nanoserve_lab.recorders import Recorder, Recording, eager_recorder, tape_recorder
from nanoserve_lab.recorders.arena import ALIGNMENT, Arena, Lifetime
from nanoserve_lab.recorders.calls import same_bits
from nanoserve_lab.recorders.cuda import cuda_graph_recorder

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EAGER = pytest.param(eager_recorder, "cpu", id="eager")
#: Recorders that record: no Python of the step runs in a replay.
RECORDING = [
    pytest.param(tape_recorder, "cpu", id="tape"),
    pytest.param(cuda_graph_recorder, "cuda", id="cuda", marks=NEEDS_CUDA),
]
every_recorder = pytest.mark.parametrize(("recorder", "device"), [EAGER, *RECORDING])
recording_recorder = pytest.mark.parametrize(("recorder", "device"), RECORDING)

OFFSET = torch.full((4,), 0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + OFFSET


@every_recorder
def test_a_replay_reads_its_inputs_where_they_lie_and_overwrites_one_output(recorder: Recorder, device: str) -> None:
    weight, x = torch.randn(4, 5, device=device), torch.randn(3, 4, device=device)
    recording = recorder(lambda x: {"y": (x * 2 @ weight).relu(), "n": 3}, (x,))
    output, address = recording.output["y"], recording.output["y"].data_ptr()
    assert recording.output["n"] == 3
    for factor in (1.0, -3.0):
        x.mul_(factor)
        weight.add_(factor)
        assert recording.replay() is None  # type: ignore[func-returns-value]
        torch.testing.assert_close(output, (x * 2 @ weight).relu())
        assert recording.output["y"].data_ptr() == address


@every_recorder
def test_a_replay_writes_in_place_what_the_step_does(recorder: Recorder, device: str) -> None:
    cache, slot, x = (torch.zeros(4, 2), torch.tensor([1]), torch.ones(1, 2))
    cache, slot, x = cache.to(device), slot.to(device), x.to(device)
    recording = recorder(lambda slot, x: cache.index_copy_(0, slot, x).sum(), (slot, x))
    slot.fill_(3)
    x.fill_(5.0)
    recording.replay()
    assert cache.tolist() == [[0, 0], [1, 1], [0, 0], [5, 5]]
    assert recording.output.item() == 12.0


@every_recorder
def test_recordings_share_a_pool_and_replay_in_any_order(recorder: Recorder, device: str) -> None:
    inputs = [torch.ones(rows, 8, device=device) for rows in (4, 2, 1)]
    recordings: list[Recording] = []
    for x in inputs:
        pool = recordings[0].pool if recordings else None
        recordings.append(recorder(lambda x: (x + 1).exp().log(), (x,), pool))
    assert all(recording.pool == recordings[0].pool for recording in recordings)
    for value in (3.0, 7.0):
        for x, recording in zip(inputs[::-1], recordings[::-1], strict=True):
            x.fill_(value)
            recording.replay()
            torch.testing.assert_close(recording.output, torch.full_like(x, value + 1))


@recording_recorder
def test_frozen_python_is_not_noticed(recorder: Recorder, device: str) -> None:
    settings, calls, x = {"factor": 2.0}, [], torch.ones(3, device=device)

    def step(x: Tensor) -> Tensor:
        calls.append(1)
        return x * settings["factor"]

    recording = recorder(step, (x,))
    settings["factor"], before = 10.0, len(calls)
    recording.replay()
    assert recording.output.tolist() == [2.0] * 3
    assert len(calls) == before
    assert recording.size == 1 or device == "cuda"


@recording_recorder
def test_a_step_that_waits_is_refused_and_leaves_nothing_behind(recorder: Recorder, device: str) -> None:
    x = torch.ones(3, device=device)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    with pytest.raises(RuntimeError):
        recorder(lambda x: x if x.sum().item() > 0 else -x, (x,))
    assert not torch.is_inference_mode_enabled()
    assert stream is None or torch.cuda.current_stream() == stream
    recording = recorder(lambda x: x + 1, (x,))
    recording.replay()
    assert recording.output.tolist() == [2.0] * 3


def test_the_eager_recorder_runs_python_again() -> None:
    settings, calls = {"factor": 2.0}, []

    def step(x: Tensor) -> dict[str, Any]:
        calls.append(1)
        return {"y": x * settings["factor"], "n": 3}

    x, pool = torch.ones(3), object()
    recording = eager_recorder(step, (x,), pool)
    output = recording.output["y"]
    assert recording.pool is pool
    assert recording.nodes == ()
    assert recording.output["n"] == 3
    x.fill_(2.0)
    settings["factor"] = 10.0
    recording.replay()
    assert output.tolist() == [20.0] * 3
    assert len(calls) == 2
    assert recording.launches().empty


def test_the_eager_recorder_keeps_its_buffer_apart_from_what_the_step_returns() -> None:
    x = torch.ones(3)
    recording = eager_recorder(lambda x: x, (x,))
    x.fill_(5.0)
    assert recording.output.tolist() == [1.0] * 3
    recording.replay()
    assert recording.output.tolist() == [5.0] * 3


def test_the_eager_recorder_refuses_another_shape() -> None:
    rows = [2]
    recording = eager_recorder(lambda x: x[: rows[0]], (torch.ones(3),))
    rows[0] = 1
    with pytest.raises(RuntimeError, match=r"returned \[1\], and \[2\]"):
        recording.replay()
    structured = eager_recorder(lambda x: (x,) * rows[0], (torch.ones(3),))
    rows[0] = 2
    with pytest.raises(RuntimeError, match="when it was first run"):
        structured.replay()


def recorded() -> tuple[Recording, Block, Tensor]:
    block, x = Block(), torch.randn(2, 4)
    return tape_recorder(lambda x: block(x).to(torch.float64), (x,)), block, x


def test_launches_counted_by_hand() -> None:
    recording, _, _ = recorded()
    frame = recording.launches()
    assert frame.op.tolist() == ["aten.mm.default", "aten.mm.default", "aten.add.Tensor", "aten._to_copy.default"]
    assert frame.kind.tolist() == ["matmul", "matmul", "elementwise", "copy"]
    assert frame.module.tolist() == ["layers.0", "layers.1", "", ""]
    assert frame.shapes.tolist() == ["2x4 4x4", "2x4 4x4", "2x4 4", "2x4"]
    assert frame.dtype.tolist() == ["float32"] * 3 + ["float32 -> float64"]
    assert frame.bytes_read.tolist() == [32 + 64, 32 + 64, 32 + 16, 32]
    assert frame.bytes_written.tolist() == [32, 32, 32, 64]
    assert frame.source.tolist()[:3] == ["x = layer(x)"] * 2 + ["return x + OFFSET"]
    assert all(map(math.isnan, frame.seconds))


def moved(step: Callable[..., Any]) -> list[Any]:
    """Shapes, dtype, bytes read and written of the only operation of ``step``, of ``x`` ``[2, 4]``."""
    frame = tape_recorder(step, (torch.arange(8.0).view(2, 4),)).launches()
    [row] = frame[["shapes", "dtype", "bytes_read", "bytes_written"]].to_numpy().tolist()
    return row


IDS, DOUBLES, ROOM = torch.tensor([1]), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda x: x.max(1), ["2x4", "float32 -> float32 int64", 32, 2 * 4 + 2 * 8]),
        (lambda x: x > 1, ["2x4", "float32 -> bool", 32, 8]),
        (lambda x: x[IDS], ["2x4 1", "float32 int64 -> float32", 16 + 8, 16]),
        (lambda x: DOUBLES.copy_(x), ["2x4 2x4", "float64 float32", 32, 64]),
        (lambda x: x.add_(1), ["2x4", "float32", 32, 32]),
        (lambda x: x + DOUBLES, ["2x4 2x4", "float32 float64 -> float64", 32 + 64, 64]),
        (lambda x: torch.ones(3, dtype=torch.int32), ["", "int32", 0, 12]),
        (lambda x: torch.mul(x, x, out=ROOM), ["2x4 2x4 2x4", "float32", 64, 32]),
        (lambda x: torch.index_select(x, 0, IDS, out=ROOM[:1]), ["2x4 1 1x4", "float32 int64", 16 + 8, 16]),
        (lambda x: DOUBLES[:, 0].index_copy_(0, IDS, DOUBLES[:1, 1]), ["2 1 1", "float64 int64", 8 + 8, 8]),
    ],
)
def test_dtypes_and_bytes_by_hand(step: Callable[..., Any], told: list[Any]) -> None:
    assert moved(step) == told


def test_timing_replays_the_recording() -> None:
    recording, block, x = recorded()
    x.fill_(3.0)
    frame = recording.launches(repeats=3)
    assert (frame.seconds > 0).all()
    assert frame.seconds.sum() < 1
    with torch.no_grad():
        assert torch.equal(recording.output, block(x).double())


def test_externals_are_named_with_who_keeps_them() -> None:
    recording, block, x = recorded()
    table = recording.externals()
    assert table.role.tolist() == ["args[0]", "captured", "captured", "captured"]
    assert table["bytes"].tolist() == [32, 64, 64, 16]
    assert table.kept_by.tolist() == [
        "a local variable",
        "Block.layers.0.weight",
        "Block.layers.1.weight",
        f"{__name__}.OFFSET",
    ]
    assert not table.written.any()
    del x
    block.layers[1] = nn.Identity()
    assert recording.externals().kept_by.tolist()[:3] == ["", "Block.layers.0.weight", ""]


class Holder:
    def __init__(self) -> None:
        self.state = torch.zeros(2)
        self.pairs = [(torch.ones(2), torch.ones(2))]


def test_externals_held_by_objects_lists_and_closures() -> None:
    holder, free = Holder(), torch.ones(2)

    def step() -> Tensor:
        return holder.state.add_(holder.pairs[0][1]) + free

    table = tape_recorder(step, ()).externals()
    assert table.kept_by[0] == "Holder.state"
    assert table.kept_by[1] == "Holder.pairs[0][1]"
    assert "variable free" in table.kept_by[2]
    assert table.written.tolist() == [True, False, False]


def test_the_summary_says_what_there_is() -> None:
    recording, _, _ = recorded()
    assert recording.summary().splitlines() == [
        "4 operations: 2 matmul, 1 elementwise, 1 copy",
        "272 bytes read, 160 written",
        "160 bytes of results and intermediates",
        "4 external storages, 176 bytes: 1 of arguments, 3 captured; 0 written",
    ]


def test_bits_are_compared_as_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).clone())
    assert not same_bits(torch.tensor([1 + 2j]), torch.tensor([1 - 2j]))


LIFETIMES = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        st.integers(0, 1000),
        st.integers(0, 12),
        st.integers(0, 6),
    ),
    max_size=25,
)


@given(LIFETIMES, LIFETIMES)
def test_what_lives_at_one_time_never_shares_bytes(first: list[Lifetime], second: list[Lifetime]) -> None:
    arena = Arena()
    for lifetimes in (first, second):
        placed = arena.place(lifetimes)
        spans = []
        for life, (segment, start) in zip(lifetimes, placed, strict=True):
            assert any(segment is own for own in arena.segments)
            assert start % ALIGNMENT == 0
            assert start + life.size <= segment.nbytes
            spans.append((life, segment.data_ptr() + start))
        for index, (one, at) in enumerate(spans):
            for other, elsewhere in spans[:index]:
                together = one.first <= other.last and other.first <= one.last
                apart = at + one.size <= elsewhere or elsewhere + other.size <= at
                assert not together or apart
    assert arena.nbytes >= max((life.size for life in first + second), default=0)


def test_an_arena_counted_by_hand() -> None:
    # 100 bytes take 128. The third starts when the first is over and takes its place; the fourth finds none free.
    lifetimes = [Lifetime(100, 0, 1), Lifetime(64, 1, 3), Lifetime(100, 2, 3), Lifetime(10, 3, 3)]
    arena = Arena()
    assert [start for _, start in arena.place(lifetimes)] == [0, 128, 0, 192]
    assert arena.nbytes == 256
    assert arena.place([Lifetime(256, 0, 0)])[0][1] == 0
    assert arena.nbytes == 256
