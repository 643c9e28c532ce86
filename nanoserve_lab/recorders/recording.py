"""One recorded step, and what a recorder is.

A recorder is ``recorder(step, args, pool=None) -> Recording``: it runs ``step(*args)`` and hands back a replay that
takes no arguments. ``pool`` is the `Recording.pool` of an earlier recording of the same recorder, whose memory this one
may share; the two are then never replayed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pandas as pd

from nanoserve_lab.recorders import reading
from nanoserve_lab.recorders.lifetimes import Lifetimes
from nanoserve_lab.recorders.node import External, Node
from nanoserve_lab.unsound import Unsound


class RecordingRefused(Unsound):
    """The step did something that a replay could not do again.

    The message names the operation, the line that asked for it with its text, and what to write instead. ``facts``:
    ``operation``, ``line`` and ``source`` again, the ``path`` of the file, and ``addresses`` where it is about tensors.
    """

    lesson: ClassVar[str] = "06_graph_capture"


@dataclass
class Recording:
    """A step that can be run again without its Python.

    ``replay()`` takes no arguments and returns nothing; it writes ``output``, which has the structure that the step
    returned, and which the next replay overwrites. ``pool`` is handed to the next recording that is to share memory.
    ``nodes`` are the recorded operations in order, empty where a recorder does not know them; ``external`` are the
    storages that replays read and write but did not make; ``memory`` is what `lifetimes` returns.
    """

    replay: Callable[[], None]
    output: Any
    pool: Any
    nodes: tuple[Node, ...] = ()
    external: tuple[External, ...] = ()
    memory: Lifetimes | None = None
    graph_nodes: int = 0

    @property
    def size(self) -> int:
        """Operations in ``nodes``, or on CUDA ``graph_nodes``, the kernels, copies and fills of the graph; 0 where
        nobody counted."""
        return len(self.nodes) or self.graph_nodes

    def launches(self, repeats: int = 0) -> pd.DataFrame:
        """One row per operation: ``order, op, kind, module, shapes, dtype, bytes_read, bytes_written, seconds, line,
        source``.

        ``shapes`` are those of the tensors that go in, ``dtype`` their dtypes, each once, and behind an arrow those
        that come out where they are not the same (``float32 -> float32 int64`` of a maximum with its index).
        ``seconds`` is the median of ``repeats`` timed replays on the host, NaN where ``repeats`` is 0. These are
        replays like any other: they write the output, and whatever else the step writes.
        """
        return reading.launches(self.nodes, repeats)

    def lifetimes(self) -> Lifetimes:
        """The storages that the step made and dropped while it was recorded, for `allocator.pool_bytes`.

        The same as `lifetimes.lifetimes_of` says of the step. What a recording without an arena keeps for its replays
        does not count: a CUDA graph would give it back to its pool. Raises `ValueError` where the recorder does not
        know.
        """
        if self.memory is None:
            raise ValueError("lifetimes: this recorder does not see what its step allocates; the tape does")
        return self.memory

    def externals(self) -> pd.DataFrame:
        """One row per external storage: ``role, shape, dtype, bytes, written, kept_by``.

        ``kept_by`` names what keeps the storage alive beside this recording at the time of the call (module path,
        attribute, global name; else "a local variable"), and is empty where nothing does: then its owner has moved on,
        and replays read what is nobody's any more.
        """
        return reading.externals(self.nodes, self.external)

    def summary(self) -> str:
        """A few lines of text: operations by kind, bytes, external storages."""
        return reading.summary(self.nodes, self.external)


class Recorder(Protocol):
    """``recorder(step, args, pool=None)``; raises `RecordingRefused` for a step that cannot be replayed."""

    def __call__(self, step: Callable[..., Any], args: tuple[Any, ...], pool: Any = None) -> Recording: ...
