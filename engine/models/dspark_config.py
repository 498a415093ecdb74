"""The explicit internal description of a DSpark draft, read from a DeepSpec style config.json: flat
keys, a DFlash body, a Markov head and perhaps a confidence head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError
from engine.models.config import ModelConfig
from engine.models.dflash_config import DFlashConfig, parse_dflash
from engine.models.fields import positive, refuse

_ARCHITECTURES = ["Qwen3DSparkModel"]


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """`next_token`: slot s predicts the token at anchor + s + 1 and all slots propose; otherwise
    slots are fill-in, as in DFlash. The confidence head reads the state of a slot, and the Markov
    row of the token before it when `confidence_with_markov`.
    """

    body: DFlashConfig
    next_token: bool
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool

    @property
    def first_slot(self) -> int:
        return 0 if self.next_token else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.body.block_size - self.first_slot

    @property
    def confidence_width(self) -> int:
        return self.body.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool):
        raise refuse(key, value, "true or false; there is no default")
    return value


def parse_dspark(config: Mapping[str, Any], target: ModelConfig) -> DSparkConfig:
    """Reads the config of a draft made for `target`. `sample_from_anchor` must be there: loaders
    disagree about its default. Raises CheckpointError naming key, value and what is accepted."""
    if config.get("architectures") != _ARCHITECTURES:
        raise refuse("architectures", config.get("architectures"), repr(_ARCHITECTURES))
    if config.get("markov_head_type") != "vanilla":
        raise refuse("markov_head_type", config.get("markov_head_type"), "vanilla")
    if "dflash_config" in config:
        raise refuse("dflash_config", config["dflash_config"], "no such key in this layout")
    nested = {"target_layer_ids": config.get("target_layer_ids")}
    if "mask_token_id" in config:
        nested["mask_token_id"] = config["mask_token_id"]
    same = {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    try:
        body = parse_dflash({**config, **same}, target)
    except CheckpointError as error:
        # The keys of this layout are flat.
        raise CheckpointError(str(error).replace("dflash_config.", "")) from None
    confidence = _flag(config, "enable_confidence_head")
    return DSparkConfig(
        body=body,
        next_token=_flag(config, "sample_from_anchor"),
        markov_rank=positive(config, "markov_rank"),
        confidence=confidence,
        confidence_with_markov=confidence and _flag(config, "confidence_head_with_markov"),
    )
