"""Arrivals of requests with the moments of a published trace, from a seed.

The moments are those of the Azure LLM inference traces of 2023 (conversation and code), published with Splitwise (Patel
et al., ISCA 2024, arXiv 2311.18677) under CC-BY, computed from their files. Gaps between arrivals are drawn from a
gamma distribution, lengths from log-normal ones, all independent of each other: the traces' order in time is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Trace:
    """Moments of one trace: requests a second, the coefficient of variation of the gaps between them (1 is Poisson,
    more comes in bursts), and mean and standard deviation of the logarithms of prompt and output tokens."""

    name: str
    requests_per_s: float
    gap_cv: float
    prompt_log: tuple[float, float]
    output_log: tuple[float, float]


CONVERSATION = Trace("conversation", 5.5, 1.09, (6.63, 0.99), (5.02, 0.86))
CODE = Trace("code", 2.6, 13.0, (7.00, 1.36), (2.79, 0.85))
TRACES = {trace.name: trace for trace in (CONVERSATION, CODE)}


def arrivals(
    trace: Trace,
    count: int,
    seed: int,
    rate_scale: float = 1.0,
    length_scale: float = 1.0,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> pd.DataFrame:
    """``count`` requests of ``trace``, its rate multiplied by ``rate_scale`` and its lengths by ``length_scale``.

    Columns ``at_s`` (seconds from the start, rising), ``prompt_tokens`` and ``output_tokens`` (1 or more, cut to
    ``max_prompt`` and ``max_output``). Scaling changes no other draw: the same seed gives the same requests, nearer or
    farther, shorter or longer.
    """
    gaps, prompts, outputs = np.random.default_rng(seed).spawn(3)
    shape = trace.gap_cv**-2
    at_s = np.cumsum(gaps.gamma(shape, 1 / (shape * trace.requests_per_s * rate_scale), count))

    def lengths(rng: np.random.Generator, log: tuple[float, float], most: int | None) -> np.ndarray:
        drawn = np.rint(length_scale * rng.lognormal(*log, count)).astype(np.int64)
        return drawn.clip(1, most)

    return pd.DataFrame(
        {
            "at_s": at_s,
            "prompt_tokens": lengths(prompts, trace.prompt_log, max_prompt),
            "output_tokens": lengths(outputs, trace.output_log, max_output),
        }
    )
