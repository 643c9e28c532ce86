"""What only a device can show: CUDA graphs of the decode step, their memory, streams, pinned staging, other threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nanoserve_lab.captured import cuda_graph_recorder
from nanoserve_lab.engine import Engine, EngineConfig, SamplingParams
from nanoserve_lab.inputs import InputBuffer
from nanoserve_lab.model.tiny import tiny_model

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


def test_a_slow_copy_does_not_read_the_next_steps_values() -> None:
    """The staging mirror is guarded while its copy is under way, however long the device takes to get to it."""
    buffer = InputBuffer(4, device="cuda")
    kept = []
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


def test_recordings_of_one_list_share_segments() -> None:
    sizes = [512, 256, 128]
    inputs = [torch.ones(rows, 1024, device="cuda") for rows in sizes]
    torch.cuda.synchronize()

    def reserved(shared: bool) -> int:
        torch.cuda.empty_cache()
        before, pool, kept = torch.cuda.memory_reserved(), None, []
        for x in inputs:
            kept.append(
                cuda_graph_recorder(lambda t: (t * 2).sum(0, keepdim=True).expand(4, -1).contiguous(), (x,), pool)
            )
            pool = kept[-1].pool if shared else None
        return torch.cuda.memory_reserved() - before

    assert reserved(shared=True) <= reserved(shared=False)
