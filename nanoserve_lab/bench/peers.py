"""The peer that the benches measure beside the engine: `transformers`, on the same weights, in the same process.

`transformers` is imported when a peer is made, and not before: the package does not need it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from nanoserve_lab.bench.timing import synchronize

ATTENTIONS = ("sdpa", "eager")
CACHES = ("dynamic", "static")


class PeerMissing(RuntimeError):
    """The peer's library is not installed. The message says how to install it."""


class Peer:
    """A `transformers` model on the weights of ``folder`` (Hugging Face layout); greedy, and it never stops early.

    Raises `PeerMissing` where `transformers` cannot be imported.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        try:
            transformers: Any = import_module("transformers")
        except ImportError:
            raise PeerMissing(
                "the comparison needs transformers, which is not installed: pip install 'nanoserve-lab[test]'"
            ) from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        # No end token: an engine that stopped early would do less work.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        # Release 5.24 renamed the argument.
        renamed = "cache" in inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if renamed else "past_key_values"

    def generate(self, input_ids: torch.Tensor, tokens: int, cache: Any = None, **options: Any) -> torch.Tensor:
        """``input_ids`` ``[rows, context]`` int64 continued by ``tokens`` tokens; what ``cache`` holds is not computed
        again. No ``cache``: `transformers` makes its own."""
        if cache is not None:
            options[self._cache_argument] = cache
        mask = torch.ones_like(input_ids)
        continued: torch.Tensor = self.model.generate(
            input_ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **options
        )
        return continued

    def first_token(self, prompt: Sequence[int], attention: str) -> int:
        """Prefill ``prompt`` with the ``attention`` implementation; the greedy first token."""
        self.model.set_attn_implementation(attention)
        return int(self.generate(torch.tensor([list(prompt)], device=self.model.device), 1)[0, -1])

    def decoder(self, prompt: Sequence[int], rows: int, attention: str, cache: str, steps: int) -> PeerDecoder:
        """A batch of ``rows`` times ``prompt``, prefilled, with room for ``steps`` decode steps.

        The prompt is computed once and its K and V copied to the other rows.
        """
        transformers: Any = import_module("transformers")
        self.model.set_attn_implementation(attention)
        one = transformers.DynamicCache(config=self.model.config)
        start = self.generate(torch.tensor([list(prompt)], device=self.model.device), 1, one)
        room = len(prompt) + steps + 1
        dynamic = cache == "dynamic"
        batch = (
            transformers.DynamicCache(config=self.model.config)
            if dynamic
            else transformers.StaticCache(self.model.config, room)
        )
        with torch.no_grad():
            for index, layer in enumerate(one.layers):
                batch.update(layer.keys.repeat(rows, 1, 1, 1), layer.values.repeat(rows, 1, 1, 1), index)
        return PeerDecoder(self, start.repeat(rows, 1), attention, batch)


class PeerDecoder:
    """A batch in the middle of decoding; ``sequences`` ``[rows, tokens]`` grow with every `seconds_per_step`."""

    def __init__(self, peer: Peer, sequences: torch.Tensor, attention: str, cache: Any) -> None:
        self.peer, self.sequences, self.attention, self.cache = peer, sequences, attention, cache

    def seconds_per_step(self, steps: int, dropped: int = 1) -> float:
        """Decode ``dropped + steps`` tokens in one call of ``generate``; the mean seconds of the last ``steps``.

        The dropped steps hold what a call prepares.
        """
        transformers: Any = import_module("transformers")
        times: list[float] = []
        device = self.sequences.device

        class Clock(transformers.StoppingCriteria):
            """Notes when each token is there."""

            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
                if len(times) + 1 in (dropped, dropped + steps):
                    synchronize(device)
                times.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool, device=device)

        self.peer.model.set_attn_implementation(self.attention)
        clock = transformers.StoppingCriteriaList([Clock()])
        self.sequences = self.peer.generate(self.sequences, dropped + steps, self.cache, stopping_criteria=clock)
        return (times[-1] - times[dropped - 1]) / steps
