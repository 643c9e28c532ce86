"""The loop: every request says what it says alone, whoever else comes and goes; nothing is lost or left behind."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from nanoserve_lab.cache.pool import OutOfBlocks
from nanoserve_lab.captured import tape_recorder
from nanoserve_lab.compiled import eager_compiler
from nanoserve_lab.engine import Engine, EngineConfig, RequestRefused, SamplingParams
from nanoserve_lab.instruments import StepTrace
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.model.tokenizer import Tokenizer
from nanoserve_lab.model.transformer import Transformer
from nanoserve_lab.recorders import Recorder

pytestmark = pytest.mark.both_ways


@cache
def exact_model() -> Transformer:
    # In float64 the low bits that batching changes cannot reach a choice between tokens.
    return tiny_model(dtype=torch.float64)


def build(recorder: Recorder = tape_recorder, **sizes: int) -> Engine:
    defaults = {"max_rows": 3, "max_context": 32, "block_size": 4, "num_blocks": 14, "max_step_tokens": 64}
    config = EngineConfig(**(defaults | sizes))  # type: ignore[arg-type]
    return Engine.build(exact_model(), None, config, eager_compiler, recorder)


#: The engine's switches, day by day; all of them say the same.
MODES = {
    "gathered": {"slot_table": False},
    "window": {},
    "plain": {"optimize_cpu": False},
    "bucketed": {"bucket_decode": True, "width_multiple": 8},
    "one bucket": {"bucket_decode": True, "width_multiple": 32, "optimize_cpu": False},
    "persistent": {"persist_inputs": True},
    "persistent, gathered": {"persist_inputs": True, "slot_table": False},
    "persistent and bucketed": {"persist_inputs": True, "bucket_decode": True, "width_multiple": 8},
    "recorded": {"capture_decode": True, "persist_inputs": True, "bucket_decode": True, "width_multiple": 16},
    "compiled": {"compile_decode": True},
    "compiled and bucketed": {"compile_decode": True, "bucket_decode": True, "width_multiple": 16},
    "compiled and recorded": {
        "compile_decode": True,
        "capture_decode": True,
        "persist_inputs": True,
        "bucket_decode": True,
        "width_multiple": 32,
    },
}


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], str]:
    completion = build(readback_lag=0, capture_decode=False).generate([list(prompt)], [params])[0]
    return tuple(completion.token_ids), completion.finish_reason


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_the_readback_lag_changes_no_token(lag: int) -> None:
    engine = build(readback_lag=lag)
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    stop = alone((1, 2, 3), SamplingParams(max_tokens=12))[0][4]
    batch = [((1, 2, 3), SamplingParams(max_tokens=12, stop_ids=(stop,))), ((4,), sampled), ((9, 9), sampled)]
    completions = engine.generate([p for p, _ in batch], [s for _, s in batch])
    for completion, (prompt, one) in zip(completions, batch, strict=True):
        assert (tuple(completion.token_ids), completion.finish_reason) == alone(prompt, one)
    assert completions[0].token_ids[-1] == stop
    assert engine.stats().overshoot_tokens == lag, "the stop is seen `lag` steps late, one token is thrown away in each"


def test_a_token_is_told_of_lag_steps_after_it_was_sampled() -> None:
    engine = build(readback_lag=2)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    told = [[event.token_id for event in engine.step()] for _ in range(4)]
    tokens, _ = alone((1, 2, 3), SamplingParams(max_tokens=4))
    # Step 0 prefills and samples the first token; the last step finds no row running and drains the window.
    assert told == [[], [], [tokens[0]], list(tokens[1:])]
    assert not engine.has_work


def test_the_decode_loop_waits_for_nothing() -> None:
    engine = build(capture_decode=False)  # recording reads values, once a shape
    for prompt in ([1], [2, 3], [4, 5, 6]):
        engine.submit(prompt, SamplingParams(max_tokens=10, temperature=0.8, seed=1))
    with StepTrace() as trace:
        while engine.has_work:
            engine.step()
    assert engine.stats().finished == {"length": 3}
    assert trace.syncs == []


def test_the_context_limit_is_exact() -> None:
    engine = build(max_context=10, num_blocks=14)
    last = engine.generate([[1] * 9], SamplingParams(max_tokens=50))[0]
    # Nine prompt tokens, one decode that fills the tenth place: two tokens, the second never written.
    assert (len(last.token_ids), last.finish_reason) == (2, "length")
    assert len(engine.generate([[1] * 10], SamplingParams(max_tokens=50))[0].token_ids) == 1
    with pytest.raises(RequestRefused, match="11 tokens can never fit, the maximum context is 10"):
        engine.submit([1] * 11)
    assert not engine.has_work


def test_a_small_pool_limits_the_context() -> None:
    engine = build(num_blocks=3)
    assert engine.cache.max_context == 8
    with pytest.raises(RequestRefused, match="maximum context is 8"):
        engine.submit([1] * 9)
    completion = engine.generate([[1] * 5], SamplingParams(max_tokens=50))[0]
    assert len(completion.token_ids) == 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: empty"),
        ([1, 64], "wanted token ids of 0 to 63, got 64"),
        ([-1], "got -1"),
        ([1.5], "got 1.5"),
        ([True], "got True"),
        ("text", "needs a tokenizer"),
    ],
)
def test_bad_prompts_are_refused_when_submitted(prompt: object, message: str) -> None:
    engine = build()
    with pytest.raises(RequestRefused, match=message):
        engine.submit(prompt)  # type: ignore[arg-type]
    assert engine.stats().submitted == 0
    assert not engine.has_work


def test_generate_checks_every_request_before_it_runs_one() -> None:
    engine = build()
    with pytest.raises(RequestRefused, match="prompt: empty"):
        engine.generate([[1], []])
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling params"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(TypeError, match="list of prompts"):
        engine.generate("hello")
    engine.step()
    assert engine.stats().decode_steps == 0
    assert engine.stats().prefill_tokens == 0
    assert engine.generate([]) == []


def test_callers_do_not_take_each_others_events() -> None:
    engine = build()
    five = SamplingParams(max_tokens=5)
    submitted = engine.submit([1, 2], five)
    first, second = engine.stream([3], five), engine.stream([4], five)
    mixed = [next(first), next(second), *first, *second]
    assert len(mixed) == 10
    assert {event.request_id for event in mixed}.isdisjoint({submitted})
    engine.generate([[5]], five)
    assert [event.token_id for event in engine.step()] == list(alone((1, 2), five)[0])
    assert not engine.has_work


def test_closing_a_stream_cancels_the_request() -> None:
    engine = build()
    stream = engine.stream([3], SamplingParams(max_tokens=20))
    next(stream)
    stream.close()
    assert [event.finish_reason for event in engine.step()] == ["cancelled"]
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert engine.stats().running == 0


def test_nobody_overtakes() -> None:
    engine = build(num_blocks=9)  # eight blocks
    engine.submit([1] * 10, SamplingParams(max_tokens=9))  # three, and one more kept free for it
    engine.submit([2] * 20, SamplingParams(max_tokens=8))  # five: does not fit beside it
    engine.submit([3], SamplingParams(max_tokens=1))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 2), "the short request must not pass the long one"
    order = []
    while engine.has_work:
        order += [len(e.completion.prompt_ids) for e in engine.step() if e.completion]
    assert order == [10, 1, 20]
    assert engine.stats().preemptions == 0


def test_the_youngest_gives_way_and_says_the_same() -> None:
    engine = build(num_blocks=9)
    long = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
    batch = [(1, 2, 3, 4, 5, 6), (7, 8, 9), (10, 11)]
    ids = [engine.submit(prompt, long) for prompt in batch]
    done: list[int] = []
    completions = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                done.append(event.request_id)
                completions[event.request_id] = tuple(event.completion.token_ids)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert done[0] == ids[0], "the oldest is never pushed out"
    assert [completions[i] for i in ids] == [alone(prompt, long)[0] for prompt in batch]
    assert stats.prefill_tokens >= sum(map(len, batch)) + stats.recomputed_tokens


def test_long_prompts_come_in_chunks_while_others_decode() -> None:
    engine = build(max_step_tokens=5, num_blocks=30)
    engine.submit([1, 2], SamplingParams(max_tokens=9))
    engine.step()
    engine.submit([3] * 14, SamplingParams(max_tokens=2))
    seen = []
    for _ in range(4):
        before = engine.stats()
        engine.step()
        after = engine.stats()
        seen.append((after.prefill_tokens - before.prefill_tokens, after.decode_rows - before.decode_rows))
    # One of the five tokens a step is the decoding row's: 4 + 4 + 4 + 2 prompt tokens.
    assert seen == [(4, 1), (4, 1), (4, 1), (2, 1)]
    assert engine.stats().running == 2
    while engine.has_work:
        engine.step()
    assert engine.stats().prefill_chunks == 5


def test_a_row_leaves_in_the_step_of_its_last_token() -> None:
    engine = build()
    engine.submit([1, 2], SamplingParams(max_tokens=20))
    engine.step()
    engine.submit([3], SamplingParams(max_tokens=3))  # ends long before the one that was there
    rows = []
    for _ in range(4):
        engine.step()
        rows.append(engine.cache.rows)
    assert rows == [2, 2, 1, 1]


def test_several_prompts_share_a_step() -> None:
    engine = build(max_step_tokens=9, num_blocks=30)
    for prompt in ([1] * 4, [2] * 3, [3] * 6):
        engine.submit(prompt, SamplingParams(max_tokens=4))
    engine.step()
    assert engine.stats().prefill_tokens == 9
    assert engine.cache.rows == 2
    engine.step()
    assert engine.stats().prefill_tokens == 13
    assert engine.cache.rows == 3


def test_a_request_is_cancelled_wherever_it_is() -> None:
    engine = build(max_step_tokens=5, num_blocks=30)
    decoding, partly, waiting = (engine.submit(prompt) for prompt in ([1], [2] * 20, [3]))
    engine.step()
    assert engine.scheduler.prefill is not None
    for request_id in (waiting, partly, decoding):
        assert engine.cancel(request_id)
        assert not engine.cancel(request_id)
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert [event.finish_reason for event in engine.step()] == ["cancelled"] * 3
    assert not engine.has_work


def test_too_little_memory_is_refused_when_the_engine_is_built() -> None:
    with pytest.raises(OutOfBlocks, match="of the free memory on cpu holds 0 K/V blocks"):
        Engine.build(exact_model(), None, EngineConfig(memory_fraction=1e-12))
    with pytest.raises(ValueError, match="memory_fraction"):
        EngineConfig(memory_fraction=0)
    with pytest.raises(ValueError, match="max_rows: wanted 1 or more, got 0"):
        EngineConfig(max_rows=0)
    with pytest.raises(ValueError, match=r"max_step_tokens: wanted more than max_rows \(8\).*, got 8"):
        EngineConfig(max_step_tokens=8)
    engine = Engine.build(exact_model(), None)
    assert engine.cache.max_context == TINY.max_position
    assert engine.stats().total_blocks == 8 * TINY.max_position // 16


def test_text_streams_and_stops(default_engine: Engine) -> None:
    prompt = "The capital of France is"
    whole = default_engine.generate([prompt], SamplingParams(max_tokens=24))[0]
    assert whole.text.startswith(" Paris")
    events = list(default_engine.stream(prompt, SamplingParams(max_tokens=24)))
    assert "".join(event.text for event in events) == whole.text
    assert events[-1].completion == whole
    stop = whole.text[10:14]
    cut = default_engine.generate([prompt], SamplingParams(max_tokens=24, stop=[stop]))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_the_end_token_ends_the_text(default_engine: Engine) -> None:
    tokenizer = default_engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Say yes."}])
    completion = default_engine.generate([prompt], SamplingParams(max_tokens=120))[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in tokenizer.eos_ids
    assert "<|im_end|>" not in completion.text
    assert completion.text == tokenizer.decode(completion.token_ids)


@pytest.fixture(scope="module")
def default_model(default_model_folder: object) -> tuple[Transformer, Tokenizer]:
    from nanoserve_lab import load_model

    model, tokenizer = load_model(device="cpu", dtype=torch.float32)
    assert isinstance(tokenizer, Tokenizer)
    return model, tokenizer


@pytest.fixture
def default_engine(default_model: tuple[Transformer, Tokenizer], decode_step: str) -> Engine:
    engine = Engine.build(*default_model, EngineConfig(max_rows=2, max_context=256, width_multiple=128))
    assert engine.config.capture_decode == (decode_step == "recorded")
    return engine
