"""Small random models: the object that lessons, the ledger and tests take apart where no trained weights are needed."""

from __future__ import annotations

import torch

from nanoserve_lab.model.config import ModelConfig
from nanoserve_lab.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    rms_eps=1e-5,
)


def tiny_model(
    config: ModelConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """A random model of ``config``'s shape, the same for the same ``seed`` on every machine.

    Weights are drawn in float64 on the CPU and then rounded to ``dtype``. They are large enough that greedy text
    wanders instead of repeating one token.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    state = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.1 * drawn
        elif len(shape) == 2 and name != "embed.weight":
            drawn = drawn * 1.5 * shape[1] ** -0.5
        state[name] = drawn.to(dtype=dtype, device=device)
    return Transformer.from_state(config, state)
