"""Models: configuration, checkpoints, the tokenizer and the transformer."""

from __future__ import annotations

from pathlib import Path

import torch

from nanoserve_lab.device import default_device
from nanoserve_lab.model.checkpoint import read_checkpoint
from nanoserve_lab.model.config import CheckpointError, ModelConfig
from nanoserve_lab.model.fetch import ModelMissing, default_model_folder, fetch_default_model, resolve_source
from nanoserve_lab.model.tokenizer import TextStream, Tokenizer
from nanoserve_lab.model.transformer import Transformer

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "ModelMissing",
    "TextStream",
    "Tokenizer",
    "Transformer",
    "default_model_folder",
    "fetch_default_model",
    "load_model",
    "resolve_source",
]


def load_model(
    source: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Transformer, Tokenizer]:
    """The model and tokenizer of ``source``: None (the default model), a model folder, or a hub id.

    ``device`` None is CUDA where there is one, else the CPU; ``dtype`` None is bfloat16 on CUDA and float32 elsewhere.
    The model is in evaluation mode and its weights take no gradients. Raises `CheckpointError` as `resolve_source`,
    `read_checkpoint` and `Tokenizer.from_folder` do.
    """
    device = default_device() if device is None else torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    folder = resolve_source(source)
    tokenizer = Tokenizer.from_folder(folder)
    config, state = read_checkpoint(folder, dtype, device)
    return Transformer.from_state(config, state), tokenizer
