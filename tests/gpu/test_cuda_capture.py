"""What only a device can show: CUDA graphs of the decode step, their memory, streams, pinned staging, other threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nanoserve_lab.bench import inputs as inputs_bench
from nanoserve_lab.captured import check_pool_shared
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.inputs import InputBuffer
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.recorders import Recording
from nanoserve_lab.recorders.allocator import lifetimes_of, pool_bytes
from nanoserve_lab.recorders.cuda import WARMUPS, cuda_graph_recorder, pool_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPTURE: dict[str, Any] = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True}


def build(**switches: Any) -> Engine:
    sizes = {"max_rows": 4, "max_context": 64, "block_size": 4, "width_multiple": 16}
    model = tiny_model(dtype=torch.float64, device="cuda")
    return Engine.build(model, None, EngineConfig(**(sizes | switches)))


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
PARAMS = [SamplingParams(max_tokens=n, temperature=t, seed=1) for n, t in ((30, 0.0), (9, 1.0), (20, 0.7))]


def test_cuda_graphs_say_the_same() -> None:
    engine = build(**CAPTURE)
    said, wanted = engine.generate(PROMPTS, PARAMS), build().generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in said] == [c.token_ids for c in wanted]
    stats = engine.stats()
    assert stats.replays == stats.decode_steps
    assert stats.eager_steps == {}


def test_the_decode_loop_never_waits() -> None:
    engine = build(**CAPTURE)
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_tokens=40))
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats().captures >= 1


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_slow_copy_does_not_read_the_next_steps_values(own_stream: bool) -> None:
    """The staging mirror is guarded while its copy is under way, however long the device takes to get to it."""
    buffer = InputBuffer(4, device="cuda")
    kept = []
    torch.cuda.synchronize()  # the buffer's zeros, which another stream would not wait for
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        for step in range(16):
            torch.cuda._sleep(20_000_000)  # the copy waits behind this
            kept.append(buffer.write([step] * 4).clone())
    torch.cuda.synchronize()
    assert [tensor.tolist() for tensor in kept] == [[step] * 4 for step in range(16)]


def test_another_threads_call_does_not_spoil_a_recording() -> None:
    x = torch.ones(256, 256, device="cuda")
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(1 << 20, device="cuda").fill_(1)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        recording = cuda_graph_recorder(lambda t: (t @ t).relu(), (x,))
    finally:
        stop.set()
        thread.join()
    x.fill_(2)
    recording.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(recording.output, (x @ x).relu())


def test_a_step_that_waits_is_not_recorded_and_the_engine_goes_on() -> None:
    engine = build(**CAPTURE)
    forward = engine.decode_graphs.forward

    def waits(*tensors: torch.Tensor) -> torch.Tensor:
        logits = forward(*tensors)
        return logits if logits.sum().item() > 0 else logits * 1

    engine.decode_graphs.forward = waits
    said = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    assert [c.token_ids for c in said] == [
        c.token_ids for c in build().generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    ]
    assert engine.stats().eager_steps == {"recording failed": engine.stats().decode_steps}


def chain(x: torch.Tensor) -> torch.Tensor:
    """Three results, two alive at a time; no library call, so that what is allocated is what is seen."""
    return ((x * 2 + 1).relu() - 1)[0] * 2


MIB = 1 << 20


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("order", ["largest", "smallest"])
def test_segments_are_those_that_were_predicted(shared: bool, order: str) -> None:
    """Shapes of 24, 6 and 0.25 MiB a result: segments of their own size, of 20 MiB, and of the small pool."""
    inputs = [torch.ones(rows, MIB // 4, device="cuda") for rows in (24, 6)] + [torch.ones(64, 1024, device="cuda")]
    inputs = inputs if order == "largest" else inputs[::-1]
    recordings: list[Recording] = []
    for x in inputs:
        recordings.append(cuda_graph_recorder(chain, (x,), recordings[0].pool if recordings and shared else None))
    pools = [recordings[0].pool] if shared else [recording.pool for recording in recordings]
    measured = [size for pool in pools for size in pool_segments(pool)]
    predicted = pool_bytes([lifetimes_of(chain, (x,)) for x in inputs], shared=shared, order="given")
    assert (sum(measured), len(measured)) == (predicted.reserved, predicted.segments)


def test_nodes_are_counted() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    x = torch.ones(8, 8, device="cuda")
    assert [cuda_graph_recorder(step, (x,)).size for step in (lambda x: x + 1, lambda x: (x + 1).exp() * x)] == [1, 3]


def test_each_shape_says_what_it_cost() -> None:
    """Nodes, seconds and the bytes that it added to the one pool, for each shape of a run."""
    engine, added, before = build(**CAPTURE), {}, 0
    engine.submit([1, 2, 3], SamplingParams(max_tokens=60))
    while engine.has_work:
        engine.step()
        for shape, graph in engine.decode_graphs.graphs.items():
            if shape not in added:
                reserved = sum(pool_segments(graph.pool))
                added[shape], before = reserved - before, reserved
    graphs = engine.decode_graphs.graphs
    assert list(graphs) == [(1, 16), (1, 32), (1, 48), (1, 64)]
    check_pool_shared(graphs.values())
    assert all(0 < graph.seconds < 60 for graph in graphs.values())
    assert len({graph.nodes for graph in graphs.values()}) == 1, "shapes differ in sizes, not in launches"
    first, *later = added.values()
    assert first > 0
    assert later == [0, 0, 0], "so small a step's later shapes fit into the first one's segments"


def test_a_spoilt_recording_gives_the_stream_back() -> None:
    x, stream = torch.ones(4, device="cuda"), torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            cuda_graph_recorder(lambda x: x * x.sum().item(), (x,))
        assert torch.cuda.current_stream() == stream
    recording = cuda_graph_recorder(lambda x: x * 3, (x,))
    recording.replay()
    assert recording.output.tolist() == [3.0] * 4


def test_recordings_use_one_side_stream() -> None:
    x, streams = torch.ones(4, device="cuda"), []

    def step(x: torch.Tensor) -> torch.Tensor:
        streams.append(torch.cuda.current_stream())
        return x + 1

    for _ in range(2):
        cuda_graph_recorder(step, (x,))
    assert len(streams) == 2 * (WARMUPS + 1)
    assert len({stream.cuda_stream for stream in streams}) == 1
    assert streams[0] != torch.cuda.current_stream()


def test_copies_on_their_way_to_the_device_are_not_counted() -> None:
    counted = inputs_bench.count(3, 8, 16)
    assert (counted["fresh_allocations"], counted["buffered_allocations"]) == (3 * 16, 0)
