"""A DeepSeek target and its drafts in one process: latent drafts in pages like the target's or of a
layout of their own, plain and fp8, and a dense draft beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specwire.errors import Reason, SpecwireError
from specwire.v1 import target_pb2
from tests.engine.test_dflash import KV_HEADS
from tests.engine.test_dflash import write_draft as write_dense
from tests.engine.test_mla_draft import BLOCK, DFLASH, DSPARK, RANK, ROPE, write_draft
from tests.engine.tiny import LATENT, random_ids, write_model
from tests.service.colocated_harness import colocated_target, generate

# Bytes of a token in one layer: plain fp32, and fp8 with a scale and a bf16 key that turns.
PLAIN, FP8 = (RANK + ROPE) * 4, RANK + 4 + 2 * ROPE
ALIKE = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`alike` stores what the drafts store; `other` another rank."""
    directory = tmp_path_factory.mktemp("targets")
    for name, change in (("alike", ALIKE), ("other", {"kv_lora_rank": RANK + 8})):
        options = LATENT | {"first_k_dense_replace": 4} | change
        write_model(directory / name, "deepseek_v2", **options)
    return {name: directory / name for name in ("alike", "other")}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # target, settings, what the draft's attention must be
    "same_cache": (
        "alike",
        {"draft_kv_group": "same_cache"},
        {"policy": "inherit", "kv_dtype": "float32", "kv_bytes_per_token": 2 * PLAIN},
    ),
    "same_cache_fp8": (
        "alike",
        {"draft_kv_group": "same_cache", "kv_dtype": "fp8"},
        {"policy": "inherit", "kv_dtype": "fp8_ds_mla", "kv_bytes_per_token": 2 * FP8},
    ),
    "pooled_fp8_beside_plain": (
        "other",
        {"draft_kv_dtype": "fp8"},
        {"policy": "auto", "kv_dtype": "fp8_ds_mla", "kv_bytes_per_token": 2 * FP8},
    ),
    "pooled_plain_beside_fp8": (
        "other",
        {"kv_dtype": "fp8"},
        {"policy": "auto", "kv_dtype": "float32", "kv_bytes_per_token": 2 * PLAIN},
    ),
}


# Pages know no method: one of them in each of the layouts.
QUICK = [*(("dspark", case) for case in CASES), ("dflash", "same_cache_fp8")]
SLOW = [("dflash", case) for case in CASES if case != "same_cache_fp8"]


@pytest.mark.parametrize(
    ("method", "case"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)],
)
async def test_a_latent_draft_in_its_targets_pages(
    tmp_path: Path, targets: dict[str, Path], case: str, method: str
) -> None:
    """The text is that of plain decoding, and a cache hit brings the draft's context too."""
    name, settings, expected = CASES[case]
    write_draft(tmp_path, DSPARK if method == "dspark" else DFLASH)
    options: dict[str, Any] = settings | {"colocate": method, "prefill_chunk_tokens": 16}
    k, prompt = BLOCK - 1, random_ids(37)
    async with colocated_target(targets[name], tmp_path, **options) as running:
        told = (await running.drafter()).attention
        assert {key: getattr(told, key) for key in expected} == expected
        assert told.chosen == "TORCH_MLA"
        for temperature in (0.0, 0.8):
            plain = await generate(
                running.peer(), prompt, 24, 0, temperature=temperature, no_prefix_cache=True
            )
            first = await generate(running.peer(), prompt, 24, k, temperature=temperature)
            assert first.tokens == plain.tokens and first.proposals[0]
            turn = prompt + first.tokens
            hit = await generate(running.peer(), turn, 16, k, temperature=temperature)
            cold = await generate(
                running.peer(), turn, 16, k, temperature=temperature, no_prefix_cache=True
            )
            assert hit.cached >= 32 and (hit.tokens, hit.proposals) == (cold.tokens, cold.proposals)
        await running.idle()


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("other", {}, f"{PLAIN} against {PLAIN + 32} bytes a token"),
        ("alike", {"kv_dtype": "fp8", "draft_kv_dtype": "float32"}, f"{PLAIN} against {FP8} bytes"),
        ("alike", {"draft_kv_dtype": "fp8"}, f"{FP8} against {PLAIN} bytes"),
    ],
    ids=["rank", "plain_in_fp8", "fp8_in_plain"],
)
async def test_another_layout_in_the_targets_cache_is_refused_ab1(
    tmp_path: Path, targets: dict[str, Path], name: str, settings: dict[str, Any], named: str
) -> None:
    """AB-1: 584 bytes allocated, 512 viewed; here both are named before there is a page."""
    write_draft(tmp_path, DSPARK)
    options = {"colocate": "dspark", "draft_kv_group": "same_cache", **settings}
    options["draft_attention_backend"] = "TORCH_MLA"
    with pytest.raises(SpecwireError, match=named) as caught:
        async with colocated_target(targets[name], tmp_path, **options):
            pass
    assert caught.value.reason is Reason.BACKEND_UNAVAILABLE


async def test_a_dense_draft_beside_it_chooses_for_itself_ab2(
    tmp_path: Path, targets: dict[str, Path]
) -> None:
    """AB-2: what inherits is refused with the reason; unset, it takes a backend that it can run."""
    write_dense(tmp_path)
    prompt = random_ids(30)
    async with colocated_target(targets["alike"], tmp_path) as running:
        info = await running.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        told = (await running.drafter()).attention
        assert (info.attention.chosen, told.chosen) == ("TORCH_MLA", "TORCH_SDPA")
        assert told.policy == "auto" and told.kv_bytes_per_token == 3 * 2 * KV_HEADS * 24 * 4
        plain = await generate(running.peer(), prompt, 24, 0, no_prefix_cache=True)
        found = await generate(running.peer(), prompt, 24, 4, no_prefix_cache=True)
        assert found.tokens == plain.tokens and found.proposals[0]
    inherits = {"draft_attention_backend": "inherit"}
    with pytest.raises(SpecwireError, match="TORCH_MLA, inherited from the target"):
        async with colocated_target(targets["alike"], tmp_path, **inherits):
            pass
