"""nanoserve_lab: an LLM engine's decode step, from eager PyTorch to recorded CUDA graphs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve_lab.device import describe_device
    from nanoserve_lab.engine import Completion, Engine, EngineConfig, RequestRefused, SamplingParams
    from nanoserve_lab.model import load_model

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "RequestRefused",
    "SamplingParams",
    "describe_device",
    "load_model",
]

_HOME = {"describe_device": "device", "load_model": "model"}


def __getattr__(name: str) -> Any:
    # Names are looked up when they are first used, so that `nanoserve-lab --help` does not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'engine')}"), name)
    globals()[name] = value
    return value
