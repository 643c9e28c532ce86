"""What a checkpoint's ``config.json`` says about the model, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be loaded. The message names the file, what was wanted and what was seen."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency ``theta`` and the scaling kind with its parameters.

    ``kind`` is one of ``default`` (Su et al. 2021), ``linear`` (positions divided by ``factor``) and ``llama3``
    (Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a linear blend between them).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama, Qwen2 or Qwen3 transformer. All sizes are counts of elements.

    ``qkv_bias`` adds a bias to the Q, K and V projections (Qwen2), ``o_bias`` to the output projection, and
    ``qk_norm`` an RMSNorm over each head of Q and K (Qwen3).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs")

    @property
    def q_size(self) -> int:
        """Width of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all K (or V) heads side by side."""
        return self.num_kv_heads * self.head_dim


#: The architectures one transformer covers, and what each adds to Llama.
ARCHITECTURES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
}

ROPE_KINDS = ("default", "linear", "llama3")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``; raises `CheckpointError` where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there; a model folder needs {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, saw {type(raw).__name__}")
    return raw


def read_config(path: Path) -> ModelConfig:
    """The checked configuration in the file ``path`` (a Hugging Face ``config.json``).

    Raises `CheckpointError` for a missing or broken file, an unknown architecture, RoPE kind or activation, and for
    features that the transformer does not have (quantised weights, sliding windows, partial rotary, MLP bias).
    """
    raw = read_json(path)
    try:
        return parse_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` from the fields of a ``config.json``; raises `CheckpointError` as `read_config` does."""
    architectures = raw.get("architectures") or []
    architecture = architectures[0] if architectures else None
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"architecture: wanted one of {', '.join(ARCHITECTURES)}, saw {architecture}")
    extra = ARCHITECTURES[architecture]
    _refuse_unsupported(raw)
    heads = _count(raw, "num_attention_heads")
    hidden = _count(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", False))
    head_dim = raw.get("head_dim")
    if head_dim is None and hidden % heads:
        raise CheckpointError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim")
    return ModelConfig(
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else heads,
        head_dim=_count(raw, "head_dim") if head_dim else hidden // heads,
        max_position=_count(raw, "max_position_embeddings"),
        rms_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_parse_rope(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=extra.get("qkv_bias", False) or attention_bias,
        o_bias=attention_bias,
        qk_norm=extra.get("qk_norm", False),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act: wanted silu, saw {activation}")
    for field in ("mlp_bias", "use_sliding_window", "quantization_config"):
        if raw.get(field):
            raise CheckpointError(f"{field}: not supported, saw {raw[field]}")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise CheckpointError(f"layer_types: wanted full_attention only, saw {sorted(set(raw['layer_types']))}")


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes `rope_parameters` (theta inside); earlier releases `rope_theta` and `rope_scaling`.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"RoPE kind: wanted one of {', '.join(ROPE_KINDS)}, saw {kind}")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor: wanted 1.0, saw {partial}")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _number(rope, "factor", None)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low, high = _number(rope, "low_freq_factor", None), _number(rope, "high_freq_factor", None)
    if not low < high:
        raise CheckpointError(f"llama3 RoPE: wanted low_freq_factor < high_freq_factor, saw {low} and {high}")
    original = _count(rope, "original_max_position_embeddings")
    return RopeConfig(theta, kind, factor, low, high, original)


def _count(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{field}: wanted a positive integer, saw {value!r}")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float | None) -> float:
    value = raw.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{field}: wanted a positive number, saw {value!r}")
    return float(value)
