"""What lesson 07 leans on: the bench of pools, its checkers, its figures, its widget, and the ledger's row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from figure_frames import by_multiple, launch_costs, priced

from nanoserve_lab import captured
from nanoserve_lab.bench import pool
from nanoserve_lab.bench.capture import pool_table
from nanoserve_lab.bench.pool import LOGS, OURS, WAYS, Heads, read_lifetimes, terms
from nanoserve_lab.bench.provenance import PROVENANCE, read_csv
from nanoserve_lab.bench.timing import BenchRefused
from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.cache.attention import paged_attention_batched_reference
from nanoserve_lab.exercises import check_order, check_worth
from nanoserve_lab.figures import FigureError, breakeven_curve, pool_by_multiple, pool_priced
from nanoserve_lab.ledger import ledger
from nanoserve_lab.model.tiny import TINY
from nanoserve_lab.recorders import Arena
from nanoserve_lab.recorders.allocator import Allocate, Free, Lifetimes, lifetimes_of, pool_bytes

DATA = Path(__file__).parents[1] / "data"
CPU, MIB = torch.device("cpu"), 1 << 20


def test_the_table_is_that_of_the_log() -> None:
    table = pool_table()
    assert table.shapes.tolist() == [576, 144, 36, 9]
    assert (table.shared_bytes / 1e6).round(1).tolist() == [268.4] * 4
    assert (table.private_bytes / 1e6).round(1).tolist() == [17_414.2, 4_554.5, 1_339.6, 535.8]
    assert table.ratio.round(1).tolist() == [64.9, 17.0, 5.0, 2.0]
    for line in table.itertuples():
        # A geometric axis of 9 and an even one: 1 + 2 + .. + 256 over 256, and (n + 1) / 2.
        assert line.ratio == pytest.approx(511 / 256 * (8192 // int(str(line.width_multiple)) + 1) / 2)


def test_the_pools_of_the_default_models_read() -> None:
    shapes = BucketSet(256, 8192, 2048).shapes()
    assert {way: round(size / 1e9, 1) for way, size in pool.simulated(shapes, OURS).items()} == dict(
        zip(WAYS, (6.5, 16.8, 32.2), strict=True)
    )
    assert pool.computed(shapes, OURS) == dict(zip(WAYS, (75_497_472, 75_497_472, 376_750_080), strict=True))


def test_one_read_term_by_term() -> None:
    gathered, scores = 256 * 8192 * 3 * 64 * 4, 256 * 9 * 8192 * 4
    read = read_lifetimes((256, 8192), OURS)
    assert terms(read) == {
        "K gathered": gathered,
        "V gathered": gathered,
        "Q scaled": 256 * 9 * 64 * 4,
        "scores": scores,
        "weights": scores,
        "V laid out": gathered,
        "result": 256 * 9 * 64 * 4,
    }
    assert sum(terms(read).values()) == read.peak_bytes
    # One row has its K and V in order already; the peak is earlier then.
    assert "V laid out" not in terms(read_lifetimes((1, 128), OURS))
    assert "masked scores" in terms(read_lifetimes((1, 128), OURS))
    # A layout made before the first product is K's; an operation of another read keeps its name.
    early = Lifetimes((Allocate(0, 64, "aten.clone.default"), Allocate(1, 8, "aten.bmm.default"), Free(0)))
    assert terms(early) == {"K laid out": 64, "scores": 8}
    assert terms(Lifetimes((Allocate(0, 8, "aten.exp.default"),))) == {"exp": 8}


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (4, 40)])
@pytest.mark.parametrize("heads", [Heads(4, 2, 4), Heads(2, 1, 8), Heads(4, 2, 4, "bfloat16")])
def test_meta_lives_as_real(shape: tuple[int, int], heads: Heads) -> None:
    real = lifetimes_of(paged_attention_batched_reference, pool.read_args(shape, heads, CPU))
    assert real == read_lifetimes(shape, heads)
    known = {"K gathered", "V gathered", "K laid out", "V laid out", "Q scaled", "scores", "masked scores", "weights",
             "result"}  # fmt: skip
    assert set(terms(real)) <= known


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted a multiple of 3 K/V heads, got 8"):
        Heads(8, 3)


def test_the_bill_adds_up() -> None:
    frame = pool.priced(8, 256, 64, LOGS, CPU).set_index(["where", "how", "term"])["bytes"]
    one, many = frame["the largest shape"], frame["the list"]
    shapes = BucketSet(8, 256, 64).shapes()
    assert one["computed"].to_dict() == {"scores": 8 * 32 * 256 * 4}
    assert one["simulated"].sum() == pool_bytes([read_lifetimes((8, 256), LOGS)]).reserved
    assert one["simulated"]["holes and rounding"] >= 0
    assert many["computed"].to_dict() == {way: float(size) for way, size in pool.computed(shapes, LOGS).items()}
    assert many["simulated"].to_dict() == {way: float(size) for way, size in pool.simulated(shapes, LOGS).items()}
    assert frame[:, "measured"].isna().all()


def test_outputs_add_up_unless_they_share_a_buffer() -> None:
    shapes = [(4, 16), (2, 16), (1, 16)]
    own, one = (pool_bytes(pool.decode_lifetimes(shapes, TINY, one_buffer)) for one_buffer in (False, True))
    # Each is rounded up to 512 bytes.
    assert own.allocated == sum(-(-rows * TINY.vocab_size * 4 // 512) * 512 for rows, _ in shapes)
    assert one.allocated == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_measured_pool_is_near_the_simulated_one() -> None:
    frame = pool.priced(64, 2048, 512, OURS, torch.device("cuda")).set_index(["where", "how", "term"])["bytes"]
    many = frame["the list"]
    assert all(0.8 < many["measured"][way] / many["simulated"][way] < 1.6 for way in WAYS)
    assert frame["the largest shape"]["measured"].sum() > frame["the largest shape"]["computed"].sum()


def test_a_pool_is_itself() -> None:
    """Two recordings with a pool each, both still empty, are not "one pool"."""
    assert Arena() != Arena()


def test_the_pool_bench_writes(tmp_path: Path) -> None:
    lists, bill = pool.run(tmp_path, multiples="64,256", heads=4, kv_heads=2, rows=8, context=256)
    frame = read_csv(lists)
    assert (lists.name, bill.name) == ("pool-simulated.csv", "pool-terms.csv")
    assert set(PROVENANCE) <= set(frame.columns)
    command = "nanoserve-lab bench pool --multiples 64,256 --heads 4 --kv-heads 2 --rows 8 --context 256"
    assert set(frame.command) == set(read_csv(bill).command) == {command}
    assert frame[["shapes", "way"]].to_numpy().tolist() == [[n, way] for n in (16, 4) for way in WAYS]
    assert frame[["max_rows", "max_context", "heads"]].drop_duplicates().to_numpy().tolist() == [[8, 256, 4]]
    assert frame.computed_bytes.tolist()[:3] == [32_768, 32_768, 153_600]
    assert set(read_csv(bill)["rows"]) == {8}
    assert pool_priced(read_csv(bill)).alt
    assert pool_by_multiple(frame).alt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiples": "0"}, "--multiples: wanted positive integers"),
        ({"heads": 0}, "--heads: wanted 1 or more, got 0"),
        ({"kv_heads": 3}, "--heads: wanted a multiple of 3 K/V heads, got 32"),
        ({"rows": 0}, "--rows: wanted 1 or more"),
        ({"context": 0}, "--context: wanted 1 or more"),
    ],
)
def test_the_pool_bench_refuses_before_it_runs(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchRefused, match=message):
        pool.run(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_gpus_bill_is_shown_where_there_is_no_gpu(tmp_path: Path) -> None:
    here = pool.bill_to_show(tmp_path)
    if not torch.cuda.is_available():
        assert here[here["how"] == "measured"]["bytes"].isna().all()
        for name, frame in (("a", priced().assign(date="2026-02-03")), ("b", priced()), ("c", here)):
            (tmp_path / "machines" / name).mkdir(parents=True)
            frame.to_csv(tmp_path / "machines" / name / "pool-terms.csv", index=False)
        shown = pool.bill_to_show(tmp_path)
        assert set(shown["date"]) == {"2026-02-03"}
        assert set(shown["device"]) == set(priced()["device"])


def largest_first(sizes: list[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda place: -sizes[place])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (largest_first, "right for 6 lists"),
        (lambda sizes: range(len(sizes)), "[4, 12] MiB in the order [4, 12]: 20 MiB are reserved, 12 would do"),
        (lambda sizes: sorted(sizes), "[4, 12] MiB: ValueError: order: wanted a permutation of the 2 places"),
        (lambda sizes: largest_first(sizes)[::-1], "in the order [4, 12]: 20 MiB"),
        # With one block each it is enough to begin with the largest.
        (lambda sizes: [sizes.index(max(sizes)), *(i for i, s in enumerate(sizes) if s < max(sizes))], "right for 6"),
        (lambda: [], "TypeError"),
    ],
)
def test_the_checker_of_an_order_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_order(answer)


def has_paid(counts: dict[Any, int], record_s: float, saving_s: float) -> set[Any]:
    return {shape for shape, count in counts.items() if count * saving_s >= record_s}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (has_paid, "right for 7 runs"),
        (lambda counts, record_s, saving_s: set(counts), "(2, 16) was met 3 times and pays after 50"),
        (lambda counts, record_s, saving_s: [], "(1, 16) was met 100 times, has paid after 50, is left out"),
        (
            lambda c, r, s: {k for k, n in c.items() if n * s > r},
            "(1, 16) was met 50 times, has paid after 50, is left",
        ),
        (lambda c, r, s: {k for k, n in c.items() if s == 0 or n * s >= r}, "1,000,000 times and pays after inf"),
        (lambda c, r, s: {k for k, n in c.items() if n >= r / s}, "ZeroDivisionError"),
        (lambda c, r, s: {(9, 9)}, "(9, 9) never came up"),
    ],
)
def test_the_checker_of_what_has_paid_says_what_is_off(answer: Callable[..., Any], told: str) -> None:
    assert told in check_worth(answer)


def test_the_priced_figure_shows_the_bill() -> None:
    picture, frame = pool_priced(priced()), priced()
    bars, ways = picture.axes
    simulated = frame[(frame["where"] == "the largest shape") & (frame["how"] == "simulated")]["bytes"]
    widths = [patch.get_width() for patch in bars.patches]  # type: ignore[attr-defined]
    assert widths[1:-1] == simulated.tolist()
    assert widths[0] == 8 * 4 * 256 * 4
    assert "measured 2.31 MB" in [text.get_text() for text in ways.texts]
    assert "Measured: 67.1 MB" in picture.alt
    alone = pool_priced(pool.priced(8, 256, 64, Heads(4, 2, 16), CPU))
    assert "Measured: no GPU has recorded it yet" in alone.alt
    assert "nan" not in alone.alt
    assert not [text for text in alone.axes[1].texts if "measured" in text.get_text()]
    did_not_fit = priced()
    did_not_fit.loc[did_not_fit["how"] == "measured", "bytes"] = np.nan
    assert "it did not fit" in [text.get_text() for text in pool_priced(did_not_fit).axes[0].texts]


def test_the_figure_by_multiple_shows_its_lines() -> None:
    picture, frame = pool_by_multiple(by_multiple().sample(frac=1, random_state=0)), by_multiple()
    lines = [np.asarray(line.get_ydata()).tolist() for line in picture.axes[0].lines]
    part = frame[frame["way"] == WAYS[2]].sort_values("shapes")
    assert part["computed_bytes"].tolist() in lines
    assert part["simulated_bytes"].tolist() in lines
    assert len([line for line in lines if not np.isnan(line).all()]) == 5
    if (DATA / "pool-simulated.csv").is_file():
        alt = pool_by_multiple(read_csv(DATA / "pool-simulated.csv")).alt
        assert "computed, one pool: from 268 MB to 268 MB; computed, a pool each: from 536 MB to 17.4 GB" in alt
        assert "simulated, one pool, smallest first: from 25.7 GB to 618 GB" in alt


@pytest.mark.parametrize(
    ("changes", "pays"),
    [
        ({}, {1: 45, 9: 405, 36: 1620}),
        ({"saving_ms": 0.0}, dict.fromkeys((1, 9, 36), math.inf)),
        ({"saving_ms": -1.0}, dict.fromkeys((1, 9, 36), math.inf)),
    ],
)
def test_the_curve_crosses_where_it_pays(changes: dict[str, float], pays: dict[int, float]) -> None:
    picture = breakeven_curve(launch_costs(**changes))
    (axes,) = picture.axes
    crossings = [float(np.asarray(line.get_xdata())[0]) for line in axes.lines if line.get_marker() == "o"]
    assert crossings == [steps for steps in pays.values() if math.isfinite(steps)]
    for count, steps in pays.items():
        shapes = f"{count} shape{'s' * (count > 1)}"
        text = f"{shapes}: never" if math.isinf(steps) else f"{shapes}: after {steps:,} steps"
        assert text in [words.get_text() for words in axes.texts]
        assert captured.capture_breakeven_steps(0.09 * count, changes.get("saving_ms", 2.0) / 1e3) == steps
    assert "pay: 1 shape " in picture.alt


@pytest.mark.parametrize(
    ("draw", "frame", "message"),
    [
        (pool_priced, priced().drop(columns="heads"), "no column heads"),
        (pool_priced, pd.concat([priced(), priced().assign(rows=4)]), "more than one engine"),
        (pool_priced, priced().assign(where="the list"), "wanted the largest shape and the list"),
        (pool_priced, priced().assign(bytes=np.nan), "a missing value in column bytes"),
        (pool_by_multiple, pd.concat([by_multiple(), by_multiple()]), "two lines of one width multiple and way"),
        (pool_by_multiple, by_multiple().iloc[:3], "for two width multiples or more, saw 1"),
        (breakeven_curve, launch_costs(record_ms=0.0), "record_ms must be positive, saw 0.0"),
    ],
)
def test_frames_that_show_nothing_are_refused(draw: Any, frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(FigureError, match=message):
        draw(frame)


def test_the_explorer_draws_what_its_sliders_say() -> None:
    from nanoserve_lab.widgets import pool_explorer

    box = pool_explorer()
    *sliders, drawing = box.children
    by_name = {slider.description: slider for slider in sliders}
    assert list(by_name) == ["rows", "context", "heads", "dtype", "width multiple"]

    def alt() -> str:
        return re.search(r'alt="([^"]*)"', drawing.value).group(1)  # type: ignore[union-attr]

    assert alt() == pool_priced(pool.priced(device=CPU)).alt, "at first the static twin"
    by_name["width multiple"].value = 8192
    by_name["rows"].value = 4
    by_name["context"].value = 1024
    by_name["dtype"].value = "bfloat16"
    by_name["heads"].value = (32, 8)
    assert alt() == pool_priced(pool.priced(4, 1024, 8192, Heads(32, 8, dtype="bfloat16"), CPU)).alt


def test_the_ledger_repeats() -> None:
    frame = ledger("07_pool_and_breakeven")
    assert list(frame.index)[-2:] == ["06_graph_capture", "07_pool_and_breakeven"]
    assert frame.iloc[-1].tolist() == frame.iloc[-2].tolist()
