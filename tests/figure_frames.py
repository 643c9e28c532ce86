"""A small frame for every figure, as a bench would record it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch

from nanoserve_lab.bench import padding, pool

WHERE = {
    "machine": "NVIDIA Grace, 72 cores, 480 GB",
    "device": "NVIDIA GH200 480GB",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "commit": "abc",
    "command": "test",
    "date": "2026-01-02",
}

LAYER = (
    ("aten.mul.Tensor", "norm", "attn_norm", 6),
    ("aten.mm.default", "matmul", "attn", 150),
    ("aten.mul.Tensor", "rope", "attn", 5),
    ("aten.cat.default", "copy", "attn", 8),
    ("aten.index_put_.default", "index", "attn", 20),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention", "attn", 60),
    ("aten.add.Tensor", "elementwise", "attn", 5),
    ("aten.mean.dim", "reduction", "mlp_norm", 9),
    ("aten.silu.default", "activation", "mlp", 8),
    ("aten.mm.default", "matmul", "mlp", 180),
)


def launches(layers: int = 2) -> pd.DataFrame:
    inside = [(op, kind, f"layers.{n}.{part}", us + n) for n in range(layers) for op, kind, part, us in LAYER]
    rows = [
        ("aten.embedding.default", "embedding", "embed", 12),
        *inside,
        ("aten.mm.default", "matmul", "lm_head", 900),
        ("aten.argmax.default", "sampling", "sampler", 60),
        ("aten.alias.default", "other", "sampler", 0),
    ]
    return pd.DataFrame(
        [
            {"order": i, "op": op, "kind": kind, "module": module, "bytes_read": 64, "bytes_written": 8,
             "seconds": us * 1e-6, **WHERE}
            for i, (op, kind, module, us) in enumerate(rows)
        ]
    )  # fmt: skip


def limits(**changes: float) -> pd.DataFrame:
    row = {"bytes": 538e6, "launches": 700, "host_s_per_launch": 5e-6, "bandwidth_gb_s": 27.0, "step_s": 0.032}
    return pd.DataFrame([{**row, **changes, **WHERE}])


def readback(lag: int = 2) -> pd.DataFrame:
    tokens = {"A": (0, [" The", " capital", "\n", "é"], 3), "B": (1, ["<|im_end|>", " $x$", "界"], 0)}
    return pd.DataFrame(
        [
            {"step": start + i, "row": row, "token": text, "read_at": start + i + lag, "kept": i <= stop, **WHERE}
            for row, (start, texts, stop) in tokens.items()
            for i, text in enumerate(texts)
        ]
    )


def plans() -> pd.DataFrame:
    cells = [
        {"rows": rows, "context": context, "gather_us": 60 + rows * context / 200, "window_us": 60.0 + rows, **WHERE}
        for rows in (1, 8, 32)
        for context in (128, 1024, 8192)
    ]
    return pd.DataFrame(cells)


def recompiles() -> pd.DataFrame:
    graphs = {"block tables": (1, 1, 2, 2), "plan, static": (1, 2, 3, 4), "plan, dynamic": (1, 1, 1, 1)}
    return pd.DataFrame(
        [
            {"step": i + 1, "context": i + 4, "arm": arm, "graphs": count, "recompiles": count - 1, **WHERE}
            for arm, counts in graphs.items()
            for i, count in enumerate(counts)
        ]
    )


def graphs(**changes: Any) -> pd.DataFrame:
    rows = [
        {"way": way, "step": step, "context": 3 + step, "graphs": min(step, most), "refused": step > most == 8, **WHERE}
        for way, most in (("fixed sizes", 8), ("a Python int", 2), ("dynamic sizes", 1))
        for step in range(1, 10 if most == 8 else 25)
    ]
    return pd.DataFrame(rows).assign(**changes)


def compiled(**changes: Any) -> pd.DataFrame:
    rows = [
        {"model": model, "rows": count, "graphs": 1 + (count > 1), "compile_s": 2.0, "eager_ms": 4.0 * count,
         "compiled_ms": 2.0 * count, **WHERE}
        for model in ("random, 8 layers", "smollm2-135m-instruct")
        for count in (1, 8, 32)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**changes)


def padded() -> pd.DataFrame:
    return padding.by_load(seconds=20).assign(**WHERE)


def seen() -> pd.DataFrame:
    return padding.seen_over_run(padding.simulate(seconds=20)).assign(max_rows=256, max_context=8192, **WHERE)


def inputs() -> pd.DataFrame:
    cells = [
        {"steps": steps, "rows": rows, "fresh_allocations": 3 * steps, "buffered_allocations": 0,
         "ratio": 0.9 + rows / 1000, **WHERE}
        for rows in (3, 32, 256)
        for steps in (8, 64, 512)
    ]  # fmt: skip
    return pd.DataFrame(cells)


def breakeven() -> pd.DataFrame:
    lists = [
        ("00 to 03", 2_097_152, 268_435_456, 141_304_491_147_264, float("inf")),
        ("04 to 06", 576, 268_435_456, 17_414_225_920, 54_321.0),
        ("07", 36, 268_435_456, 1_339_555_840, 3_395.0),
    ]
    columns = ["lessons", "shapes", "shared_bytes", "private_bytes", "breakeven_steps"]
    return pd.DataFrame(lists, columns=columns).assign(**WHERE)


def captures() -> pd.DataFrame:
    cells = [
        {"steps": steps, "rows": rows, "captures_open": steps, "captures_closed": 1 + (16 + steps > 128),
         "ratio": 0.8 + rows / 1000, **WHERE}
        for rows in (2, 32, 256)
        for steps in (8, 64, 128)
    ]  # fmt: skip
    return pd.DataFrame(cells)


def priced() -> pd.DataFrame:
    """A small engine's bill, as if a GPU had recorded it."""
    frame = pool.priced(8, 256, 64, pool.Heads(4, 2, 16), torch.device("cpu"))
    simulated = frame[(frame["how"] == "simulated") & (frame["where"] == "the list")]["bytes"].tolist()
    measured = [2.0 * frame[frame["how"] == "simulated"]["bytes"].max(), *(1.1 * nbytes for nbytes in simulated)]
    frame.loc[frame["how"] == "measured", "bytes"] = measured
    return frame.assign(**WHERE)


def by_multiple() -> pd.DataFrame:
    return pool.by_multiple((32, 64, 256), pool.Heads(4, 2, 16), 8, 256, torch.device("cpu")).assign(**WHERE)


def launch_costs(**changes: Any) -> pd.DataFrame:
    row = {"step": "default decode", "rows": 1, "launches": 675, "replay_ms": 3.0, "record_ms": 90.0, "saving_ms": 2.0}
    return pd.DataFrame([{**row, "step": "tiny decode", "saving_ms": -1.0}, {**row, **changes}]).assign(**WHERE)


FRAMES: dict[str, Callable[[], pd.DataFrame | None]] = {
    "allocations_over_steps": inputs,
    "breakeven_curve": launch_costs,
    "bytes_against_bandwidth": limits,
    "captured_decode_replay": lambda: None,
    "captures_over_steps": captures,
    "compiled_step": compiled,
    "decode_step_path": lambda: None,
    "deferred_readback": readback,
    "finished_row": lambda: None,
    "graphs_against_steps": graphs,
    "graphs_by_addressing": recompiles,
    "launches_by_kind": launches,
    "padded_rectangle": lambda: None,
    "padding_against_graphs": padded,
    "persistent_decode_inputs": lambda: None,
    "plan_between": lambda: None,
    "planning_time": plans,
    "pool_and_breakeven": breakeven,
    "pool_by_multiple": by_multiple,
    "pool_priced": priced,
    "recording_in_time": launches,
    "shapes_over_run": seen,
    "step_strip": launches,
}
