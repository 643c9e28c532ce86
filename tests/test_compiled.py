"""One graph a step, counted; what breaks it is named with its line."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import MODES
from torch import Tensor

from nanoserve_lab.compiled import (
    CompiledDecode,
    GraphBroken,
    check_single_graph,
    count_graphs,
    eager_compiler,
    find_breaks,
    torch_compiler,
)
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.model.tiny import TINY, tiny_model


def whole(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(1) + y).sum(1)


def branching(x: Tensor, y: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def reading(x: Tensor, y: Tensor) -> Tensor:
    top = x.max().item()
    return x * top


def test_a_step_of_many_shapes_is_two_graphs() -> None:
    decode = CompiledDecode(whole, eager_compiler)
    shapes = [(rows, width) for rows in (3, 2, 5, 1, 4) for width in (4, 2, 3, 5, 7)]
    for rows, width in shapes:
        x, y = torch.randn(rows), torch.randn(rows, width)
        assert torch.equal(decode(x, y), whole(x, y))
    # One for a single row, which the compiler always treats as a case of its own, one for all others.
    assert decode.graphs == len(decode.kinds) == 2
    assert decode.recompiles == []
    check_single_graph(decode)


def test_equal_sizes_are_not_taken_for_one_size() -> None:
    decode = CompiledDecode(whole, eager_compiler)
    decode(torch.randn(3), torch.randn(3, 3))
    decode(torch.randn(3), torch.randn(3, 5))
    assert decode.graphs == 1
    x = torch.randn(4)
    decode(x, torch.randn(4, 4))
    assert not hasattr(x, "_dynamo_weak_dynamic_indices"), "the caller's tensors are left as they are"


def test_static_shapes_run_into_the_compilers_limit() -> None:
    decode = CompiledDecode(whole, eager_compiler, dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    for width in range(2, limit + 2):
        decode(torch.randn(2), torch.randn(2, width))
    with pytest.raises(GraphBroken, match=rf"compiled {limit} times.*the compiler's limit is {limit}.*01_graph_breaks"):
        decode(torch.randn(2), torch.randn(2, limit + 2))
    assert decode.graphs == limit
    assert len(decode.recompiles) == limit - 1
    assert "size mismatch" in decode.recompiles[0]
    with pytest.raises(GraphBroken, match=f"{limit} graphs for 1 kind of arguments; the last guard that failed"):
        check_single_graph(decode)


def test_a_python_number_is_a_guard() -> None:
    decode = CompiledDecode(lambda x, n: x[:, :n].sum(1), eager_compiler, dynamic=False)
    for n in (2, 3):
        decode(torch.randn(2, 9), n)
    assert decode.recompiles == ["n == 2"]
    with pytest.raises(GraphBroken, match="the last guard that failed: n == 2"):
        check_single_graph(decode)


def test_two_decoders_of_one_function_share_nothing() -> None:
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        decode = CompiledDecode(whole, eager_compiler)
        decode(torch.randn(2), torch.randn(2, 3))
        assert decode.graphs == 1


@pytest.mark.parametrize(
    ("step", "source", "reason"),
    [
        (branching, "if x.sum() > 0:", "branch"),
        (reading, "top = x.max().item()", "the host waits for a tensor's value"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_line(step: Any, source: str, reason: str) -> None:
    decode = CompiledDecode(step, eager_compiler)
    for _ in range(2):  # and again
        with pytest.raises(GraphBroken, match="forward: line") as caught:
            decode(torch.ones(3), torch.ones(3, 2))
        (found,) = caught.value.breaks[:1]
        assert found.source == source
        assert reason in found.reason
        assert found.path == __file__
        assert Path(__file__).read_text(encoding="utf-8").splitlines()[found.line - 1].strip() == source
        assert __file__ not in str(caught.value)
    with pytest.raises(GraphBroken, match="forward: line"):
        check_single_graph(decode)


def test_a_decoder_that_never_ran_has_no_graph() -> None:
    with pytest.raises(GraphBroken, match="0 graphs for 0 kinds"):
        check_single_graph(CompiledDecode(whole, eager_compiler))


def three_breaks(x: Tensor) -> Tensor:
    n = x.long().max().item()
    x = x[:n]
    if x[0] > 0:
        x = x + 1
    print("here")
    return x.sum()


def test_breaks_are_found_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    breaks = find_breaks(three_breaks, x)
    assert [b.source for b in breaks] == ["n = x.long().max().item()", "if x[0] > 0:", 'print("here")']
    assert [b.line for b in breaks] == sorted(b.line for b in breaks)
    assert str(breaks[1]).startswith(f"line {breaks[1].line}, `if x[0] > 0:`: ")
    assert count_graphs(three_breaks, x) == 4
    assert find_breaks(whole, torch.ones(2), torch.ones(2, 3)) == []
    assert count_graphs(whole, torch.ones(2), torch.ones(2, 3)) == 1
    assert capsys.readouterr().err == ""


def looping(x: Tensor) -> Tensor:
    for _ in range(2):
        if x.sum() > 0:
            x = x + 1
    return x


def test_a_break_inside_a_loop_is_named() -> None:
    assert [b.source for b in find_breaks(looping, torch.ones(2))] == ["if x.sum() > 0:"]


def growing_run(**switches: Any) -> Engine:
    """Rows go from 1 to 32 and back, contexts from 2 to 1,024; the engine afterwards."""
    config = EngineConfig(max_rows=32, max_context=1024, num_blocks=800, strict=True, **switches)
    model = tiny_model(replace(TINY, max_position=1024), dtype=torch.float64)
    engine = Engine.build(model, None, config, eager_compiler)
    engine.submit([1], SamplingParams(max_tokens=1024))
    for row in range(31):
        engine.submit([row % 60], SamplingParams(max_tokens=40 + 13 * row))
        engine.step()
    while engine.has_work:
        engine.step()
    return engine


@pytest.mark.parametrize("mode", ["compiled", "compiled and bucketed"])
def test_compile_counts_over_growing_contexts_and_rows(mode: str) -> None:
    engine = growing_run(**{**MODES[mode], "width_multiple": 128})
    stats = engine.stats()
    assert stats.finished == {"length": 32}
    assert stats.graphs == 2
    assert stats.recompiles == 0
    assert isinstance(engine.forward, CompiledDecode)
    check_single_graph(engine.forward)


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_says_the_same() -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    # All end together: a last row alone would need a second graph, and compiling takes most of the time.
    params = [SamplingParams(max_tokens=9, temperature=temperature, seed=1) for temperature in (0.0, 0.8, 1.2)]
    sizes = {"max_rows": 3, "max_context": 64, "block_size": 4}
    model = tiny_model(replace(TINY, num_layers=1), dtype=torch.float64)
    wanted = Engine.build(model, None, EngineConfig(**sizes)).generate(prompts, params)
    config = EngineConfig(**sizes, compile_decode=True, strict=True)  # type: ignore[arg-type]
    engine = Engine.build(model, None, config, torch_compiler)
    said = engine.generate(prompts, params)
    assert [c.token_ids for c in said] == [c.token_ids for c in wanted]
    assert engine.stats().graphs == 1


def test_an_engine_with_python_state_in_its_forward_is_refused() -> None:
    """A forward that uses a Python number of its own is compiled again when the number changes."""
    config = EngineConfig(max_rows=2, max_context=32, block_size=4, compile_decode=True, strict=True)
    engine = Engine.build(tiny_model(), None, config, eager_compiler)
    assert isinstance(engine.forward, CompiledDecode)
    inner: Any = engine.forward.forward

    class Counting:
        def __init__(self) -> None:
            self.steps = 0

        def __call__(self, ids: Tensor, *tensors: Tensor) -> Tensor:
            out: Tensor = inner(ids, *tensors) + 0 * self.steps
            return out

    forward = Counting()
    engine.decode_graphs.forward = CompiledDecode(forward, eager_compiler)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    for _ in range(3):
        engine.step()
    assert (engine.stats().graphs, engine.stats().recompiles) == (1, 0)
    forward.steps += 1
    with pytest.raises(GraphBroken, match=r"2 graphs for 1 kind of.*self\.steps == 0"):
        engine.step()
