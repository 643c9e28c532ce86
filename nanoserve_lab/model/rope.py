"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and the scaling kinds of Llama and Qwen checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoserve_lab.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle that one position turns each pair by, ``[head_dim / 2]`` float64.

    ``default``: ``theta ** (-2 i / head_dim)``. ``linear``: divided by ``factor``. ``llama3``: wavelengths above
    ``original_max_position / low_freq_factor`` divided by ``factor``, those below
    ``original_max_position / high_freq_factor`` kept, blended linearly in between (Llama 3.1 reference code).
    """
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def rope_tables(rope: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for every position, two ``[max_position, head_dim]`` tensors of ``dtype`` on the CPU.

    The first half of the sine table is negative, so that turning a head is ``x * cos + x.roll(head_dim / 2) * sin``:
    the sign of ``rotate_half`` sits in the table instead of costing a launch.
    """
    positions = torch.arange(max_position, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, head_dim]`` turned by ``cos`` and ``sin`` ``[tokens, 1, head_dim]`` of `rope_tables`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
