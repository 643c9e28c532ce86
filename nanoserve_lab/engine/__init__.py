"""The engine: requests in, tokens out."""

from nanoserve_lab.engine.config import EngineConfig, EngineStats
from nanoserve_lab.engine.engine import Engine
from nanoserve_lab.engine.request import Completion, RequestRefused, SamplingParams, TokenEvent, TokenLogprobs

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestRefused",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
]
