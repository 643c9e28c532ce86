"""CUDA graphs through PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from nanoserve_lab.recorders.recording import Recording

#: Runs before the recording, on the same side stream: libraries make their workspaces and plans at first use.
WARMUPS = 2


def cuda_graph_recorder(step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording:
    """``step(*args)`` as a CUDA graph; ``pool`` is the `Recording.pool` of an earlier one, whose memory it shares.

    The step warms up and is recorded on one side stream of the device, always the same: a pool's free blocks belong to
    a stream, so a recording on another one could not take them. An unsafe call of another thread does not spoil the
    recording (capture error mode ``thread_local``). `Recording.graph_nodes` counts the graph's nodes. Raises
    `RuntimeError` (from CUDA) for a step that cannot be recorded, such as one that waits for the device; the current
    stream is then the one that it was.
    """
    current, side = torch.cuda.current_stream(), _side_stream(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    side.wait_stream(current)
    # The outer stream context is what brings the current stream back where the end of a spoilt capture raises.
    with torch.inference_mode(), torch.cuda.stream(side):
        for _ in range(WARMUPS):
            step(*args)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                output = step(*args)
        except BaseException:
            _side_stream.cache_clear()  # what state a failed capture leaves a stream in is not documented
            raise
        graph.instantiate()
    current.wait_stream(side)
    return Recording(graph.replay, output, graph.pool(), graph_nodes=_count_nodes(graph))


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels, copies and fills of a recorded graph; 0 where the bindings that count them are not at hand."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return 0
    error, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), numNodes=0)
    return int(count) if error == runtime.cudaError_t.cudaSuccess else 0


def pool_segments(pool: Any) -> list[int]:
    """Bytes of each segment that the pool of a recording (`Recording.pool`) has reserved, largest first.

    The counterpart of what `allocator.pool_bytes` predicts: their sum is its ``reserved``.
    """
    segments = torch.cuda.memory_snapshot()
    mine = [segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)]
    return sorted(mine, reverse=True)
