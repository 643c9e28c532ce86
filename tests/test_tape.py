"""The tape: what a replay runs again, what it never notices, and where its results lie."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional as F

from nanoserve_lab.cache.pool import KVPool
from nanoserve_lab.engine.forward import DecodeForward
from nanoserve_lab.model.cpu import kernel_model
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.recorders import Arena, tape_recorder
from nanoserve_lab.recorders.calls import same_bits


def test_a_replay_reads_its_inputs_and_writes_one_output() -> None:
    weight, x = torch.randn(5, 4), torch.randn(3, 4)
    recording = tape_recorder(lambda x: F.linear(x, weight).relu() * 2, (x,))
    output, address = recording.output, recording.output.data_ptr()
    for _ in range(3):
        x.copy_(torch.randn(3, 4))
        weight.copy_(torch.randn(5, 4))
        assert recording.replay() is None  # type: ignore[func-returns-value]
        assert torch.equal(output, F.linear(x, weight).relu() * 2)
        assert recording.output.data_ptr() == address
    assert [node.operation.__name__ for node in recording.nodes] == ["mm.default", "relu.default", "mul.Tensor"]


def test_views_and_empties_are_no_launches() -> None:
    x = torch.randn(4, 6)

    def step(x: Tensor) -> Tensor:
        left, right = x.view(2, 2, 6).permute(1, 0, 2)[0].chunk(2, dim=-1)
        result = torch.empty(2, 3)
        return result.copy_(left + right.detach())

    recording = tape_recorder(step, (x,))
    assert recording.launches().op.tolist() == ["aten.add.Tensor", "aten.copy_.default"]


def make_step(source: str) -> Callable[..., Any]:
    """The function ``step`` of a module of its own, so that all of its globals can be deleted."""
    module = types.ModuleType("step_of_its_own")
    sys.modules[module.__name__] = module
    exec(source, module.__dict__)
    return module.make()


def test_the_function_its_globals_and_its_closure_may_go() -> None:
    step = make_step(
        "import torch\n"
        "weight = torch.full((4, 4), 0.5)\n"
        "def helper(x):\n    return x @ weight\n"
        "def make():\n"
        "    bias = torch.ones(4)\n"
        "    def step(x):\n        return helper(x) + bias\n"
        "    return step\n"
    )
    x = torch.ones(2, 4)
    recording = tape_recorder(step, (x,))
    module = sys.modules.pop("step_of_its_own")
    step.__closure__[0].cell_contents = None  # type: ignore[index]
    module.__dict__.clear()
    with pytest.raises((NameError, TypeError)):
        step(x)
    del step, module
    x.fill_(2.0)
    recording.replay()
    assert torch.equal(recording.output, torch.full((2, 4), 5.0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.rows, self.flip = 2.0, 2, False
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x[: self.rows] * self.weight * self.factor
        return -y if self.flip else y


def test_frozen_python_is_not_noticed() -> None:
    """Nor by a CUDA graph: an attribute, an integer, a branch and a shape are those of the recording."""
    module, x = Scaled(), torch.ones(3, 4)
    recording = tape_recorder(module, (x,))
    module.factor, module.rows, module.flip = 100.0, 3, True
    recording.replay()
    assert torch.equal(recording.output, torch.full((2, 4), 2.0))
    with torch.no_grad():
        assert torch.equal(module(x), torch.full((3, 4), -100.0))


def test_moved_storage_is_not_noticed() -> None:
    """A tensor whose storage was swapped or that was resized: a replay goes on reading the recorded address."""
    module, x = Scaled(), torch.ones(2, 4)
    recording = tape_recorder(module, (x,))
    module.weight.data = torch.full((4,), 7.0)
    recording.replay()
    assert torch.equal(recording.output, torch.full((2, 4), 2.0))
    module.weight = nn.Parameter(torch.full((4,), 9.0))
    x.resize_(1, 2)
    recording.replay()
    assert torch.equal(recording.output, torch.full((2, 4), 2.0))
    table = recording.externals().set_index("role")
    assert table.kept_by["captured"] == ""


def test_no_python_of_the_step_runs() -> None:
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 1

    recording = tape_recorder(step, (torch.zeros(2),))
    recording.replay()
    assert calls == [1]


def test_outputs_may_alias_arguments_and_each_other() -> None:
    x = torch.arange(6.0).view(2, 3)

    def step(x: Tensor) -> dict[str, Any]:
        y = x * 2
        return {"y": y, "row": y[1], "same": x, "view": x.t(), "kept": 3}

    recording = tape_recorder(step, (x,))
    output = recording.output
    assert output["same"] is x
    assert output["kept"] == 3
    x.add_(1)
    recording.replay()
    assert torch.equal(output["y"], x * 2)
    assert torch.equal(output["row"], x[1] * 2)
    assert output["view"].data_ptr() == x.data_ptr()


def test_what_is_written_in_place_is_written_by_recording_and_replay() -> None:
    state = torch.zeros(3)
    recording = tape_recorder(lambda x: state.add_(x), (torch.ones(3),))
    assert state.tolist() == [1.0, 1.0, 1.0]
    recording.replay()
    assert state.tolist() == [2.0, 2.0, 2.0]
    assert recording.output is state


def test_inference_tensors_and_parameters_that_need_gradients() -> None:
    with torch.inference_mode():
        cache = torch.zeros(2, 4)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    recording = tape_recorder(lambda x: cache.copy_(layer(x)) + layer.weight[0], (x,))
    x.mul_(2)
    recording.replay()
    with torch.no_grad():
        assert torch.equal(recording.output, layer(x) + layer.weight[0])
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_random_operations_draw_anew() -> None:
    own = torch.Generator().manual_seed(5)
    recording = tape_recorder(
        lambda: (torch.rand(4), torch.randn(4, generator=own), F.dropout(torch.ones(8), 0.5)), (), generators=(own,)
    )
    torch.manual_seed(3)
    own.manual_seed(3)
    draws = []
    for _ in range(2):
        recording.replay()
        draws.append([t.clone() for t in recording.output])
    torch.manual_seed(3)
    own.manual_seed(3)
    for draw in draws:
        eager = torch.rand(4), torch.randn(4, generator=own), F.dropout(torch.ones(8), 0.5)
        assert all(map(torch.equal, draw, eager))
    assert not torch.equal(draws[0][0], draws[1][0])


def test_recording_draws_as_often_as_the_step_does() -> None:
    torch.manual_seed(1)
    tape_recorder(lambda: torch.rand(5) + torch.randn(5), ())
    after = torch.rand(1)
    torch.manual_seed(1)
    _ = torch.rand(5) + torch.randn(5)
    assert torch.equal(torch.rand(1), after)


@library.custom_op("tape_test::add_twice", mutates_args={"y"})
def add_twice(x: Tensor, y: Tensor, count: Tensor | None = None) -> Tensor:
    y.add_(x)
    return x + y


def test_a_custom_operator_that_writes_and_returns() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    recording = tape_recorder(lambda x, y: add_twice(x, y) * 2, (x, y))
    assert y.tolist() == [1.0, 1.0, 1.0]  # it ran once
    x.fill_(3.0)
    recording.replay()
    assert y.tolist() == [4.0, 4.0, 4.0]
    assert recording.output.tolist() == [14.0, 14.0, 14.0]


def test_batch_norm_updates_its_statistics_once_a_run() -> None:
    layer, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(5, 4)
    recording = tape_recorder(layer, (x,))
    twin(x)
    assert torch.equal(layer.running_mean, twin.running_mean)  # type: ignore[arg-type]
    recording.replay()
    assert torch.equal(recording.output, twin(x).detach())
    assert torch.equal(layer.running_var, twin.running_var)  # type: ignore[arg-type]


def test_a_compiled_function_is_recorded_uncompiled() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return F.linear(x, x).relu()

    x = torch.randn(3, 3)
    with torch.no_grad():
        compiled(x)
    recording = tape_recorder(compiled, (x,))
    assert recording.launches().op.tolist() == ["aten.mm.default", "aten.relu.default"]
    x.neg_()
    recording.replay()
    assert torch.equal(recording.output, F.linear(x, x).relu())


@library.custom_op("tape_test::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x @ x


def test_autocast_is_recorded_and_not_added() -> None:
    x = torch.randn(4, 4)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x + 1

    cast, plain = tape_recorder(step, (x,)), tape_recorder(square, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.replay()
        plain.replay()
    assert cast.output.dtype == torch.bfloat16
    assert same_bits(cast.output, step(x))
    assert same_bits(plain.output, x @ x)


def test_an_error_in_a_replay_names_the_operation() -> None:
    table, ids = torch.randn(4, 2), torch.tensor([0, 3])
    recording = tape_recorder(lambda ids: (table[ids] + 1).index_select(0, ids.clamp(max=1)), (ids,))
    ids[1] = 9
    with pytest.raises(IndexError) as caught:
        recording.replay()
    assert any("aten.index.Tensor" in note and "table[ids]" in note for note in caught.value.__notes__)
    ids[1] = 1
    recording.replay()
    assert torch.equal(recording.output, (table[ids] + 1)[ids])


def test_meta_tensors_are_recorded() -> None:
    x = torch.empty(256, 8192, device="meta")
    recording = tape_recorder(lambda x: F.softmax(x @ x.t(), -1), (x,))
    assert recording.launches().shapes.tolist() == ["256x8192 8192x256", "256x256"]


def chain(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x + 1
    return x * 2


def test_dead_intermediates_share_an_arena() -> None:
    x = torch.zeros(64)
    apart, shared = tape_recorder(chain, (x,)), tape_recorder(chain, (x,), arena=True)
    for recording in (apart, shared):
        x.fill_(1.0)
        recording.replay()
        assert recording.output.eq(14.0).all()
    # Two results are needed at a time: what is read and what is written.
    assert shared.pool.nbytes == 2 * 64 * 4
    assert [node.outputs[0][0].item() for node in apart.nodes[:-1]] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [node.outputs[0][0].item() for node in shared.nodes[:-1]] == [6.0, 7.0] * 3


def test_what_the_step_keeps_is_not_in_the_arena() -> None:
    kept: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        kept[:] = [(x + 1).view(8, 8)]
        return chain(kept[0] * 1)

    x = torch.zeros(64)
    recording = tape_recorder(step, (x,), arena=True)
    x.fill_(4.0)
    recording.replay()
    assert kept[0].eq(5.0).all()
    assert recording.output.eq(22.0).all()


def test_an_arena_is_handed_on() -> None:
    small, large = torch.zeros(16), torch.zeros(64)
    first = tape_recorder(chain, (large,), arena=True)
    second = tape_recorder(chain, (small,), first.pool, arena=True)
    assert second.pool is first.pool
    assert first.pool.nbytes == 2 * 64 * 4
    third = tape_recorder(chain, (torch.zeros(256),), first.pool, arena=True)
    assert third.pool.nbytes == 2 * 64 * 4 + 2 * 256 * 4
    for recording in (first, second, third):
        recording.replay()
    assert all(recording.output.eq(12.0).all() for recording in (first, second, third))
    assert tape_recorder(chain, (small,), first.pool).pool is first.pool
    assert isinstance(tape_recorder(chain, (small,)).pool, Arena)


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("optimized", [False, True])
def test_the_decode_step_of_the_tiny_model(arena: bool, optimized: bool) -> None:
    config = replace(TINY, num_layers=4)
    model = tiny_model(config)
    if optimized:
        model = kernel_model(model)
    pool, rows, width = KVPool(config, 8, 4, torch.float32, "cpu"), 2, 8
    forward = DecodeForward(model, pool, kernels=optimized)
    ids, positions, write_slots = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
    slot_mapping, lengths = torch.zeros(rows, width, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)

    def step(*args: Tensor) -> Tensor:
        ids, positions, write_slots, slot_mapping, lengths = args
        return forward(ids, positions, write_slots, lengths, slot_mapping)

    args = (ids, positions, write_slots, slot_mapping, lengths)
    recording = tape_recorder(step, args, arena=arena)
    generator = torch.Generator().manual_seed(1)
    for length in range(1, width + 1):
        ids.copy_(torch.randint(0, config.vocab_size, (rows,), generator=generator))
        positions.fill_(length - 1)
        lengths.fill_(length)
        slot_mapping.copy_(torch.arange(4, 4 + rows * width).view(rows, width))
        write_slots.copy_(slot_mapping[:, length - 1])
        before = pool.data.clone()
        with torch.inference_mode():
            wanted = step(*args)
        after = pool.data.clone()
        pool.data.copy_(before)
        recording.replay()
        assert torch.equal(recording.output, wanted)
        assert torch.equal(pool.data, after)
