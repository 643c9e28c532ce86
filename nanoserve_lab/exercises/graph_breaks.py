"""Lesson 01: a breaking step made one graph, and the number of graphs that a list of shapes makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoserve_lab.bench.compile import MeanStep
from nanoserve_lab.compiled import CompiledDecode, GraphBroken, check_single_graph, eager_compiler, find_breaks

#: Lists of shapes, rows x context, as a server might meet them.
SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((2, 4), (2, 5), (2, 6)),
    ((4, 4), (4, 5), (3, 4)),
    ((2, 4), (1, 5), (1, 6), (2, 7)),
    ((1, 1), (1, 2), (2, 1), (2, 2), (3, 9)),
)


def check_grown(grown: Callable[[Tensor, Tensor], Tensor]) -> str:
    """Lesson 01: ``grown(context_lens, stopped)``: one more token for each row that has not stopped, in one graph.

    ``context_lens`` ``[rows]`` int64, ``stopped`` ``[rows]`` bool; a tensor ``[rows]`` int64 is wanted back.
    """
    cases = [_case(*rows) for rows in (((4, True), (5, True), (2, False)), ((3, False), (7, True)), ((9, False),))]
    for lens, stopped in cases:
        said, wanted = grown(lens.clone(), stopped.clone()), lens + ~stopped
        case = f"lengths {lens.tolist()}, stopped {stopped.tolist()}"
        if not isinstance(said, Tensor):
            return f"{case}: {said!r}; a tensor was wanted"
        if said.dtype != torch.int64 or said.shape != lens.shape:
            return f"{case}: {said.dtype} {list(said.shape)}; wanted torch.int64 {list(lens.shape)}"
        if not torch.equal(said, wanted):
            return f"{case}: {said.tolist()}, wanted {wanted.tolist()}"
    breaks = find_breaks(grown, *(tensor.clone() for tensor in cases[0]))
    if breaks:
        first = breaks[0]
        return f"the results are right, and the graph breaks in line {first.line}, `{first.source}`"
    decode = CompiledDecode(grown, eager_compiler)
    try:
        for lens, stopped in cases:
            decode(lens.clone(), stopped.clone())
        check_single_graph(decode)
    except GraphBroken:
        return f"the results are right, and 3, 2 and 1 rows make {decode.graphs} graphs: something depends on a size"
    return "right: no break, and one graph for several rows and one for a single row"


def check_graphs(predict: Callable[[Sequence[tuple[int, int]]], int]) -> str:
    """Lesson 01: ``predict(shapes)``, shapes ``(rows, context)`` in the order they come, against the graphs that the
    lesson's step makes of them with dynamic sizes."""
    for shapes in SHAPES:
        said, made = predict(shapes), _graphs(shapes)
        if not isinstance(said, int):
            return f"{list(shapes)}: {said!r}; a whole number was wanted"
        if said == made:
            continue
        told = f"{list(shapes)}: {said}, counted {made}"
        if said == len(set(shapes)):
            return f"{told}. That is a graph for each shape, as with fixed sizes"
        if said == 1:
            return f"{told}. A size of 1 has a graph of its own"
        if said == len({rows == 1 for rows, _ in shapes}):
            return f"{told}. The context can be 1 as well"
        return f"{told}. Ask of each shape which of its two sizes are 1"
    return f"right for {len(SHAPES)} lists of shapes"


def _case(*rows: tuple[int, bool]) -> tuple[Tensor, Tensor]:
    lens, stopped = zip(*rows, strict=True)
    return torch.tensor(lens), torch.tensor(stopped)


def _graphs(shapes: Sequence[tuple[int, int]]) -> int:
    step = MeanStep()
    decode = CompiledDecode(step.forward, eager_compiler)
    for rows, context in shapes:
        decode(*step.args(rows, context))
    return decode.graphs
