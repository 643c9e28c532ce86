"""The benches on tiny models: what they write, how they compare, and what they count. No test asserts a time."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from nanoserve_lab import Engine, SamplingParams
from nanoserve_lab.bench import decode, host, peers, prefill, soak, timing
from nanoserve_lab.bench.provenance import PROVENANCE, read_csv, repository_root
from nanoserve_lab.bench.step import engine_after_prefill, kv_bytes, weight_bytes
from nanoserve_lab.device import read_bandwidth
from nanoserve_lab.engine import TokenEvent
from nanoserve_lab.engine.sampling import Sampler
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model import load_model
from nanoserve_lab.model.tiny import tiny_model
from nanoserve_lab.model.transformer import Transformer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Path:
    """A tiny random Llama in a folder, written by `transformers`."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=5,
    )
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    shutil.copy(default_model_folder / "tokenizer.json", path)
    return path


@pytest.fixture
def own_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine the fastest by far, so that a ratio to the best of all is not one to the best peer."""

    def alternate(*args: Any, **kwargs: Any) -> dict[str, list[float]]:
        values = timing.alternate(*args, **kwargs)
        return values | {decode.OWN: [value / 1000 for value in values[decode.OWN]]}

    monkeypatch.setattr(decode, "alternate", alternate)
    monkeypatch.setattr(prefill, "alternate", alternate)


def load_tiny(folder: Path, dtype: torch.dtype = torch.float64) -> Transformer:
    return load_model(folder, "cpu", dtype)[0]


# --- timing ---------------------------------------------------------------------------------------------------------


def test_arms_take_turns_and_the_warmup_is_thrown_away() -> None:
    calls: list[str] = []

    def arm(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = timing.alternate({name: lambda name=name: arm(name) for name in "abc"}, repeats=2)
    assert "".join(calls) == "abccbaabc"
    assert values == {"a": [6.0, 7.0], "b": [5.0, 8.0], "c": [4.0, 9.0]}


def test_spread_and_ratios() -> None:
    assert timing.spread([5.0, 1.0, 2.0, 9.0, 3.0]) == (3.0, 1.0, 9.0)
    assert timing.peer_ratios({"own": 2.0, "x": 8.0, "y": 4.0}, ["x", "y"]) == {"own": 2.0, "x": 0.5, "y": 1.0}


def test_options_are_checked_by_name() -> None:
    assert timing.parse_counts("rows", "8, 1,8") == [8, 1]
    assert timing.parse_dtypes("dtypes", "bfloat16,float32") == ["bfloat16", "float32"]
    for text in ("", "0", "1,,2", "-1", "1.5", "²"):
        with pytest.raises(timing.BenchRefused, match=r"--rows: wanted positive integers .* got "):
            timing.parse_counts("rows", text)
    with pytest.raises(timing.BenchRefused, match=r"--dtypes: .*float32.* got 'float32,int8'"):
        timing.parse_dtypes("dtypes", "float32,int8")
    with pytest.raises(timing.BenchRefused, match=r"--load: wanted 0.1 or more, got nan"):
        timing.require("load", math.nan, 0.1)
    with pytest.raises(timing.BenchRefused, match=r"--steps: wanted 1 to 4, got 5"):
        timing.require("steps", 5, 1, 4)


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (decode.run, {"rows": "x"}, "--rows"),
        (decode.run, {"contexts": "0"}, "--contexts"),
        (decode.run, {"dtypes": "fp8"}, "--dtypes"),
        (decode.run, {"modes": "eager,warm"}, "--modes"),
        (decode.run, {"steps": 0}, "--steps"),
        (decode.run, {"repeats": 0}, "--repeats"),
        (host.run, {"steps": 201}, "--steps"),
        (prefill.run, {"tokens": "1,"}, "--tokens"),
        (prefill.run, {"repeats": 0}, "--repeats"),
        (prefill.run, {"seconds": 0}, "--seconds"),
        (soak.run, {"seconds": 3}, "--seconds"),
        (soak.run, {"load": 0.0}, "--load"),
        (soak.run, {"trace": "chat"}, "--trace"),
        (soak.run, {"seed": -1}, "--seed"),
        (soak.run, {"length_scale": 0.0}, "--length-scale"),
        (soak.run, {"dtype": "float32,bfloat16"}, "--dtype"),
    ],
)
def test_a_bench_refuses_before_it_loads_or_writes(run: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(timing.BenchRefused, match=message):
        run(tmp_path / "out", model=str(tmp_path / "no-model"), **options) if run is not host.run else run(
            tmp_path / "out", **options
        )
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_what_is_not_the_default_and_no_folder(tmp_path: Path) -> None:
    options = {"out": tmp_path, "rows": "1,8,32", "steps": 3, "model": str(tmp_path)}
    command = timing.command_line("decode", decode.run, options)
    assert command == f"nanoserve-lab bench decode --steps 3 --model {tmp_path.name}"
    assert timing.model_name(None) == "smollm2-135m-instruct"
    assert timing.model_name("org/name") == "org/name"


def test_the_bandwidth_is_that_of_a_sum() -> None:
    with StepTrace() as trace:
        assert read_bandwidth("cpu", megabytes=1, repeats=1) > 0
    sums = [launch for launch in trace.launches if launch.op == "aten.sum.default"]
    assert {launch.bytes_read for launch in sums} == {2**20}


# --- decode ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", peers.ATTENTIONS)
@pytest.mark.parametrize("cache", peers.CACHES)
def test_the_peer_decodes_what_the_engine_decodes(folder: Path, attention: str, cache: str) -> None:
    model = load_tiny(folder)
    prompt = timing.made_up_prompt(211, 20)
    expected = Engine.build(model, None).generate([prompt], SamplingParams(max_tokens=9))[0].token_ids
    peer = peers.Peer(folder, torch.float64, torch.device("cpu"))
    decoder = peer.decoder(prompt, 3, attention, cache, steps=8)
    shapes: list[torch.Size] = []
    embedding = peer.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    for _ in range(2):
        assert decoder.seconds_per_step(3) > 0
    assert decoder.sequences.tolist() == [prompt + expected] * 3
    assert shapes == [(3, 1)] * 8  # nothing is computed twice
    assert peer.model.config._attn_implementation == attention
    assert type(decoder.cache).__name__ == f"{cache.title()}Cache"
    assert peer.first_token(prompt, attention) == expected[0]


def test_the_peer_does_not_stop_at_an_end_token(folder: Path, tmp_path: Path) -> None:
    prompt = torch.tensor([timing.made_up_prompt(211, 20)])
    first = int(peers.Peer(folder, torch.float64, torch.device("cpu")).generate(prompt, 1)[0, -1])
    stopping = shutil.copytree(folder, tmp_path / "stopping")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((stopping / name).read_text())
        assert written["eos_token_id"] == 5
        (stopping / name).write_text(json.dumps(written | {"eos_token_id": first}))
    peer = peers.Peer(stopping, torch.float64, torch.device("cpu"))
    assert peer.generate(prompt, 6).shape == (1, 26)
    peer.model.generation_config.eos_token_id = first
    assert peer.generate(prompt, 6).shape == (1, 21)


def test_a_missing_peer_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(peers.PeerMissing, match=r"pip install 'nanoserve-lab\[test\]'"):
        peers.Peer(folder, torch.float32, torch.device("cpu"))


def test_the_benches_import_no_peer_until_they_run() -> None:
    code = "import sys, nanoserve_lab.bench.decode, nanoserve_lab.bench.prefill; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_copied_prompts_decode_as_computed_ones(folder: Path) -> None:
    prompt = timing.made_up_prompt(211, 37)
    model = load_tiny(folder)
    copies = decode.engine_of_copies(model, prompt, 3, 10)
    assert "forward" not in vars(copies.model)
    computed = engine_after_prefill(model, [prompt] * 3, 10)
    for engine in (copies, computed):
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (3, 0)
        assert engine.cache.lengths[:3].tolist() == [37] * 3
    for (keys, values), (other_keys, other_values) in zip(
        copies.cache.pool.layers, computed.cache.pool.layers, strict=True
    ):
        for row in range(3):
            here, there = copies.cache.slots(row), computed.cache.slots(row)
            assert torch.allclose(keys[here], other_keys[there], rtol=1e-9, atol=1e-12)
            assert torch.allclose(values[here], other_values[there], rtol=1e-9, atol=1e-12)
    told: list[list[int | None]] = []
    for engine in (copies, computed):
        events: list[TokenEvent] = []
        while engine.has_work:
            events += engine.step()
        ids = sorted({event.request_id for event in events})
        told += [[event.token_id for event in events if event.request_id == i] for i in ids]
    assert len(told) == 6
    assert all(tokens == told[0] for tokens in told)
    assert len(told[0]) == 10


def test_wide_cells_get_fewer_steps() -> None:
    assert [decode.steps_for(16, rows) for rows in (1, 8, 32)] == [16, 6, 4]
    assert [decode.steps_for(2, rows) for rows in (1, 32)] == [2, 2]


def test_the_mean_context_is_that_of_the_timed_steps() -> None:
    model, steps, repeats = tiny_model(), 3, 2
    engine = engine_after_prefill(model, [[1] * 10, [2] * 10], 40)
    contexts: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, args: contexts.append(int(args[1][0]) + 1))
    timed = []
    for repetition in range(1 + repeats):
        contexts.clear()
        decode.own_seconds_per_step(engine, steps)
        if repetition:
            timed += contexts[-steps:]
    assert contexts[0] == 10 + repeats * (decode.DROPPED + steps) + 1
    assert decode.mean_context(10, steps, repeats) == sum(timed) / len(timed)


@pytest.mark.usefixtures("own_first")
def test_one_cell_of_the_decode_bench(folder: Path) -> None:
    model = load_tiny(folder, torch.float32)
    peer = peers.Peer(folder, torch.float32, torch.device("cpu"))
    frame = decode.measure_cell(model, peer, rows=2, context=12, steps=3, repeats=3)
    own, *others = frame.to_dict("records")
    assert own["engine"] == "nanoserve-lab"
    assert [row["engine"] for row in others] == [
        f"transformers {attention} {cache}" for attention in ("sdpa", "eager") for cache in ("dynamic", "static")
    ]
    size = weight_bytes(model) + 2 * kv_bytes(model, 1) * decode.mean_context(12, 3, 3)
    for row in frame.to_dict("records"):
        assert 0 < row["ms_min"] <= row["ms_per_step"] <= row["ms_max"]
        assert row["tokens_per_s"] == pytest.approx(2 / row["ms_per_step"] * 1e3)
        assert row["floor_ms"] == pytest.approx(size / row["bandwidth_gb_s"] / 1e6)
        assert row["floor_fraction"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
        assert row["ratio"] == pytest.approx(min(other["ms_per_step"] for other in others) / row["ms_per_step"])
    assert max(row["ratio"] for row in others) == 1.0


def test_a_recorded_arm_records_before_the_clock_starts(folder: Path) -> None:
    engine = decode.engine_of_copies(load_tiny(folder, torch.float32), [1, 2, 3], 2, 12, **decode.MODES["recorded"])
    decode.own_seconds_per_step(engine, 2)
    stats = engine.stats()
    assert (stats.captures, stats.replays, stats.eager_steps) == (1, decode.DROPPED + 2, {})
    for _ in range(2):
        decode.own_seconds_per_step(engine, 2)
    assert engine.stats().captures == 1, "one bucket serves the whole run"


def test_decode_writes_its_table_with_provenance(folder: Path, tmp_path: Path) -> None:
    [path] = decode.run(tmp_path, rows="1,2", contexts="9", dtypes="float32", steps=2, repeats=1, model=str(folder))
    frame = read_csv(path)
    assert path == tmp_path / "decode.csv"
    columns = "engine model dtype rows context steps repeats ms_per_step ms_min ms_max tokens_per_s floor_ms"
    columns += " bandwidth_gb_s floor_fraction ratio threads"
    assert list(frame) == [*columns.split(), *PROVENANCE]
    assert set(frame.model) == {"tiny-llama"}
    assert frame.rows.tolist() == [1] * 6 + [2] * 6
    assert frame.engine.tolist()[:2] == ["nanoserve-lab", "nanoserve-lab recorded"]
    for _, cell in frame.groupby("rows"):
        peers = ~cell.engine.str.startswith("nanoserve-lab")
        # The best peer has a ratio of one; an arm of the engine's own is never taken for a peer.
        assert cell[peers].ratio.max() == 1.0
        assert (cell.ratio * cell.ms_per_step).tolist() == pytest.approx([cell[peers].ms_per_step.min()] * 6)
    command = "nanoserve-lab bench decode --rows 1,2 --contexts 9 --dtypes float32 --steps 2 --repeats 1"
    assert set(frame.command) == {f"{command} --model tiny-llama"}


# --- host -----------------------------------------------------------------------------------------------------------


def test_the_watch_counts_the_model_and_the_sampler_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, sampler = Transformer.forward, Sampler.__call__

    def slow(call: Any, seconds: float) -> Any:
        def run(self: Any, *args: Any) -> Any:
            time.sleep(seconds)
            return call(self, *args)

        return run

    monkeypatch.setattr(Transformer, "forward", slow(forward, 0.02))
    monkeypatch.setattr(Sampler, "__call__", slow(sampler, 0.03))
    patched = Sampler.__call__
    engine = engine_after_prefill(tiny_model(), [[1, 2], [3, 4]], 8)
    plain = engine.decode_graphs.forward
    with host.watch_forward(engine) as watch:
        engine.step()
        assert watch.seconds >= 0.05
    assert engine.decode_graphs.forward is plain
    assert Sampler.__call__ is patched
    seen = watch.seconds
    engine.step()
    assert watch.seconds == seen


def test_the_host_bench_takes_the_forward_from_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = host.step_times(engine_after_prefill(tiny_model(), [[1, 2], [3, 4]], 40), steps=20)
    assert len(times) == 20
    assert ((times.forward > 0) & (times.forward < times.step)).all()
    fixed = pd.DataFrame({"step": [3e-6, 9e-6, 5e-6], "forward": [2e-6, 3e-6, 1e-6]})
    monkeypatch.setattr(host, "step_times", lambda engine, steps: fixed)
    [path] = host.run(tmp_path, rows="1,4", steps=3)
    frame = read_csv(path)
    columns = ["rows", "step_us", "forward_us", "host_us", "host_us_per_row"]
    assert list(frame) == [*columns, "steps", "threads", *PROVENANCE]
    values = frame[columns].to_numpy()
    assert values == pytest.approx(np.array([[1, 5.0, 2.0, 4.0, 4.0], [4, 5.0, 2.0, 4.0, 1.0]]))
    assert set(frame.command) == {"nanoserve-lab bench host --rows 1,4 --steps 3"}


def test_the_rows_of_the_host_bench_need_blocks_in_different_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []
    times = host.step_times
    monkeypatch.setattr(host, "step_times", lambda engine, steps: engines.append(engine) or times(engine, steps))
    host.measure([16], host.MOST_STEPS)  # the longest run the tiny model has positions for
    stats = engines[0].stats()
    assert stats.running == 16
    assert stats.decode_rows == 16 * (host.WARMUP + host.MOST_STEPS)
    assert sorted(length % 16 for length in engines[0].cache.lengths[:16]) == list(range(16))


# --- prefill --------------------------------------------------------------------------------------------------------


def test_the_peak_is_this_process_own() -> None:
    before = prefill.peak_mb(torch.device("cpu"))
    resident = psutil.Process().memory_info().rss / 1e6
    assert before >= 0.99 * resident
    held = np.ones(int((before - resident + 64) * 1e6), dtype=np.uint8)
    assert before + 32 < prefill.peak_mb(torch.device("cpu")) < before + 128
    del held
    assert prefill.peak_mb(torch.device("cpu")) > before + 32


@pytest.mark.usefixtures("own_first")
def test_the_prefill_bench(folder: Path, tmp_path: Path) -> None:
    [path] = prefill.run(tmp_path, tokens="24,8", dtypes="float64", repeats=3, model=str(folder))
    frame = read_csv(path)
    columns = "engine model dtype tokens repeats ttft_ms ms_min ms_max peak_mb ratio same_token threads"
    assert list(frame) == [*columns.split(), *PROVENANCE]
    assert frame.engine.tolist() == ["nanoserve-lab", "transformers sdpa", "transformers eager"] * 2
    assert frame.tokens.tolist() == [8] * 3 + [24] * 3
    assert set(frame.repeats) == {3}
    assert frame.same_token.all()
    assert (frame.ms_min <= frame.ttft_ms).all()
    assert (frame.ttft_ms <= frame.ms_max).all()
    for _, cell in frame.groupby("tokens"):
        assert cell.ratio.to_numpy() == pytest.approx((cell.ttft_ms[1:].min() / cell.ttft_ms).to_numpy())
    # Every engine has a process of its own, and none of them is this one.
    peaks = frame.pivot(index="engine", columns="tokens", values="peak_mb")
    assert (peaks[24] >= peaks[8]).all()
    assert peaks[8].nunique() == 3
    assert set(frame.command) == {
        "nanoserve-lab bench prefill --tokens 24,8 --dtypes float64 --repeats 3 --model tiny-llama"
    }


def test_a_slow_prompt_gets_fewer_rounds_and_its_rows_say_so(folder: Path) -> None:
    assert [prefill.rounds_within(10, warm_up, 5) for warm_up in (1, 2, 2.5, 4, 9, 100)] == [5, 4, 3, 1, 1, 1]
    assert prefill.rounds_within(-1, 1, 5) == 1
    assert prefill.measure_dtype(folder, "float64", [8], 3, seconds=1e-3).repeats.tolist() == [1] * 3


def test_an_error_in_a_measuring_process_comes_home(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "ENGINES", prefill.ENGINES[:1])
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copy(folder / "config.json", broken)
    with pytest.raises(Exception, match=r"tokenizer.json: not there"):
        prefill.run(tmp_path / "out", tokens="4", dtypes="float32", repeats=1, model=str(broken))
    assert not (tmp_path / "out").exists()


# --- soak -----------------------------------------------------------------------------------------------------------


def test_the_soak_writes_a_line_a_second(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In its first seconds a process still warms up; what is flat and what is not has a test of its own.
    monkeypatch.setattr(soak, "FLAT_MB", math.inf)
    [path] = soak.run(tmp_path, seconds=4, load=0.05, length_scale=0.01, model=str(folder))
    frame = read_csv(path)
    columns = "second rss_mb running waiting submitted finished cancelled preemptions tokens trace requests_per_s"
    columns += " rate_scale length_scale slope_mb_per_min model dtype threads"
    assert list(frame) == [*columns.split(), *PROVENANCE]
    assert frame.second.astype(int).tolist()[:5] == [0, 1, 2, 3, 4]


def test_the_readme_shows_the_recorded_table() -> None:
    root = repository_root()
    assert root is not None
    table = decode.readme_table(read_csv(root / "data" / "decode.csv"))
    assert table.count("\n") > 2
    assert table in (root / "README.md").read_text(encoding="utf-8"), f"README.md should hold\n{table}"
