"""What to train, as `METHOD,key=value,...` says it, and the tensors that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from engine.attention.base import LayerMode
from engine.errors import CheckpointError
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What to train. `layers`, `intermediate`, `heads` ... describe the body; 0 takes the target's.

    slots: "fill_in" ([anchor, masks], slot s gives the token at anchor + s) or "next_token" (slot s
    gives the token at anchor + s + 1). causal and window hold for every layer; window 0 is none.
    rank is the Markov head's (0: none, which is DFlash).
    """

    name: str = "draft"
    method: str = "dflash"
    layers: int = 2
    block: int = 8
    taps: tuple[int, ...] = ()
    mask: int = -1
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    slots: str = "fill_in"
    causal: bool = False
    window: int = 0
    rank: int = 0
    confidence: bool = False

    @property
    def first_slot(self) -> int:
        """The slot whose output is the first proposal."""
        return 1 if self.slots == "fill_in" else 0

    @property
    def proposals(self) -> int:
        return self.block - self.first_slot

    @property
    def mode(self) -> LayerMode:
        return LayerMode(self.causal, self.window or None)


def parse_spec(text: str, target: ModelConfig) -> DraftSpec:
    """ "dspark,layers=2,rank=64,taps=1/8/14" -> a complete spec for `target`. Raises
    CheckpointError naming key, value and what is accepted."""
    method, *pairs = text.split(",")
    values: dict[str, Any] = {"name": method, "method": method}
    kinds = {f.name: f.type for f in fields(DraftSpec)}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in kinds or key == "method" or not value:
            known = ", ".join(sorted(set(kinds) - {"method"}))
            raise CheckpointError(f"draft option {pair!r} is not known; accepted: {known}")
        values[key] = _value(key, value, str(kinds[key]))
    if method == "dspark":
        values = {"rank": 64, "confidence": True} | values
    return complete_spec(DraftSpec(**values), target)


def _value(key: str, value: str, kind: str) -> Any:
    try:
        if kind == "int":
            return int(value)
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
        if kind == "str":
            return value
        return tuple(int(part) for part in value.split("/"))
    except (ValueError, KeyError):
        raise CheckpointError(f"draft option {key} = {value!r} is not {kind}") from None


def default_taps(layer_count: int, count: int = 5) -> tuple[int, ...]:
    """From the second layer to the third from last."""
    count = min(count, max(layer_count - 3, 1))
    if count == 1:
        return (layer_count // 2,)
    step = (layer_count - 4) / (count - 1)
    return tuple(sorted({round(1 + i * step) for i in range(count)}))


def complete_spec(spec: DraftSpec, c: ModelConfig) -> DraftSpec:
    """Fills what is left to the target and refuses what cannot be."""
    kv_heads, head_dim = c.kv_heads, c.head_dim
    if c.latent is not None:  # a draft has plain heads, a fourth of them with keys of their own
        kv_heads, head_dim = max(c.heads // 4, 1) if c.heads % 4 == 0 else c.heads, c.latent.nope
    spec = replace(
        spec,
        taps=spec.taps or default_taps(c.layer_count),
        intermediate=spec.intermediate or c.intermediate_size,
        heads=spec.heads or c.heads,
        kv_heads=spec.kv_heads or kv_heads,
        head_dim=spec.head_dim or head_dim,
    )
    reserved = {c.bos_token_id, c.pad_token_id, *c.eos_token_ids}
    ok_mask = 0 <= spec.mask < c.vocab_size and spec.mask not in reserved
    rising = all(a < b for a, b in zip(spec.taps, spec.taps[1:], strict=False))
    for good, key, accepted in (
        (spec.method in ("dflash", "dspark"), "method", "dflash, dspark"),
        (spec.slots in ("fill_in", "next_token"), "slots", "fill_in, next_token"),
        (spec.block >= 2, "block", "2 or more"),
        (spec.layers >= 1, "layers", "1 or more"),
        (ok_mask, "mask", f"an id in [0, {c.vocab_size}) that is not pad, bos or eos"),
        (rising and spec.taps[0] >= 0 and spec.taps[-1] < c.layer_count, "taps",
         f"rising layer ids in [0, {c.layer_count})"),
        (spec.heads % spec.kv_heads == 0, "kv_heads", f"a divisor of {spec.heads}"),
        ((spec.rank > 0) == (spec.method == "dspark"), "rank", "positive for dspark, 0 for dflash"),
        (spec.method == "dspark" or not spec.confidence, "confidence", "false for dflash"),
        (spec.method == "dspark" or spec.slots == "fill_in", "slots", "fill_in for dflash"),
    ):  # fmt: skip
        if not good:
            raise CheckpointError(
                f"draft {key} = {getattr(spec, key)!r} is not supported; accepted: {accepted}"
            )
    return spec


def shapes(spec: DraftSpec, c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the exported tensors."""
    d, q, kv = c.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner, v = spec.intermediate, c.vocab_size
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(spec.taps) * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(spec.layers):
        found |= {
            f"layers.{i}.input_layernorm.weight": (d,),
            f"layers.{i}.post_attention_layernorm.weight": (d,),
            f"layers.{i}.self_attn.q_proj.weight": (q, d),
            f"layers.{i}.self_attn.k_proj.weight": (kv, d),
            f"layers.{i}.self_attn.v_proj.weight": (kv, d),
            f"layers.{i}.self_attn.o_proj.weight": (d, q),
            f"layers.{i}.self_attn.q_norm.weight": (spec.head_dim,),
            f"layers.{i}.self_attn.k_norm.weight": (spec.head_dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, d),
            f"layers.{i}.mlp.up_proj.weight": (inner, d),
            f"layers.{i}.mlp.down_proj.weight": (d, inner),
        }
    if spec.rank:
        found["markov_head.markov_w1.weight"] = (v, spec.rank)
        found["markov_head.markov_w2.weight"] = (v, spec.rank)
    if spec.confidence:
        found["confidence_head.proj.weight"] = (1, d + spec.rank)
        found["confidence_head.proj.bias"] = (1,)
    return found
