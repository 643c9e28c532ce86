"""`bench decode`: a decode step of the engine beside its peers, and beside what the memory's speed allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from nanoserve_lab.bench.llamacpp import LlamaCpp
from nanoserve_lab.bench.peers import ATTENTIONS, CACHES, Peer
from nanoserve_lab.bench.provenance import write_csv
from nanoserve_lab.bench.step import engine_with_room, kv_bytes, weight_bytes
from nanoserve_lab.bench.timing import (
    DTYPES,
    alternate,
    command_line,
    made_up_prompt,
    model_name,
    parse_counts,
    parse_dtypes,
    parse_words,
    peer_ratios,
    require,
    seconds_of,
    show,
    spread,
)
from nanoserve_lab.device import default_device, read_bandwidth
from nanoserve_lab.engine import Engine, SamplingParams
from nanoserve_lab.model import Transformer, load_model, resolve_source
from nanoserve_lab.model.transformer import LayerCaches, Read

OWN = "nanoserve-lab"
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
#: The engine's own arms: the switches of each. A recorded step is padded to the width that the run ends at.
MODES: dict[str, dict[str, bool]] = {
    "eager": {},
    "recorded": {"bucket_decode": True, "persist_inputs": True, "capture_decode": True},
    "compiled": {"compile_decode": True},
}
#: Steps of each repetition that are run and not timed: a call of ``generate`` prepares its masks and its cache there.
DROPPED = 1


def steps_for(steps: int, rows: int) -> int:
    """Timed steps of one repetition: ``steps`` over the square root of ``rows``, as wide steps are long; at least 4."""
    return max(min(steps, 4), round(steps / rows**0.5))


def own_name(mode: str) -> str:
    """The engine's name in a table."""
    return OWN if mode == "eager" else f"{OWN} {mode}"


def engine_of_copies(model: Transformer, prompt: Sequence[int], rows: int, tokens: int, **switches: bool) -> Engine:
    """An engine that has prefilled ``rows`` times ``prompt`` and sampled the first of ``tokens`` tokens for each.

    The prompt is computed once, and its K and V are copied to the rows: what computing it in every row would write, but
    for rounding, in a fraction of the time.
    """
    engine = engine_with_room(model, rows, len(prompt), tokens, **switches)
    model = engine.model
    compute = model.forward
    computed: list[tuple[Tensor, Tensor]] = []
    logits = torch.empty(0)

    def keep(ids: Tensor, positions: Tensor, slots: Tensor, caches: LayerCaches, read: Read, at: Tensor) -> Tensor:
        nonlocal logits
        logits = compute(ids, positions, slots, caches, read, at)
        computed.extend((keys[slots], values[slots]) for keys, values in caches)
        return logits

    def copy(ids: Tensor, positions: Tensor, slots: Tensor, caches: LayerCaches, read: Read, at: Tensor) -> Tensor:
        for cache, source in zip(caches, computed, strict=True):
            for pool, once in zip(cache, source, strict=True):
                pool.index_copy_(0, slots, once[positions])
        return logits.expand(len(at), -1)

    try:
        model.forward = keep  # type: ignore[method-assign,assignment]
        engine.generate([prompt], SamplingParams(max_tokens=1))
        model.forward = copy  # type: ignore[method-assign,assignment]
        for _ in range(rows):
            engine.submit(prompt, SamplingParams(max_tokens=tokens))
        engine.step()
    finally:
        del model.forward
    return engine


def mean_context(context: int, steps: int, repeats: int) -> float:
    """Tokens that a row reads in a timed step of `measure_cell`, on average: its own new one counts, and the warm-up
    repetition has lengthened the context already."""
    return context + (repeats + 1) * (DROPPED + steps) / 2 + DROPPED + (steps + 1) / 2


def own_seconds_per_step(engine: Engine, steps: int, dropped: int = DROPPED) -> float:
    """Run ``dropped + steps`` steps of ``engine``; the mean seconds of the last ``steps``."""
    for _ in range(dropped):
        engine.step()

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    return seconds_of(decode, engine.model.device) / steps


def measure_cell(
    model: Transformer,
    peer: Peer,
    rows: int,
    context: int,
    steps: int,
    repeats: int,
    modes: Sequence[str] = ("eager",),
    llama_cpp: LlamaCpp | None = None,
) -> pd.DataFrame:
    """One row an engine: ``rows`` sequences that decode from ``context`` tokens on.

    Every engine decodes the same prompt in all rows. In repetition ``r`` (the warm-up is 0) each of them runs one step
    that is not timed and ``steps`` that are, from where its repetition ``r - 1`` ended, so that all read the same
    contexts. Columns ``engine``, ``rows``, ``context``, ``steps``, ``repeats``, ``ms_per_step`` (median of the
    repetitions' means), ``ms_min``, ``ms_max``, ``tokens_per_s``, ``floor_ms`` (weights and live K/V over the
    bandwidth), ``bandwidth_gb_s`` (median; measured once a repetition), ``floor_fraction`` (``floor_ms`` over
    ``ms_per_step``) and ``ratio`` (the median of `transformers` at best over this one's).
    """
    total = (repeats + 1) * (DROPPED + steps)
    prompt = made_up_prompt(model.config.vocab_size, context)
    # Two more tokens than steps: the prefill samples one, and no row ends inside the last step.
    arms: dict[str, Callable[[], float]] = {}
    for mode in modes:
        engine = engine_of_copies(model, prompt, rows, total + 2, **MODES[mode])
        arms[own_name(mode)] = lambda e=engine: own_seconds_per_step(e, steps)  # type: ignore[misc]
    for attention in ATTENTIONS:
        for cache in CACHES:
            decoder = peer.decoder(prompt, rows, attention, cache, total)
            arms[f"{TRANSFORMERS} {attention} {cache}"] = lambda d=decoder: d.seconds_per_step(steps, DROPPED)  # type: ignore[misc]
    if llama_cpp is not None:
        batch = llama_cpp.decoder(prompt, rows, total)
        arms[LLAMA_CPP] = lambda: batch.seconds_per_step(steps, DROPPED)
    engines = list(arms)
    arms["bandwidth"] = lambda: read_bandwidth(model.device, repeats=3)
    values = alternate(arms, repeats)
    bandwidth = spread(values["bandwidth"]).median
    live = rows * mean_context(context, steps, repeats)
    floor_s = (weight_bytes(model) + kv_bytes(model, 1) * live) / bandwidth
    peers = [name for name in engines if name.startswith(TRANSFORMERS)]
    ratios = peer_ratios({name: spread(values[name]).median for name in engines}, peers)
    table = []
    for name in engines:
        seconds = spread(values[name])
        table.append(
            {
                "engine": name,
                "rows": rows,
                "context": context,
                "steps": steps,
                "repeats": repeats,
                "ms_per_step": seconds.median * 1e3,
                "ms_min": seconds.low * 1e3,
                "ms_max": seconds.high * 1e3,
                "tokens_per_s": rows / seconds.median,
                "floor_ms": floor_s * 1e3,
                "bandwidth_gb_s": bandwidth / 1e9,
                "floor_fraction": floor_s / seconds.median,
                "ratio": ratios[name],
            }
        )
    return pd.DataFrame(table)


def measure(
    source: str | None,
    rows: Sequence[int],
    contexts: Sequence[int],
    dtypes: Sequence[str],
    steps: int,
    repeats: int,
    modes: Sequence[str] = ("eager",),
    peers: Sequence[str] = (TRANSFORMERS,),
) -> pd.DataFrame:
    """`measure_cell` for every dtype, context and number of rows; adds ``model``, ``dtype`` and ``threads``."""
    device = default_device()
    folder = resolve_source(source)
    frames = []
    for dtype in dtypes:
        model, _ = load_model(folder, device, DTYPES[dtype])
        peer = Peer(folder, DTYPES[dtype], device)
        other = LlamaCpp(folder, DTYPES[dtype]) if LLAMA_CPP in peers else None
        for context in contexts:
            for batch in rows:
                frame = measure_cell(model, peer, batch, context, steps_for(steps, batch), repeats, modes, other)
                frame.insert(1, "model", model_name(source))
                frame.insert(2, "dtype", dtype)
                show(frame)
                frames.append(frame)
    return pd.concat(frames, ignore_index=True).assign(threads=torch.get_num_threads())


def run(
    out: Path = Path("data"),
    rows: str = "1,8,32",
    contexts: str = "128,1024",
    dtypes: str = "float32,bfloat16",
    steps: int = 16,
    repeats: int = 5,
    modes: str = "eager,recorded",
    peers: str = TRANSFORMERS,
    model: str | None = None,
) -> list[Path]:
    """Milliseconds a decode step beside its peers, for every cell of ROWS, CONTEXTS and DTYPES, to OUT/decode.csv.

    STEPS are the timed steps of one repetition of one row; more rows take fewer. MODES are eager, recorded, compiled.
    PEERS are transformers, always measured, and llama.cpp, where llama-cpp-python is installed.
    """
    command = command_line("decode", run, locals())
    batches, lengths, names = (
        parse_counts("rows", rows),
        parse_counts("contexts", contexts),
        parse_dtypes("dtypes", dtypes),
    )
    own = parse_words("modes", modes, MODES)
    others = parse_words("peers", peers, (TRANSFORMERS, LLAMA_CPP))
    require("steps", steps, 1)
    require("repeats", repeats, 1)
    frame = measure(model, batches, lengths, names, steps, repeats, own, others)
    return [write_csv(frame, out / "decode.csv", default_device(), command)]


def readme_table(frame: pd.DataFrame) -> str:
    """The cells of a recorded `decode.csv` as a Markdown table: the engine, eager and recorded, beside its peers,
    `transformers` in its best setting."""
    lines = [
        "| dtype | rows | context | eager, ms | recorded, ms | transformers | llama.cpp | ratios | of the floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (dtype, context, rows), cell in frame.groupby(["dtype", "context", "rows"], sort=False):
        arms = cell.set_index("engine")
        peers = [cell[cell.engine.str.startswith(name)].ms_per_step.min() for name in (TRANSFORMERS, LLAMA_CPP)]
        eager, recorded = arms.loc[OWN], arms.loc[own_name("recorded")]
        best = max(eager, recorded, key=lambda arm: arm.ratio)
        times = [f"{ms:.0f}" if ms == ms else "–" for ms in (eager.ms_per_step, recorded.ms_per_step, *peers)]
        ratios = " / ".join(f"{ms / best.ms_per_step:.2f}" for ms in peers if ms == ms)
        cells = (dtype, rows, context, *times, ratios, f"{best.floor_fraction:.0%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
