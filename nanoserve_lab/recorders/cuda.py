"""CUDA graphs through PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nanoserve_lab.recorders.recording import Recording

#: Runs before the recording, on the same side stream: libraries make their workspaces and plans at first use.
WARMUPS = 2


def cuda_graph_recorder(step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording:
    """``step(*args)`` as a CUDA graph; ``pool`` is the `Recording.pool` of an earlier one, whose memory it shares.

    The step warms up and is recorded on one side stream, so that memory handed out on the way belongs to that stream.
    An unsafe call of another thread does not spoil the recording (capture error mode ``thread_local``). Raises
    `RuntimeError` (from CUDA) for a step that cannot be recorded, such as one that waits for the device.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.inference_mode(), torch.cuda.stream(side):
        for _ in range(WARMUPS):
            step(*args)
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.inference_mode(),
        torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
    ):
        output = step(*args)
    return Recording(graph.replay, output, graph.pool())
