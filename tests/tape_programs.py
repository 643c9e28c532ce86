"""Random programs of torch operations, for the tests of the tape.

A program is a list of ``(kind, i, j)``; each step takes two earlier values ``[4, 6]`` float32 and adds one. The values
at the start are the arguments ``a`` and ``b`` ``[4, 6]`` float32 and ``ids`` ``[4]`` int64 in ``0 .. 3``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

SHAPE = (4, 6)
Kind = Callable[[Tensor, Tensor, Tensor], Tensor]
Program = list[tuple[str, int, int]]


def _out(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result = torch.empty(SHAPE)
    torch.sub(x, y, out=result)
    return result


def _rows_written(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros(SHAPE)
    result[1:3] = x[1:3]
    result[0, 2] = 5.0
    result[ids[:1]] = 2.0
    return result


def _masked_set(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result = x.clone()
    result[y > 0] = -1.5
    return result


def _through_view(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    result.t()[2].mul_(y[0, 0])
    result.view(-1)[5:9].add_(1)
    return result


def _chunks(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    left, middle, right = x.chunk(3, dim=1)
    return torch.cat([right, left, y[:, 2:4] * middle], dim=1)


def _argument_written(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    # Torch itself does not write into an expanded tensor.
    return (x.clone() if 0 in x.stride() else x).mul_(0.5)


def _reshaped_in_place(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result = x.clone()
    return result.unsqueeze_(0).squeeze_(0).t_().t()


def _top(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    values, where = x.topk(3, dim=1)
    return torch.cat([values, where.float()], dim=1)


def _sorted(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    values, where = x.sort(dim=1, stable=True)
    return values + y.gather(1, where)


def _max_both(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    values, where = x.max(dim=0)
    return y + values * where


def _zero_sized(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([x[:0], y, x[:, :0].sum(1, keepdim=True)[:0].expand(0, 6)])


def _scattered(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(SHAPE).scatter_add_(0, ids[:, None].expand(SHAPE), x)


def _attended(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    q, k = (t.reshape(1, 2, 4, 3) for t in (x, y))
    return F.scaled_dot_product_attention(q, k, k).reshape(SHAPE)


def _as_complex(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    one, other = (torch.view_as_complex(t.contiguous().view(4, 3, 2)) for t in (x, y))
    return torch.view_as_real(one * other.conj()).reshape(SHAPE)


KINDS: dict[str, Kind] = {
    "add": lambda x, y, ids: x + y,
    "add_scaled": lambda x, y, ids: torch.add(x, y, alpha=0.5),
    "add_number": lambda x, y, ids: x + 1,
    "sub_from_number": lambda x, y, ids: 2.5 - x,
    "mul": lambda x, y, ids: x * y,
    "div": lambda x, y, ids: x / y,
    "div_floor": lambda x, y, ids: torch.div(x, y, rounding_mode="floor"),
    "remainder": lambda x, y, ids: x % 1.5,
    "pow": lambda x, y, ids: x**2,
    "pow_of_number": lambda x, y, ids: 2**x,
    "neg": lambda x, y, ids: -x,
    "abs": lambda x, y, ids: x.abs(),
    "exp": lambda x, y, ids: x.exp(),
    "log1p": lambda x, y, ids: x.abs().log1p(),
    "sqrt": lambda x, y, ids: x.abs().sqrt(),
    "rsqrt": lambda x, y, ids: x.rsqrt(),
    "sin_cos": lambda x, y, ids: x.sin() + y.cos(),
    "tanh": lambda x, y, ids: x.tanh(),
    "sigmoid": lambda x, y, ids: x.sigmoid(),
    "erf": lambda x, y, ids: torch.special.erf(x),
    "relu": lambda x, y, ids: x.relu(),
    "gelu": lambda x, y, ids: F.gelu(x),
    "silu": lambda x, y, ids: F.silu(x),
    "leaky_relu": lambda x, y, ids: F.leaky_relu(x, 0.1),
    "softplus": lambda x, y, ids: F.softplus(x),
    "glu": lambda x, y, ids: F.glu(torch.cat([x, y], 1)),
    "clamp": lambda x, y, ids: x.clamp(-1, 1),
    "round": lambda x, y, ids: x.round(),
    "maximum": lambda x, y, ids: torch.maximum(x, y),
    "where": lambda x, y, ids: torch.where(x > y, x, 0.0),
    "lerp": lambda x, y, ids: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y, ids: torch.addcmul(x, y, y, value=2),
    "compare": lambda x, y, ids: ((x >= y) & (x < 1)).float(),
    "is_nan": lambda x, y, ids: x.isnan().to(x.dtype),
    "sum": lambda x, y, ids: x.sum(1, keepdim=True).expand(SHAPE),
    "mean": lambda x, y, ids: x.mean(0) + y,
    "var": lambda x, y, ids: x.var(1, keepdim=True) * y,
    "norm": lambda x, y, ids: x.norm(dim=1, keepdim=True) + y,
    "amax": lambda x, y, ids: x.amax(1, keepdim=True) - y,
    "argmax": lambda x, y, ids: x.argmax(1, keepdim=True) + y,
    "max_with_index": _max_both,
    "all_any": lambda x, y, ids: (x > 0).all(1, keepdim=True) + (y > 0).any().float() + x,
    "cumsum": lambda x, y, ids: x.cumsum(1),
    "logsumexp": lambda x, y, ids: x.logsumexp(1, keepdim=True) + y,
    "softmax": lambda x, y, ids: x.softmax(-1),
    "log_softmax": lambda x, y, ids: x.log_softmax(0),
    "topk": _top,
    "sort": _sorted,
    "mm": lambda x, y, ids: x @ y.t() @ y,
    "bmm": lambda x, y, ids: (x.reshape(2, 2, 6) @ y.reshape(2, 6, 2) @ y.reshape(2, 2, 6)).view(SHAPE),
    "linear": lambda x, y, ids: F.linear(x, y, y[:, 0]) @ y,
    "linear_3d": lambda x, y, ids: F.linear(x[None], y.t() @ y, y[0])[0],
    "einsum": lambda x, y, ids: torch.einsum("ij,kj,kl->il", x, y, y),
    "addmm": lambda x, y, ids: torch.addmm(x, y @ x.t(), y, beta=0.5),
    "attention": _attended,
    "rms_norm": lambda x, y, ids: F.rms_norm(x, (6,), y[0]),
    "layer_norm": lambda x, y, ids: F.layer_norm(x, (6,), y[0], y[1]),
    "group_norm": lambda x, y, ids: F.group_norm(x[None], 2, y[:, 0])[0],
    "conv1d": lambda x, y, ids: F.conv1d(x[None], y.reshape(4, 6, 1)[:, :4].contiguous())[0],
    "max_pool": lambda x, y, ids: F.max_pool1d(x, 3, stride=1, padding=1),
    "avg_pool": lambda x, y, ids: F.avg_pool1d(x, 3, stride=1, padding=1),
    "pad": lambda x, y, ids: F.pad(x, (1, 1))[:, 1:-1] + F.pad(y, (2, 0), value=3.0)[:, :6],
    "interpolate": lambda x, y, ids: F.interpolate(x[None], scale_factor=2)[0, :, ::2],
    "embedding": lambda x, y, ids: F.embedding(ids, x),
    "index": lambda x, y, ids: x[ids] + y[:, ids].sum(1, keepdim=True),
    "index_two": lambda x, y, ids: x[ids, ids][:, None] + y,
    "index_select": lambda x, y, ids: x.index_select(0, ids),
    "gather": lambda x, y, ids: x.gather(0, ids[:, None].expand(SHAPE)),
    "take_along": lambda x, y, ids: x.take_along_dim(y.argsort(1), 1),
    "index_put": lambda x, y, ids: x.index_put((ids[:1],), y[:1]),
    "index_copy": lambda x, y, ids: x.index_copy(0, ids[:1], y[:1]),
    "index_add": lambda x, y, ids: x.index_add(0, ids, y),
    "scatter_add": _scattered,
    "masked_fill": lambda x, y, ids: x.masked_fill(y > 0, float("-inf")),
    "masked_set": _masked_set,
    "rows_written": _rows_written,
    "in_place": lambda x, y, ids: x.clone().add_(y).mul_(2).clamp_(-3, 3),
    "through_view": _through_view,
    "in_place_view": _reshaped_in_place,
    "out": _out,
    "argument_written": _argument_written,
    "clone": lambda x, y, ids: x.clone(),
    "transposed_clone": lambda x, y, ids: x.t().clone().t(),
    "contiguous": lambda x, y, ids: x.t().contiguous().view(SHAPE),
    "flip": lambda x, y, ids: x.flip(0),
    "roll": lambda x, y, ids: x.roll(2, dims=1),
    "permuted": lambda x, y, ids: x.reshape(2, 2, 6).permute(1, 0, 2).reshape(SHAPE),
    "repeat": lambda x, y, ids: x[:2].repeat(2, 1) + y[:1].expand(SHAPE),
    "stack": lambda x, y, ids: torch.stack([x, y], 1)[:, 1],
    "chunks": _chunks,
    "narrow_view": lambda x, y, ids: x[:, 1:5].mul(2).sum(1, keepdim=True) - y,
    "tril": lambda x, y, ids: x.tril() + y.triu(1),
    "zero_sized": _zero_sized,
    "full": lambda x, y, ids: x + torch.full(SHAPE, 0.25) + torch.ones(6),
    "arange": lambda x, y, ids: x + torch.arange(6) + torch.linspace(0, 1, 4)[:, None],
    "like": lambda x, y, ids: torch.zeros_like(x) + torch.full_like(y, 2.0) + y.new_ones(6),
    "to_double": lambda x, y, ids: (x.double() / 3).float(),
    "to_bfloat16": lambda x, y, ids: (x.bfloat16() * y.bfloat16()).float(),
    "to_int": lambda x, y, ids: (x.nan_to_num().clamp(-9, 9).int() + ids[:, None]).float(),
    "bits": lambda x, y, ids: ((ids << 2) ^ 5).bitwise_and(7)[:, None] + x,
    "bucketize": lambda x, y, ids: torch.bucketize(x, y.nan_to_num()[0].sort().values).float(),
    "complex": _as_complex,
    "random": lambda x, y, ids: x + torch.rand(SHAPE) - torch.randn_like(y),
    "dropout": lambda x, y, ids: F.dropout(x, 0.3, training=True),
    "bernoulli": lambda x, y, ids: x * torch.bernoulli(y.sigmoid().nan_to_num()),
    "random_in_place": lambda x, y, ids: torch.empty(SHAPE).uniform_(-1, 1) + x,
    "multinomial": lambda x, y, ids: torch.multinomial(x.nan_to_num().softmax(1), 1) + y,
    "randint": lambda x, y, ids: x + torch.randint(0, 9, SHAPE),
}  # fmt: skip

#: Kinds that a tape has to refuse, each with a word of the refusal.
REFUSED: dict[str, tuple[Kind, str]] = {
    "item": (lambda x, y, ids: x * y.sum().item(), "item"),
    "branch": (lambda x, y, ids: x if x.sum() > 0 else y, "__bool__"),
    "nonzero": (lambda x, y, ids: x + y.nonzero().sum(), "aten.nonzero.default"),
    "mask": (lambda x, y, ids: x + y[y > 0].sum(), "aten.index.Tensor"),
    "masked_select": (lambda x, y, ids: x + y.masked_select(y > 0).sum(), "aten.masked_select.default"),
    "unique": (lambda x, y, ids: x + y.unique().sum(), "unique"),
    "host_data": (lambda x, y, ids: x + torch.tensor([1.0, 2, 3, 4, 5, 6]), "aten.lift_fresh.default"),
    "index_by_tensor": (lambda x, y, ids: x + y[ids[0]], "item"),
}


def run_program(program: Program, a: Tensor, b: Tensor, ids: Tensor) -> tuple[Any, ...]:
    """The program's last three values, and a view of the last."""
    values = [a, b]
    for kind, i, j in program:
        function = KINDS[kind] if kind in KINDS else REFUSED[kind][0]
        values.append(function(values[i % len(values)], values[j % len(values)], ids))
        assert (values[-1].shape, values[-1].dtype) == (SHAPE, torch.float32), kind
    return (*values[-3:], values[-1][1:])


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of a program: ``a``, ``b`` and ``ids``."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    return a, b, torch.randint(0, 4, (4,), generator=generator)


def steps(kinds: list[str]) -> st.SearchStrategy[tuple[str, int, int]]:
    """Steps of programs, of ``kinds``."""
    return st.tuples(st.sampled_from(kinds), st.integers(0, 20), st.integers(0, 20))


PROGRAMS = st.lists(steps(sorted(KINDS)), min_size=1, max_size=10)
