"""Bytes of a checkpoint from its config.json, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.footprint import Footprint, check_made_for, footprint, read_footprint, rooms
from specwire.errors import SpecwireError

# The shape of an 8B: 36 layers, 8 KV heads of 128.
TARGET: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DRAFT = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]},
}
MLA = TARGET | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}


def of(config: dict[str, Any], kv: str = "auto", files: int = 0) -> Footprint:
    return footprint("--target", config, kv, files)


def test_an_8b_by_hand() -> None:
    target, draft = of(TARGET), of(DRAFT)
    assert target.kv_layer_bytes == 2 * 8 * 128 * 2 == 4096
    assert target.kv_bytes == 147_456 and draft.kv_bytes == 20_480
    assert target.embedding_bytes == 2 * 151936 * 4096 * 2
    assert draft.row_bytes(target) == 5 * 4096 * 2 == 40_960
    assert draft.max_draft_tokens == 15
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288 + 2 * 4096
    assert target.weights_bytes == 2 * (36 * layer + 4096) + target.embedding_bytes
    assert 16.3e9 < target.weights_bytes < 16.5e9
    # Five layers and the projection of the taps; embedding and head are the target's.
    assert draft.weights_bytes == 2 * (5 * layer + 4096 + 5 * 4096 * 4096)


def test_other_layouts() -> None:
    assert of(MLA).kv_layer_bytes == (512 + 64) * 2 and of(MLA, "fp8").kv_layer_bytes == 576
    assert of(TARGET, "fp8").kv_bytes == 73_728
    assert of(MLA).weights_bytes == 0, "not known from such a config"
    assert of(MLA, files=1234).weights_bytes == 1234
    tied = of(TARGET | {"tie_word_embeddings": True})
    assert 2 * tied.embedding_bytes == of(TARGET).embedding_bytes
    flat = {k: v for k, v in DRAFT.items() if k != "dflash_config"}
    dspark = flat | {"target_layer_ids": [1, 2], "block_size": 8, "sample_from_anchor": True}
    assert (of(dspark).taps, of(dspark).max_draft_tokens) == (2, 8)
    nested = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 2, 3]}
    assert of(nested | {"transformer_layer_config": TARGET}).taps == 3
    assert of(TARGET).taps == 0 and of(TARGET).row_bytes(of(TARGET)) == 0


def test_what_fits_by_hand() -> None:
    target = Footprint(10, 64, "a", 100, 2, weights_bytes=4000, embedding_bytes=1000)
    draft = Footprint(2, 64, "a", 100, 2, weights_bytes=500, embedding_bytes=1000, taps=3)
    found = {room.arrangement: room for room in rooms(target, draft, 100_000, 20_000)}
    assert {name: (r.weights_bytes, r.kv_bytes, r.tokens) for name, r in found.items()} == {
        "separate: target's device": (4000, 1000, 96),
        # The draft loads the target's embedding and head.
        "separate: draft's device": (1500, 200, 92),
        "separate, on one device": (5500, 1200, 78),
        "co-located, same_cache": (4500, 1200, 79),
        "co-located, pooled": (4500, 1200, 79),
        "co-located, private": (4500, 1200, 79),
    }
    other = Footprint(2, 64, "b", 100, 2, weights_bytes=500, embedding_bytes=1000, taps=3)
    assert not any("same_cache" in room.arrangement for room in rooms(target, other, 1, 1))
    assert all(room.tokens == 0 for room in rooms(target, draft, 1, 1))
    unknown = Footprint(2, 64, "b", 100, 2, weights_bytes=0, embedding_bytes=0)
    assert all(room.tokens is None for room in rooms(target, unknown, 10**9, 10**9))


def test_files_are_weighed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 50)
    assert read_footprint("--target", str(tmp_path)).weights_bytes == 150


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"target_layer_ids": 3}, "target_layer_ids"),
        ({"transformer_layer_config": [1]}, "config"),
        ({"dflash_config": 10**12}, "dflash_config"),
    ],
)
def test_what_is_no_config_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        of(TARGET | change)
    assert named in caught.value.metadata["field"] and "--target" in caught.value.metadata["field"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for text in ("[1]", "{", None):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        else:
            (tmp_path / "config.json").unlink()
        with pytest.raises(SpecwireError) as caught:
            read_footprint("--draft", str(tmp_path))
        assert caught.value.metadata["field"] == "--draft"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 32000}, "vocabulary is 32000; accepted: 151936, the target's"),
        ({"hidden_size": 2048}, "hidden size of the target is 2048; accepted: 4096, the target's"),
        ({"num_target_layers": 28}, "number of target layers is 28; accepted: 36, the target's"),
        (
            {"dflash_config": {"target_layer_ids": [1, 36]}},
            "highest layer read is 36; accepted: ids of the target's 36 layers",
        ),
    ],
)
def test_a_draft_for_another_target_is_refused(change: dict[str, Any], said: str) -> None:
    check_made_for("--draft", of(DRAFT), of(TARGET))
    with pytest.raises(SpecwireError) as caught:
        check_made_for("--draft", of(DRAFT | change), of(TARGET))
    assert caught.value.message == f"--draft config: {said}"


def test_drafts_of_other_widths_and_ordinary_ones_are_for_many_targets() -> None:
    """A draft with an own embedding may be narrower; ids of layers that a state enters go by one
    further; of an ordinary model the tokenizers tell."""
    entered = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 36]}
    narrow = TARGET | entered | {"hidden_size": 2048}
    check_made_for("--draft", of(narrow), of(TARGET))
    with pytest.raises(SpecwireError, match="hidden size of the target is 2048"):
        check_made_for("--draft", of(narrow | {"target_hidden_size": 2048}), of(TARGET))
    check_made_for("--draft", of(TARGET | {"vocab_size": 152064}), of(TARGET))
