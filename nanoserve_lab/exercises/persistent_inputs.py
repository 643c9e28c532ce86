"""Lesson 05: a write in place, and the steps whose inputs a replay will read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoserve_lab.instruments import StepTrace

Write = Callable[[Tensor, Tensor, Sequence[int]], Any]
Step = Callable[[Tensor, Sequence[int]], Tensor]

#: What is written, one call after the other, into a buffer of 6 rows.
_WRITES = ([3, 1, 2], [9, 8], [4, 4, 4, 4, 4, 4], [7])
#: What the buffer and its mirror hold at first: not the same, as where a device tensor was written last.
_BUFFER, _MIRROR = 77, 55


def check_write(write_in_place: Write) -> str:
    """Lesson 05: ``write_in_place(buffer, mirror, values)`` returns the window over the ``values`` written.

    ``buffer`` and ``mirror`` are int64 ``[rows]``, the mirror on the host.
    """
    buffer, mirror = torch.full((6,), _BUFFER), torch.full((6,), _MIRROR)
    for values in _WRITES:
        before = buffer.clone()
        try:
            with StepTrace() as trace:
                window = write_in_place(buffer, mirror, list(values))
        except Exception as error:
            return f"{values}: {type(error).__name__}: {error}"
        said = _difference(buffer, before, window, values, trace)
        if said:
            return f"{values}: {said}"
    return f"right in {len(_WRITES)} writes: one address, one copy each, no tensor allocated"


def _difference(buffer: Tensor, before: Tensor, window: Any, values: list[int], trace: StepTrace) -> str | None:
    count = len(values)
    if not isinstance(window, Tensor):
        return f"{window!r} was returned; the window, a tensor, was wanted"
    if window.data_ptr() != buffer.data_ptr():
        return "what was returned does not lie at the buffer's address; a replay reads the buffer"
    if buffer[:count].tolist() != values:
        return f"the buffer holds {buffer[:count].tolist()}; did the values go down to it?"
    if not torch.equal(buffer[count:], before[count:]):
        at = count + int((buffer[count:] != before[count:]).nonzero()[0])
        return (
            f"cell {at} of the buffer was {int(before[at])} and is {int(buffer[at])} now; it was not written in this "
            "call, and the mirror need not know what it holds"
        )
    if window.shape != (count,):
        return f"a window of shape {tuple(window.shape)}; wanted {count} rows, as many as were written"
    if trace.allocations:
        many = "s were" if trace.allocations > 1 else " was"
        return f"address and values are right, but {trace.allocations} tensor{many} allocated on the way"
    if len(trace.launches) > 1:
        return f"{len(trace.launches)} copies to the device; one is enough"
    return None


def _step_a(buffer: Tensor, values: Sequence[int]) -> Tensor:
    buffer = torch.tensor(values)
    return buffer


def _step_b(buffer: Tensor, values: Sequence[int]) -> Tensor:
    buffer.numpy()[: len(values)] = values
    return buffer[: len(values)]


def _step_c(buffer: Tensor, values: Sequence[int]) -> Tensor:
    buffer.data = torch.tensor(values)
    return buffer


def _step_d(buffer: Tensor, values: Sequence[int]) -> Tensor:
    buffer[: len(values)] = torch.tensor(values)
    return buffer[: len(values)]


def four_steps() -> dict[str, Step]:
    """Four ways to bring ``values`` to ``buffer`` ``[rows]``; each returns the tensor that the forward is handed."""
    return {"A": _step_a, "B": _step_b, "C": _step_c, "D": _step_d}


#: Of each step, whether a replay reads its values, and why.
_REASONS = {
    "A": (False, "the values are right, but in another storage: only the name `buffer` was given to it"),
    "B": (True, "the values were written into the buffer's own storage"),
    "C": (False, "it is the same Python object, but it lies elsewhere now; a recording keeps the address"),
    "D": (True, "a tensor is allocated on the way, and the values do arrive in the buffer's own storage"),
}


def check_reaches(reaches: Callable[[Step, Tensor, Sequence[int]], Any]) -> str:
    """Lesson 05: ``reaches(step, buffer, values)`` runs ``step(buffer, values)`` of `four_steps`; True where a replay
    that was recorded over the first ``len(values)`` rows of ``buffer`` reads ``values`` after that."""
    for name, step in four_steps().items():
        wanted, reason = _REASONS[name]
        try:
            said = reaches(step, torch.zeros(4, dtype=torch.int64), [5, 7])
        except Exception as error:
            return f"step {name}: {type(error).__name__}: {error}"
        if not isinstance(said, bool):
            return f"step {name}: {said!r}; True or False was wanted"
        if said != wanted:
            return f"step {name}: {said}, wanted {wanted}; {reason}"
    return "right: B and D reach a replay, A and C do not"
