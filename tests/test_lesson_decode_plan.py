"""What lesson 02 leans on: the count of recompiles, the list of guards, its checkers, its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from figure_frames import recompiles

from nanoserve_lab.bench import recompiles as bench
from nanoserve_lab.bench.provenance import PROVENANCE, read_csv, repository_root
from nanoserve_lab.bench.timing import BenchRefused
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.exercises import check_gather, check_is_stale, check_write_slot
from nanoserve_lab.exercises.decode_plan import four_plans, plan_table
from nanoserve_lab.figures import FigureError, graphs_by_addressing, plan_between, plans
from nanoserve_lab.plan import DecodePlan, PlanUnsound, check_plan_current

# --- the bench ------------------------------------------------------------------------------------------------------


def test_static_shapes_make_a_graph_a_context_and_dynamic_ones_a_single_one() -> None:
    static = bench.graphs_while_growing("plan, static", 3)
    dynamic = bench.graphs_while_growing("plan, dynamic", 5, layers=2)
    assert static.graphs.tolist() == [1, 2, 3]
    assert static.recompiles.tolist() == [0, 1, 2]
    assert static.context.tolist() == [4, 5, 6]
    assert set(dynamic.graphs) == {1}
    assert set(dynamic.recompiles) == {0}


def test_block_tables_make_a_graph_a_block() -> None:
    # Block size 4, rows of 3 and 2 tokens: new blocks with steps 2 and 3, and again with steps 6 and 7.
    frame = bench.graphs_while_growing("block tables", 6, block_size=4)
    made = frame.graphs.diff().fillna(frame.graphs.iloc[0])
    assert (made[[1, 2, 5]] == 1).all()
    assert made[4] == 0, "no block was taken, and the lengths are open by now"
    assert frame.recompiles.tolist() == [graphs - 1 for graphs in frame.graphs]


def test_more_graphs_than_the_compilers_limit_are_counted() -> None:
    limit = torch._dynamo.config.recompile_limit
    assert limit == plans.COMPILER_LIMIT, "the figure marks it"
    frame = bench.graphs_while_growing("plan, static", limit + 2)
    assert frame.graphs.iloc[-1] == limit + 2
    assert torch._dynamo.config.recompile_limit == limit, "and it is put back"


def test_the_lookup_forward_says_what_the_plan_says() -> None:
    cache = bench.two_row_cache(bench.TINY, block_size=2, room=8)
    seen: list[tuple[Any, ...]] = []

    def note(*args: Any) -> torch.Tensor:
        seen.append(args)
        return torch.zeros(2, 1)

    lookup = bench.LookupForward(note, block_size=2)  # type: ignore[arg-type]
    planner = bench.Planner(cache)
    input_ids = torch.tensor([[1], [2]])
    for _ in range(5):
        cache.grow()
        lookup.follow(cache)
        lookup(input_ids)
        wanted = input_ids, *planner.plan().tensors
        assert all(torch.equal(a, b) for a, b in zip(seen[-1], wanted, strict=True))
        assert len(seen[-1]) == 5


def test_the_bench_writes_what_it_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = bench.run(tmp_path, contexts=2)
    frame = read_csv(path)
    assert path.name == "recompiles.csv"
    assert frame.groupby("arm", sort=False).graphs.last().to_dict() == {
        "block tables": 2,
        "plan, static": 2,
        "plan, dynamic": 1,
    }
    assert set(PROVENANCE) <= set(frame.columns)
    assert set(frame.command) == {"nanoserve-lab bench recompiles --contexts 2"}
    assert "plan, static" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": 0}, "--contexts: wanted 1 to 512, got 0"),
        ({"contexts": 513}, "--contexts: wanted 1 to 512, got 513"),
        ({"block_size": 0}, "--block-size: wanted 1 to 256, got 0"),
    ],
)
def test_options_that_cannot_be_counted(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(BenchRefused, match=message):
        bench.run(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="arm: wanted one of block tables, plan, static, plan, dynamic, got 'eager'"):
        bench.graphs_while_growing("eager", 1)


def test_what_was_recorded() -> None:
    root = repository_root()
    assert root is not None
    frame = read_csv(root / "data" / "recompiles.csv")
    graphs = {arm: part.graphs.tolist() for arm, part in frame.groupby("arm")}
    assert graphs["plan, static"] == list(range(1, 257))
    assert graphs["plan, dynamic"] == [1] * 256
    # Two rows of up to 259 tokens take 32 more blocks of 16, and the lengths become open once.
    assert graphs["block tables"][-1] == 1 + 32 + 1
    assert bench.graphs_while_growing("block tables", 3).graphs.tolist() == graphs["block tables"][:3]


# --- guards ---------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self) -> None:
        self.blocks, self.length = [3, 5], 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.blocks[self.length - 1]] * 2


def test_guards_on_python_state_are_named() -> None:
    frame = bench.guards_of(Holder(), torch.arange(8.0)).set_index("on")
    assert frame.kind["self.length"] == "a number"
    assert frame.value["self.length"] == "2"
    assert frame.kind["self.blocks"] == "a list's length"
    assert frame.value["self.blocks[1]"] == "5"
    assert frame.kind["x"] == "a tensor's shape"
    assert frame.value["x"] == "8"


FACTOR = 2


def test_guards_of_a_function_of_tensors_are_on_shapes() -> None:
    def pick(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x[at] * FACTOR  # guarded too, and no argument

    frame = bench.guards_of(pick, torch.zeros(4, 2), torch.tensor([1]))
    assert frame.to_dict("records") == [
        {"on": "x", "kind": "a tensor's shape", "value": "4x2"},
        {"on": "at", "kind": "a tensor's shape", "value": "1"},
    ]


# --- exercises ------------------------------------------------------------------------------------------------------


def slot(table: list[int], length: int, size: int) -> int:
    return table[(length - 1) // size] * size + (length - 1) % size


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (slot, "right for 8 rows"),
        (lambda table, length, size: length - 1, "That is the token's position"),
        (lambda table, length, size: table[(length - 1) // size], "That is the number of the block"),
        (lambda table, length, size: table[(length - 1) // size] * size, "That is the block's first slot"),
        (lambda table, length, size: table[length // size] * size + length % size, "no such block"),
        (
            lambda table, length, size: table[(length - 1) // size] * size + length % size,
            "4 tokens, block size 2: slot 4, wanted 5. The block is right",
        ),
        (lambda table, length, size: 77, "Position, then block of the position"),
        (lambda table, length, size: None, "None; a whole number was wanted"),
    ],
)
def test_the_slot_checker_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_write_slot(answer)


def rectangle(tables: list[list[int]], lengths: list[int], size: int, filler: int = 0) -> list[list[int]]:
    return [
        [slot(table, i + 1, size) if i < length else filler for i in range(max(lengths))]
        for table, length in zip(tables, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (rectangle, "right for 4 batches"),
        (lambda *args: torch.tensor(rectangle(*args)), "right for 4 batches"),
        (lambda *args: rectangle(*args, filler=-1), "row 1 ends after 3 tokens, and column 3 reads slot -1"),
        (lambda *args: [row[:-1] for row in rectangle(*args)], "rows of 3 and 3 columns, wanted 2 rows of 4"),
        (lambda *args: rectangle(*args)[:1], "rows of 4 columns, wanted 2 rows of 4"),
        (lambda *args: rectangle(*args)[::-1], "row 0 reads token 0 from slot 6, wanted 2"),
        (lambda *args: None, "None; a rectangle of rows was wanted"),
        (lambda *args: [1, 2], "a rectangle of rows was wanted"),
    ],
)
def test_the_gather_checker_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_gather(answer)


def lengths_alone(plan: DecodePlan, cache: PagedCache) -> bool:
    return plan.context_list != cache.lengths[: cache.rows].tolist()


def rows_alone(plan: DecodePlan, cache: PagedCache) -> bool:
    return plan.live != cache.rows


def by_the_gate(plan: DecodePlan, cache: PagedCache) -> bool:
    try:
        check_plan_current(plan, cache)
    except PlanUnsound:
        return True
    return False


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (by_the_gate, "right: D alone is current"),
        (rows_alone, "plan A: called current; it is a step old"),
        (lengths_alone, "plan C: called current; its lengths are right, but row 1 belongs to another sequence"),
        (lambda plan, cache: plan.live == 2 and lengths_alone(plan, cache), "plan B: called current; three rows ran"),
        (lambda plan, cache: True, "plan D: called stale"),
        (lambda plan, cache: None, "plan A: None; True or False was wanted"),
    ],
)
def test_the_stale_checker_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_is_stale(answer)


def test_the_four_plans_as_a_table() -> None:
    cache, four = four_plans()
    table = plan_table(four)
    assert table.index.tolist() == ["A", "B", "C", "D"]
    assert table.context_lens["C"] == table.context_lens["D"] == cache.lengths[:2].tolist() == [5, 4]
    assert table.write_slots["C"] != table.write_slots["D"]


def test_frozen_is_which_tensors_a_plan_has() -> None:
    _, plan = bench.two_row_plan()
    with pytest.raises(dataclasses.FrozenInstanceError, match="live"):
        plan.live = 1  # type: ignore[misc]


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_chart_says_where_each_arm_ends() -> None:
    alt = graphs_by_addressing(recompiles()).alt
    assert "block tables in the forward: 2; a plan, every shape its own graph: 4; a plan, sizes may change: 1" in alt
    assert "from 4 to 7 tokens" in alt
    (axes,) = graphs_by_addressing(recompiles()).axes
    assert axes.get_yscale() == "log"
    assert max(line.get_ydata()[-1] for line in axes.lines[1:]) == 4


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (recompiles().drop(columns="arm"), "graphs_by_addressing: no column arm"),
        (recompiles().replace({"arm": {"plan, static": "eager"}}), "unknown arm 'eager'; wanted block tables, plan"),
        (recompiles().assign(graphs=lambda frame: 5 - frame.graphs), "graphs are counted from 1 and never fall"),
        (pd.concat([recompiles(), recompiles()]), "one count a context"),
    ],
)
def test_a_count_that_cannot_be(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(FigureError, match=message):
        graphs_by_addressing(frame)


def test_the_diagram_shows_the_plans_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Row 1 owns blocks 3 and 4 and has 3 tokens: position 2, written to slot 8, reading slots 6, 7, 8." in (
        plan_between().alt
    )
    shown = [text.get_text() for text in plan_between().axes[0].texts]
    assert [shown.count(number) for number in ("5", "8", "9")] == [3, 3, 1]
    assert shown.count("written") == 2
    cache, plan = bench.two_row_plan()
    other = dataclasses.replace(plan, write_slots=torch.tensor([9, 8]))
    monkeypatch.setattr(plans, "two_row_plan", lambda: (cache, other))
    assert "written to slot 9" in plan_between().alt
