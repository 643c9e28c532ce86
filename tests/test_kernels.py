"""The CPU kernels say what PyTorch's operations say, read no more than they must, and are recorded as operations."""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import STEPS, paged_run
from torch import Tensor
from torch.nn import functional as F

from nanoserve_lab import kernels
from nanoserve_lab.cache.attention import DecodeRead
from nanoserve_lab.kernels import attention, elementwise, jit, products
from nanoserve_lab.model import cpu
from nanoserve_lab.model.rope import rotate
from nanoserve_lab.model.tiny import TINY, tiny_model
from nanoserve_lab.model.transformer import RMSNorm, place, swiglu
from nanoserve_lab.recorders import tape_recorder

#: Largest error allowed, over 1 + the size of the number: what the dtype rounds to, a few times.
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 8e-3}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_close(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """``ours`` of ``dtype`` beside ``wanted``, computed in float64 from the same, rounded, inputs."""
    assert ours.dtype == dtype
    assert ours.shape == wanted.shape
    error = (ours.double() - wanted).abs() / (1 + wanted.abs())
    assert error.numel() == 0 or error.max() < CLOSE[dtype]


@dtypes
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 70),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    biased=st.booleans(),
    adding=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_product_is_a_product(
    dtype: torch.dtype, tokens: int, sizes: tuple[int, int], biased: bool, adding: bool, seed: int
) -> None:
    inner, outer = sizes
    x, weight = drawn(seed, tokens, inner).to(dtype), drawn(seed + 1, outer, inner).to(dtype)
    bias = drawn(seed + 2, outer).to(dtype) if biased else None
    add = drawn(seed + 3, tokens, outer).to(dtype) if adding else None
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if add is not None:
        wanted = wanted + add.double()
    check_close(kernels.linear(x, weight, bias, add), wanted, dtype)


@dtypes
def test_a_product_reads_inputs_that_are_views(dtype: torch.dtype) -> None:
    x, weight, add = drawn(0, 12, 9).to(dtype), drawn(1, 17, 9).to(dtype), drawn(2, 17, 6).to(dtype)
    wanted = x[::2].double() @ weight.double().T + add.T.double()
    check_close(kernels.linear(x[::2], weight, None, add.T), wanted, dtype)


@dtypes
@pytest.mark.parametrize("shape", [(1, 32), (5, 32), (3, 4, 33)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3, 0.0])
def test_the_norm_is_an_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    x, weight = (scale * drawn(0, *shape)).to(dtype), drawn(1, shape[-1]).to(dtype)
    wanted = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    check_close(kernels.rms_norm(x, weight, 1e-5), wanted, dtype)
    cut = torch.cat([x, x], dim=-2)[..., :: 2 if x.ndim == 2 else 1, :]
    wanted = F.rms_norm(cut.double(), weight.shape, weight.double(), 1e-5)
    check_close(kernels.rms_norm(cut, weight, 1e-5), wanted, dtype)


@dtypes
def test_the_rotation_turns_the_heads_of_a_wider_product(dtype: torch.dtype) -> None:
    qkv, cos, sin = drawn(0, 5, 7, 16).to(dtype), drawn(1, 5, 1, 16).to(dtype), drawn(2, 5, 1, 16).to(dtype)
    for heads in (qkv[:, :5], qkv):
        wanted = rotate(heads.double(), cos.double(), sin.double())
        check_close(kernels.rotate(heads, cos, sin), wanted, dtype)


@dtypes
def test_the_gate_is_swiglu_for_numbers_of_any_size(dtype: torch.dtype) -> None:
    sizes = torch.tensor([0.0, 1e-3, 1.0, 10.0, 100.0, 1e4])
    gate_up = torch.cat([sizes, -sizes, drawn(0, 24)]).to(dtype).view(2, 18)
    check_close(kernels.swiglu(gate_up), swiglu(gate_up.double()), dtype)


@dtypes
def test_keys_and_values_are_placed_as_the_plain_model_places_them(dtype: torch.dtype) -> None:
    qkv, slots = drawn(0, 5, 7, 8).to(dtype), torch.tensor([9, 0, 3, 11, 4])
    k, v = kernels.rotate(qkv[:, :5], *(drawn(i, 5, 1, 8).to(dtype) for i in (1, 2)))[:, 3:], qkv[:, 5:]
    wanted = [drawn(3, 12, 2, 8).to(dtype), drawn(4, 12, 2, 8).to(dtype)]
    placed = [cache.clone() for cache in wanted]
    place(*wanted, slots, k, v)
    kernels.place(*placed, slots, k, v)
    assert all(map(torch.equal, placed, wanted))


@dtypes
@pytest.mark.parametrize("size", [1, 7, elementwise.RUN, elementwise.RUN + 1, 3 * elementwise.RUN + 5])
def test_the_largest_is_the_first_of_the_largest(dtype: torch.dtype, size: int) -> None:
    scores = drawn(0, 9, size).to(dtype)
    scores[1] = -math.inf
    scores[2] = 0
    scores[3, size // 2 :] = 9
    scores[4] = -scores[4].abs()
    scores[5, -1] = math.inf
    for rows in (scores, scores[::2], scores[:1]):
        assert torch.equal(kernels.argmax(rows), rows.argmax(-1))
    scores[:, size // 3] = math.nan
    places = kernels.argmax(scores)
    assert ((places >= 0) & (places < size)).all()


@pytest.mark.parametrize("slot", [-1, 12])
def test_no_token_is_placed_outside_the_pool(slot: int) -> None:
    whole = torch.zeros(14, 2, 8)
    keys, values, k = whole[1:13], torch.zeros(12, 2, 8), torch.ones(2, 2, 8)
    with pytest.raises(IndexError, match="write_slots: a slot outside the K/V pool"):
        kernels.place(keys, values, torch.tensor([3, slot]), k, k)
    assert not whole[[0, 13]].any()


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    ends = torch.tensor([[1.0, m * 2.0**-10] for m in range(40)] + [[3e38, 3e38], [-1.0, -(2.0**-8)]]).bfloat16()
    wanted = (x.float() @ ends.float().T).bfloat16()
    assert torch.equal(kernels.linear(x, ends), wanted)
    assert wanted[0, 4] == 1.0, "a tie"
    assert wanted[0, 12] == 1 + 2.0**-6, "and another"


def test_what_is_no_number_stays_none() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([[1.0, float("nan"), 2.0, 3.0]], dtype=dtype)
        if dtype == torch.bfloat16:
            x.view(torch.int16)[0, 1] = 0x7FFF  # the one whose bits are closest to being rounded over
        ones = torch.ones(4, dtype=dtype)
        for result in (kernels.linear(x, ones.view(1, 4)), kernels.rms_norm(x, ones, 1e-5)):
            assert result.isnan().all()
        assert kernels.swiglu(x).isnan().tolist() == [[False, True]]
        infinite = torch.tensor([[float("inf"), 1.0]], dtype=dtype)
        assert kernels.linear(infinite, ones[:2].view(1, 2)).item() == float("inf")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_sums_are_rounded_to_bfloat16_as_torch_does(bits: int) -> None:
    """The sum of any two bfloat16 is a float32, exactly rounded, with bits below those that are kept."""
    a = torch.tensor([bits >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    b = torch.tensor([bits & 0xFFFF], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ours = kernels.linear(torch.stack([a, b], dim=1), torch.ones(1, 2, dtype=torch.bfloat16))
    wanted = (a.float() + b.float()).bfloat16().view(1, 1)
    assert ours.isnan().item() == wanted.isnan().item()
    if not wanted.isnan():
        assert ours.view(torch.int16).item() == wanted.view(torch.int16).item()


def layer(seed: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return drawn(seed, slots, kv_heads, head_dim).to(dtype), drawn(seed + 1, slots, kv_heads, head_dim).to(dtype)


@dtypes
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1), (2, 4)]),
    padding=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_the_read_equals_the_reference(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int], padding: int, seed: int
) -> None:
    kv_heads, group = heads
    width = max(lengths) + padding
    keys, values = layer(seed, 300, kv_heads, 8, dtype)
    q = drawn(seed + 2, len(lengths), kv_heads * group, 8).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    table = 1 + torch.randperm(299, generator=generator)[: len(lengths) * width].view(len(lengths), width)
    lens = torch.tensor(lengths)
    wanted = DecodeRead(table, lens)(q.double(), q, q, keys.double(), values.double())
    check_close(kernels.paged_attention(q, keys, values, table, lens), wanted, dtype)


@pytest.mark.parametrize("length", [attention.PART - 1, attention.PART, attention.PART + 1, 3 * attention.PART + 5])
def test_a_long_row_is_read_in_parts_that_are_joined(length: int) -> None:
    keys, values = layer(0, 1000, 2, 8, torch.float64)
    q = 5 * drawn(2, 2, 4, 8)
    table = torch.randperm(999, generator=torch.Generator().manual_seed(3))[:length].expand(2, -1).contiguous()
    lens = torch.tensor([length, 1])
    for larger in (0.0, 1e3, -1e3):  # the scores of the last tokens beside those of the first
        keys[table[0, -3:]] = larger * q[0, ::2]
        wanted = DecodeRead(table, lens)(q, q, q, keys, values)
        check_close(kernels.paged_attention(q, keys, values, table, lens), wanted, torch.float64)


@dtypes
def test_slots_past_a_row_are_not_read(dtype: torch.dtype) -> None:
    keys, values = layer(0, 20, 2, 8, dtype)
    q, lens = drawn(2, 3, 4, 8).to(dtype), torch.tensor([3, 0, 5])
    table = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(4))
    window = table[:, :6]  # on a wider table
    wanted = kernels.paged_attention(q, keys, values, window.contiguous(), lens)
    keys[0], values[0] = float("nan"), float("nan")
    window[torch.arange(6) >= lens[:, None]] = 0
    read = kernels.paged_attention(q, keys, values, window, lens)
    assert torch.equal(read, wanted)
    assert read[1].eq(0).all(), "a row of length 0"
    table[2, 1] = 0
    assert kernels.paged_attention(q, keys, values, window, lens)[2].isnan().any(), "a slot of the row itself"


def placed(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kernels.place(keys, values, slots, k, v)
    return keys + values


def steps() -> Iterator[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = drawn(0, 3, 16).to(dtype), drawn(1, 24, 16).to(dtype)
        yield "linear", lambda x, w: kernels.linear(x, w, None, x.repeat(1, 2)[:, :24]), (x, weight)
        yield "rms_norm", lambda x, w: kernels.rms_norm(x, w, 1e-5), (x, drawn(2, 16).to(dtype))
        yield "swiglu", kernels.swiglu, (x,)
        yield "argmax", kernels.argmax, (x,)
        yield "rotate", kernels.rotate, (x.view(3, 2, 8), *(drawn(i, 3, 1, 8).to(dtype) for i in (3, 4)))
        keys, values = layer(5, 30, 1, 8, dtype)
        lens = torch.tensor([2, 4, 1])
        table = torch.randint(0, 30, (3, 5), generator=torch.Generator().manual_seed(6))
        yield "place", placed, (keys, values, torch.tensor([4, 0, 17]), *(drawn(i, 3, 1, 8).to(dtype) for i in (7, 8)))
        yield "paged_attention", kernels.paged_attention, (x.view(3, 2, 8), keys, values, table, lens)


@pytest.mark.parametrize(
    ("name", "step", "args"), [*steps()], ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("arena", [False, True])
def test_a_recording_launches_the_kernel_alone(
    name: str, step: Any, args: tuple[Tensor, ...], arena: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = tuple(tensor.clone() for tensor in args)
    recording = tape_recorder(lambda *args: step(*args) * 2, args, arena=arena)
    assert [node.operation._schema.name for node in recording.nodes if "nanoserve_lab" in str(node.operation)] == [
        f"nanoserve_lab::{name}"
    ]
    for tensor in args:
        if tensor.is_floating_point():
            tensor.mul_(-1.5)
    with torch.inference_mode():
        wanted = step(*args) * 2
    # Neither the dispatcher nor the function that prepares a launch is asked again.
    monkeypatch.setattr(jit, "address", None)
    for module in (products, attention, elementwise):
        monkeypatch.setattr(module, "address", None)
    recording.replay()
    assert torch.equal(recording.output, wanted)


def test_a_recording_says_what_a_kernel_moves() -> None:
    x, weight = torch.ones(2, 16), torch.ones(24, 16)
    recording = tape_recorder(lambda x: kernels.linear(x, weight), (x,))
    launch = recording.launches().iloc[0]
    assert (launch.kind, launch.op) == ("matmul", "nanoserve_lab.linear.default")
    assert (launch.bytes_read, launch.bytes_written) == (x.nbytes + weight.nbytes, 2 * 24 * 4)
    q, (keys, values) = torch.ones(2, 4, 8), layer(0, 100, 2, 8, torch.float32)
    args = (q, keys, values, torch.ones(2, 5, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    k, slots = torch.ones(3, 2, 8), torch.tensor([5, 6, 7])
    launch = tape_recorder(placed, (keys, values, slots, k, k)).launches().iloc[0]
    assert (launch.kind, launch.bytes_read, launch.bytes_written) == ("index", 3 * 8 + 2 * k.nbytes, 2 * k.nbytes)
    launch = tape_recorder(kernels.paged_attention, args).launches().iloc[0]
    assert launch.kind == "attention"
    assert launch.bytes_read == q.nbytes + 10 * 8 + 2 * 8 + 10 * 2 * keys[0].nbytes


def test_the_kernels_know_shapes_without_data() -> None:
    x, weight = torch.empty(2, 16, device="meta"), torch.empty(24, 16, device="meta")
    assert kernels.linear(x, weight).shape == (2, 24)
    assert kernels.rms_norm(x, weight[0], 1e-5).shape == (2, 16)


@dtypes
def test_a_model_on_kernels_says_the_same(dtype: torch.dtype) -> None:
    config = replace(TINY, qkv_bias=True, o_bias=True, qk_norm=True)
    for tied in (False, True):
        model = tiny_model(replace(config, tie_embeddings=tied), dtype=dtype)
        assert cpu.runs_on_kernels(model)
        twin = cpu.kernel_model(model)
        assert twin is cpu.kernel_model(model)
        assert twin.embed.weight.data_ptr() == model.embed.weight.data_ptr()
        assert [m.kernel for m in twin.modules() if isinstance(m, RMSNorm)] == [kernels.rms_norm] * 9
        batch = [[1, 2, 3], [4, 5, 6, 7, 8]]
        forced = [[9] * STEPS] * 2
        for ours, plain in zip(paged_run(twin, batch, forced), paged_run(model, batch, forced), strict=True):
            assert ours.dtype == dtype
            error = (ours - plain).abs().max() / plain.abs().max()
            assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]


def test_without_numba_the_plain_operations_run_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"numba is not installed: .* pip install numba"):
        assert not cpu.runs_on_kernels(tiny_model())


def test_numba_is_imported_for_an_engine_on_a_cpu_and_not_before() -> None:
    told = (
        "import sys, nanoserve_lab\n"
        "from nanoserve_lab.engine import Engine, EngineConfig\n"
        "from nanoserve_lab.model.tiny import tiny_model\n"
        "Engine.build(tiny_model(), None, EngineConfig(max_context=32, optimize_cpu=False))\n"
        "print('numba' in sys.modules)\n"
        "Engine.build(tiny_model(), None, EngineConfig(max_context=32))\n"
        "print('numba' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert run.stdout.split() == ["False", "True"]


def test_kernels_run_on_torchs_number_of_threads() -> None:
    import numba

    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            kernels.linear(torch.ones(1, 4), torch.ones(4, 4))
            assert numba.get_num_threads() == min(threads, numba.config.NUMBA_NUM_THREADS)
    finally:
        torch.set_num_threads(before)


def doubled(number: float) -> float:
    """By a kernel that is compiled for it."""

    @jit.kernel()
    def double(x: Any) -> None:
        x[0] *= 2

    numbers = np.full(1, number, dtype=np.float64)
    double(numbers)
    return float(numbers[0])


def test_compiled_kernels_are_kept_under_a_name_of_all_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_LAB_CACHE", str(tmp_path))
    assert doubled(1) == 2
    kept = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.nbi")}
    assert kept == {("kernels", jit._sources())}
    sources = [Path(shutil.copy(path, tmp_path)) for path in Path(jit.__file__).parent.glob("*.py")]
    before = jit._sources()
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    assert jit._sources() == before
    for path in sources:
        path.write_bytes(path.read_bytes() + b"# changed")
        assert jit._sources() != before
        before = jit._sources()


def test_where_nothing_can_be_kept_the_kernels_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANOSERVE_LAB_CACHE", str(tmp_path / "file"))
    assert doubled(1) == 2


def test_a_replay_alone_keeps_what_its_kernels_read() -> None:
    def step(x: Tensor) -> Tensor:
        return kernels.swiglu(kernels.linear(x + 1, torch.full_like(x, 2.0).repeat(8, 1)))

    x = torch.ones(4, 64)
    recording = tape_recorder(step, (x,))
    replay, output = recording.replay, recording.output
    wanted = output.clone()
    x.fill_(5.0)
    del recording, x
    gc.collect()
    garbage = [torch.full((4, 64), float("nan")) for _ in range(50)]
    replay()
    assert not output.isnan().any()
    assert not torch.equal(output, wanted)
    del garbage
