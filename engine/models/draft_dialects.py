"""The layouts that block drafts are published in, each mapped to the one `DFlashConfig`.

z-lab        architectures ["DFlashDraftModel"], keys in `dflash_config`: DFlash, fill-in slots
DeepSpec     architectures ["Qwen3DSparkModel"], flat keys: DSpark, and DFlash with markov_rank 0
speculators  `speculators_model_type` dflash or dspark, the body in `transformer_layer_config`

Nothing is inferred from a name. A key whose default differs between the loaders that read these
files (slot mode, theta, heads, head_dim, mask, taps, head types) must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError
from engine.models.config import ModelConfig
from engine.models.dflash_config import (
    MARKOV_HEADS,
    ConfidenceConfig,
    DFlashConfig,
    MarkovConfig,
)
from engine.models.draft_body import Layout, required_flag
from engine.models.draft_body import read as read_body
from engine.models.fields import positive, refuse

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """What a draft is compared with. `architectures` as the target's config.json has them."""

    model: ModelConfig
    architectures: Sequence[str] = ()


def parse_draft(config: Any, target: Target, method: str) -> DFlashConfig:
    """Reads the config.json of a draft made for `target`, to be run by `method`, dflash or dspark:
    a checkpoint with a Markov head is a DSpark, one without a DFlash. Raises CheckpointError naming
    key, value and what is accepted.
    """
    found = read_draft(config, target)
    if (found.markov is not None) != (method == "dspark"):
        has = "a Markov head" if found.markov else "no Markov head"
        accepted = "one with a Markov head" if method == "dspark" else "one without a Markov head"
        named = config.get("architectures")
        raise CheckpointError(
            f"config architectures = {named!r}, markov_rank = {config.get('markov_rank')!r}: "
            f"a draft with {has}; accepted by {method}: {accepted}"
        )
    return found


def read_draft(config: Any, target: Target) -> DFlashConfig:
    """`parse_draft` for whoever runs no method. Raises CheckpointError."""
    if not isinstance(config, Mapping):
        raise CheckpointError("config.json is not a JSON object")
    return _reader(config)(config, target)


def _reader(config: Config) -> Callable[[Config, Target], DFlashConfig]:
    if "speculators_model_type" in config:
        return _speculators
    named = config.get("architectures")
    if named == ["DFlashDraftModel"]:
        return _zlab
    if named == ["Qwen3DSparkModel"]:
        return _deepspec
    accepted = "['DFlashDraftModel'], ['Qwen3DSparkModel'], or a speculators_model_type"
    raise refuse("architectures", named, accepted)


def _zlab(config: Config, target: Target) -> DFlashConfig:
    nested = config.get("dflash_config")
    if not isinstance(nested, Mapping):
        raise CheckpointError("config dflash_config is missing: not a DFlash checkpoint")
    _only(nested, "attention_sink_bias", False)
    _only(nested, "attention_value_scale", 1.0)
    _only(nested, "use_aux_hidden_state", True)
    _only(nested, "sample_from_anchor", False)
    _only(nested, "shift_label", False)
    _only(nested, "projector_type", "dflash")
    _only(nested, "input_embedding_scale", 1.0)
    _only(nested, "output_multiplier", 1.0)
    _only(nested, "final_logit_softcapping", None)
    if config.get("hidden_size") != target.model.hidden_size:  # embedding and head are the target's
        accepted = f"{target.model.hidden_size}, the target's"
        raise refuse("hidden_size", config.get("hidden_size"), accepted)
    return read_body(
        config,
        target.model,
        Layout(
            body=config,
            taps=_plain_taps(nested, "dflash_config."),
            mask=_either(nested, config, "mask_token_id"),
            block=_either(nested, config, "block_size"),
            next_token=False,
            draft_vocab_size=config.get("draft_vocab_size", target.model.vocab_size),
            prefix="dflash_config.",
        ),
    )


def _deepspec(config: Config, target: Target) -> DFlashConfig:
    if "dflash_config" in config:
        raise refuse("dflash_config", config["dflash_config"], "no such key in this layout")
    return read_body(
        config,
        target.model,
        Layout(
            body=config,
            taps=_plain_taps(config, ""),
            mask=config.get("mask_token_id"),
            block=config.get("block_size"),
            next_token=required_flag(config, "sample_from_anchor"),
            draft_vocab_size=config.get("draft_vocab_size", target.model.vocab_size),
        ),
        *_heads(config),
    )


_SPECULATORS = {
    "dflash": (["DFlashSpeculator"], ["DFlashDraftModel"]),
    "dspark": (["DSparkSpeculator"], ["DSparkDraftModel"]),
}


def _speculators(config: Config, target: Target) -> DFlashConfig:
    kind, named = config["speculators_model_type"], config.get("architectures")
    if not isinstance(kind, str) or kind not in _SPECULATORS:
        raise refuse("speculators_model_type", kind, ", ".join(_SPECULATORS))
    if named not in _SPECULATORS[kind]:
        raise refuse("architectures", named, " or ".join(map(str, _SPECULATORS[kind])))
    body = config.get("transformer_layer_config")
    if not isinstance(body, Mapping):
        raise refuse("transformer_layer_config", body, "an object")
    if body.get("model_type") not in ("qwen3", "llama"):
        key = "transformer_layer_config.model_type"
        raise refuse(key, body.get("model_type"), "qwen3, llama")
    _only(config, "projector_type", "dflash")
    _only(config, "shift_label", False)
    _only(config, "dflash_config", None)
    _check_verifier(config, kind, target)
    return read_body(
        config,
        target.model,
        Layout(
            body=body,
            taps=_entered_taps(config),
            mask=config.get("mask_token_id"),
            block=config.get("block_size"),
            next_token=required_flag(config, "sample_from_anchor"),
            draft_vocab_size=config.get("draft_vocab_size"),
            body_prefix="transformer_layer_config.",
        ),
        *(_heads(config) if kind == "dspark" else ()),
    )


def _check_verifier(config: Config, kind: str, target: Target) -> None:
    """`speculators_config`: for what model it was trained. A name is a name and is not compared."""
    section = config.get("speculators_config")
    if not isinstance(section, Mapping):
        raise refuse("speculators_config", section, "an object with a verifier")
    _only(section, "algorithm", kind)
    verifier = section.get("verifier")
    if not isinstance(verifier, Mapping):
        raise refuse("speculators_config.verifier", verifier, "an object")
    named, expected = verifier.get("architectures"), list(target.architectures)
    if named and expected and named != expected:
        accepted = f"{expected}, the target's"
        raise refuse("speculators_config.verifier.architectures", named, accepted)


def _heads(config: Config) -> tuple[MarkovConfig | None, ConfidenceConfig | None]:
    """Markov and confidence head; none with `markov_rank` 0, which makes a DFlash of it."""
    confidence = required_flag(config, "enable_confidence_head")
    rank = config.get("markov_rank")
    if type(rank) is int and rank == 0:
        if confidence:
            raise refuse("enable_confidence_head", True, "false where markov_rank is 0")
        return None, None
    rank, kind = positive(config, "markov_rank"), config.get("markov_head_type")
    if kind not in MARKOV_HEADS:
        raise refuse("markov_head_type", kind, ", ".join(MARKOV_HEADS))
    if not confidence:
        return MarkovConfig(kind, rank), None
    with_markov = required_flag(config, "confidence_head_with_markov")
    return MarkovConfig(kind, rank), ConfidenceConfig(with_markov)


def _plain_taps(values: Config, prefix: str) -> tuple[str, Any, int]:
    """Ids that name a layer by its output, as we do."""
    return f"{prefix}target_layer_ids", values.get("target_layer_ids"), 0


def _entered_taps(config: Config) -> tuple[str, Any, int]:
    """Ids of the layer that the state enters: i is the output of layer i - 1."""
    return "aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"), 1


def _either(nested: Config, config: Config, key: str) -> Any:
    """A key that older files have on top and newer ones in `dflash_config`."""
    inside, outside = nested.get(key), config.get(key)
    if inside is not None and outside is not None and inside != outside:
        raise CheckpointError(f"config gives conflicting {key}: {outside!r} and {inside!r}")
    return outside if inside is None else inside


def _only(values: Config, key: str, accepted: Any) -> None:
    """Refuses what the engine does not do; null is absent."""
    if values.get(key) not in (None, accepted):
        raise refuse(key, values[key], repr(accepted))
