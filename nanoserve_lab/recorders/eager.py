"""A recorder that records nothing: it keeps the argument objects and calls the function again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from nanoserve_lab.recorders.recording import Recording


def eager_recorder(step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording:
    """Call ``step(*args)`` once, and again on every replay; its tensors are copied into buffers that stay.

    What it has of a recorded graph: the exact argument objects, no arguments, one output that the next replay
    overwrites. What it has not: Python runs again, so an attribute, an integer or an address that changed since is
    noticed here and would not be by a graph. ``pool`` is handed on as it is.

    A replay raises `RuntimeError` where the step returns another structure or other shapes than it did first, and
    whatever the step itself raises.
    """
    with torch.inference_mode():
        first, structure = tree_flatten(step(*args))
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in first]

    def replay() -> None:
        with torch.inference_mode():
            leaves, now = tree_flatten(step(*args))
            if now != structure:
                raise RuntimeError(f"the step returned {now}, and {structure} when it was first run")
            for buffer, leaf in zip(fixed, leaves, strict=True):
                if isinstance(buffer, Tensor):
                    if leaf.shape != buffer.shape:
                        raise RuntimeError(
                            f"the step returned {list(leaf.shape)}, and {list(buffer.shape)} when it was first run"
                        )
                    buffer.copy_(leaf)

    return Recording(replay, tree_unflatten(fixed, structure), pool)
