"""Lesson 06: a recorder of the reader's own, and a test that may not compare a buffer with itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoserve_lab.recorders import tape_recorder

Answer = Callable[[Sequence[float]], Tensor]
Agrees = Callable[[Answer, Answer, Sequence[Sequence[float]]], Any]
Record = Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Any]

_INPUTS = ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.0, 0.0, 7.0])

#: Of each recorded step, whether its replays do what the step does, and why.
_STEPS = {
    "a right recording": (True, "its replays compute what the step computes"),
    "a recording over a clone of the input": (
        False,
        "its replays go on reading the clone. Compare what a replay left with something that lies elsewhere",
    ),
    "a replay that does nothing": (
        False,
        "the output held the right answer already. Let the replay come first, or fill the output in between",
    ),
}


def check_agrees(agrees: Agrees) -> str:
    """Lesson 06: ``agrees(replayed, eager, inputs)`` is True where a recorded step does what the step does.

    ``replayed(values)`` writes ``values`` into the step's input and replays, ``eager(values)`` writes them and calls
    the step. Both return the step's output ``[3]``, one buffer. ``inputs`` is a list of such values.
    """
    for name, (wanted, reason) in _STEPS.items():
        try:
            said = agrees(*_pair(name), [list(values) for values in _INPUTS])
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
        if not isinstance(said, bool):
            return f"{name}: {said!r}; True or False was wanted"
        if said and not wanted:
            return f"{name}: True, wanted False; {reason}"
        if wanted and not said:
            return (
                f"{name}: False, wanted True; {reason}. Are answers compared after a later step has written the output?"
            )
    return "right: one recording agrees with its step, two do not"


def _pair(name: str) -> tuple[Answer, Answer]:
    x, output = torch.zeros(3), torch.zeros(3)

    def step(tensor: Tensor) -> Tensor:
        return output.copy_(tensor * 2 + 1)

    recording = tape_recorder(step, (x.clone() if "clone" in name else x,))
    output.zero_()

    def replayed(values: Sequence[float]) -> Tensor:
        x.numpy()[:] = values
        if "nothing" not in name:
            recording.replay()
        return output

    def eager(values: Sequence[float]) -> Tensor:
        x.numpy()[:] = values
        return step(x)

    return replayed, eager


def check_record(record: Record) -> str:
    """Lesson 06: ``record(step, args)`` returns ``(replay, output)``; ``replay()`` does what ``step(*args)`` did, with
    what lies in ``args`` by then, without the step's Python, and writes ``output``."""
    x, store, ran = torch.tensor([1.0, 2.0]), torch.zeros(4), []

    def step(tensor: Tensor) -> Tensor:
        ran.append(tensor)
        store[1:3] = tensor * 10  # in place, through a view
        return store.view(2, 2).sum(1) + tensor

    try:
        made = record(step, (x,))
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], Tensor)):
            return f"{made!r} was returned; wanted (replay, output), a function and a tensor"
        replay, output = made
        calls = len(ran)
        for values in ([3.0, 4.0], [5.0, 6.0]):
            x.copy_(torch.tensor(values))
            replay()
            said = _difference(output, store, values, len(ran) - calls)
            if said:
                return f"replay with {[round(v) for v in values]} in the input: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right in 2 replays: values read at their address, writes in place, one output, no Python"


def _difference(output: Tensor, store: Tensor, values: list[float], calls: int) -> str | None:
    first, second = values
    if calls:
        return "the step's Python ran again. A recording keeps operations and tensors, not the function"
    if store.tolist() != [0, 10 * first, 10 * second, 0]:
        return (
            f"the step writes {[10 * round(v) for v in values]} into a tensor of its own, which holds "
            f"{[round(v) for v in store[1:3].tolist()]}; an operation that writes in place has to run again, too"
        )
    wanted = [11 * first, 11 * second]
    if output.tolist() != wanted:
        return (
            f"the output holds {[round(v) for v in output.tolist()]}, wanted {[round(v) for v in wanted]}; does each "
            "operation's result get into the tensor that the next one reads?"
        )
    return None
