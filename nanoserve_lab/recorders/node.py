"""What a recording consists of: operations bound to storages, and the storages that it did not make itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanoserve_lab.recorders.operations import Site, tensors_of

#: What a replay does for one operation: ``function(*args, **kwargs)``.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Node:
    """One recorded operation.

    ``operation`` is the ``OpOverload`` that the step called, ``args`` and ``kwargs`` what it was called with: tensors
    of the recording's own over the storages of that time, and Python values as they were. ``outputs`` are the tensors
    that came into being, in fixed storages; empty for an operation that only writes into its arguments. A replay leaves
    one that nothing reads as it is. ``call`` is what a replay runs, ``module`` the path of the ``nn.Module`` that was
    running, ``site`` the user's line.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    call: Call
    module: str
    site: Site

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return tensors_of((self.args, self.kwargs))


@dataclass(frozen=True)
class External:
    """A storage that existed before the recording, which replays read or write at its address.

    ``tensor`` is the recording's own view of it, as the first operation saw it; ``role`` is ``"args[i]"`` for an
    argument's storage and ``"captured"`` for any other; ``written`` says whether some operation writes into it.
    """

    tensor: Tensor
    role: str
    written: bool
