"""The counting instruments against steps counted by hand."""

from __future__ import annotations

import pytest
import torch

from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import TINY, tiny_model


def traced_decode_step() -> StepTrace:
    engine = Engine.build(
        tiny_model(), None, EngineConfig(max_rows=2, block_size=4, max_context=32, optimize_cpu=False, slot_table=False)
    )
    for prompt in ([1, 2, 3], [4, 5]):
        engine.submit(prompt, SamplingParams(max_tokens=8))
    engine.step()
    with StepTrace() as trace:
        engine.step()
    return trace


def test_a_two_row_step_counted_by_hand() -> None:
    # By hand, from the forward's source. A layer: two norms; qkv, o, gate_up, down; three for RoPE; two writes to
    # the pool; two gathers, V zeroed, Q scaled, K and V laid out, two products, mask, softmax; silu and its product;
    # two sums.
    layer = 2 + 4 + 3 + 2 + 2 + 1 + 1 + 2 + 2 + 1 + 1 + 2 + 2
    # Around them: the mask's arange and comparison, the embedding and the two RoPE rows; the last norm, the LM head,
    # argmax, and the copy home.
    around = 2 + 1 + 2 + 1 + 1 + 1 + 1
    trace = traced_decode_step()
    assert len(trace.launches) == TINY.num_layers * layer + around
    kinds = trace.frame().kind.value_counts()
    assert kinds["matmul"] == TINY.num_layers * 4 + 1
    assert kinds["attention"] == TINY.num_layers * 3
    assert kinds["norm"] == TINY.num_layers * 2 + 1
    assert trace.syncs == []


def test_the_weights_are_read_once() -> None:
    frame = traced_decode_step().frame()
    matmuls = frame[frame.kind == "matmul"]
    weights = sum(p.nbytes for name, p in tiny_model().named_parameters() if p.dim() == 2 and name != "embed.weight")
    activations = sum(
        4 * 2 * sum(map(int, shapes.split()[0].split("x")[1:])) for shapes in matmuls.shapes
    )  # two fp32 rows each
    assert matmuls.bytes_read.sum() == weights + activations


def test_modules_are_named() -> None:
    frame = traced_decode_step().frame()
    assert set(frame[frame.op == "aten.rms_norm.default"].module) == {
        *(f"layers.{i}.{norm}" for i in range(TINY.num_layers) for norm in ("attn_norm", "mlp_norm")),
        "norm",
    }
    assert frame.order.tolist() == list(range(len(frame)))


def test_the_optimized_step_is_counted_too() -> None:
    engine = Engine.build(tiny_model(), None, EngineConfig(max_rows=2, block_size=4, max_context=32))
    for prompt in ([1, 2, 3], [4, 5]):
        engine.submit(prompt, SamplingParams(max_tokens=8))
    engine.step()
    with StepTrace() as trace:
        engine.step()
    plain = traced_decode_step()
    norms = 2 * TINY.num_layers + 1
    assert sum(launch.op.startswith("nanoserve_lab.rms_norm") for launch in trace.launches) == norms
    assert len(trace.launches) < len(plain.launches)
    assert trace.syncs == []
    frames = [t.frame() for t in (trace, plain)]
    counts = [(frame.kind == "matmul").sum() for frame in frames]
    read = [frame[frame.kind == "matmul"].bytes_read.sum() for frame in frames]
    assert counts[0] == counts[1]
    # The kernels' products read the same weights; two of each layer read the residual too, which they add.
    assert read[0] == read[1] + TINY.num_layers * 2 * 2 * TINY.hidden_size * 4


def test_views_and_allocations() -> None:
    x = torch.zeros(4, 6)
    with StepTrace() as trace:
        kept = [x.t(), x[:2], x.view(-1), x.expand(3, 4, 6)]
    assert (len(trace.launches), trace.allocations, trace.views) == (0, 0, 4)
    with StepTrace() as trace:
        kept += [x + 1, torch.empty(3), torch.tensor([1, 2]), x.t().contiguous()]
        x.add_(1)
        x.contiguous()
    assert trace.allocations == 4
    assert [launch.op.split(".")[1] for launch in trace.launches] == ["add", "clone", "add_"]


def test_traffic_of_a_gather_is_what_it_gathers() -> None:
    table, ids = torch.zeros(1000, 8), torch.tensor([1, 2, 3])
    with StepTrace() as trace:
        table[ids]
        table.index_copy_(0, ids, torch.ones(1, 8).expand(3, 8))
    gather, _, place = trace.launches
    assert (gather.bytes_read, gather.bytes_written) == (3 * 8 * 4 + 3 * 8, 3 * 8 * 4)
    assert place.bytes_written <= 3 * 8 * 4


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: f"{x[0]}",
        lambda x: repr(x),
        lambda x: 3.0 in x,
        lambda x: x.__array__(),
        lambda x: x.__dlpack__(),
    ],
)
def test_every_sync_is_seen_once_with_its_line(ask: object) -> None:
    x = torch.ones(3)
    with StepTrace() as trace:
        ask(x)  # type: ignore[operator]
    assert len(trace.syncs) == 1
    sync = trace.syncs[0]
    assert sync.path == __file__
    assert sync.source.startswith("lambda x: ")


def test_a_step_after_a_trace_is_as_before() -> None:
    with pytest.raises(ZeroDivisionError), StepTrace():
        raise ZeroDivisionError
    assert not torch.is_inference_mode_enabled()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None


def test_a_comparison_on_the_host_is_a_sync() -> None:
    x = torch.ones(3)
    with StepTrace() as trace:
        torch.equal(x, x)
        x.sum().item()
    assert [sync.call for sync in trace.syncs] == ["equal", "item"]


def test_a_compiled_function_is_traced_as_it_was_written() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu()

    x = torch.ones(3, 3)
    compiled(x)
    with StepTrace() as trace:
        compiled(x)
    assert [launch.op for launch in trace.launches] == ["aten.mm.default", "aten.relu.default"]


def test_allocations_are_counted_by_device() -> None:
    with StepTrace() as trace:
        x = torch.ones(3)
        torch.ones(3, device="meta") + 1
        x.add_(1).unsqueeze_(0)
    assert trace.allocations_on == {"cpu": 1, "meta": 2}
    assert trace.allocations == 3
    assert trace.views == 1
