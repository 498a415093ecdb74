"""Latent block drafts on Triton's kernels against torch's operators, in a service of their own and
in their target's pages; `interpreted` runs the checks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_svc.colocated import BlockDrafter
from draft_svc.methods.base import Request
from draft_svc.methods.dflash import DFlashMethod
from engine.api import Ask, Item, Sampling
from engine.attention.request import KVGroup
from engine.colocated import TapRows
from engine.config import EngineConfig
from engine.kv.pool import PageTable
from engine.models.dflash import DFlashModel
from engine.runner import NativeEngine
from tests.engine.test_mla_draft import BLOCK, DFLASH, DSPARK, MASK, RANK, ROPE, write_draft
from tests.engine.tiny import LATENT, write_model
from tests.service.block_draft_check import block, opened, same, written
from tests.service.colocated_draft_check import pair, rounds, text_of
from tests.service.test_draft_dialects import load

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, seed=2**63 + 5, top_k=20, top_p=0.9)
PLAIN: dict[str, Any] = {"kernels": "torch", "attention_backend": "TORCH_MLA"}
TRITON: dict[str, Any] = {"kernels": "triton", "attention_backend": "TRITON_MLA"}
PAGE = 4
# Beside targets of one layer.
ONE_TAP: dict[str, Any] = {"num_target_layers": 1, "target_layer_ids": [0]}
ONE_DSPARK = DSPARK | ONE_TAP
ONE_DFLASH = DFLASH | ONE_TAP | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]}}
# Bytes of a token in one layer: fp32, and fp8 with a scale and a bf16 key that turns.
BYTES = {"auto": (RANK + ROPE) * 4, "fp8": RANK + 4 + 2 * ROPE}


@contextmanager
def checkpoints(config: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
    """A target that stores what the draft does, and the draft."""
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        alike = {"first_k_dense_replace": 4, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
        layers = {"num_hidden_layers": config["num_target_layers"]}
        write_model(target, "deepseek_v2", **LATENT | alike | layers)
        write_draft(draft, config)
        yield target, draft


def method_of(config: dict[str, Any]) -> str:
    return "dspark" if "markov_rank" in config else "dflash"


def service(target: Path, draft: Path, config: dict[str, Any], **settings: Any) -> DFlashMethod:
    found = load(draft, target, method_of(config), **settings)
    assert isinstance(found, DFlashMethod)
    return found


# -- a service of its own ------------------------------------------------------------------------


def proposals(config: dict[str, Any], own: dict[str, Any] = TRITON, count: int = 2) -> None:
    with checkpoints(config) as (target, draft):
        plain, fused = (service(target, draft, config, **how) for how in (PLAIN, own))
        assert fused.info.attention is not None and fused._stepper is not None
        assert fused.info.attention.chosen == own["attention_backend"]
        assert fused._stepper.fixed == (own is TRITON)
        same("latent", plain, fused, count)


def check_dspark_proposes_what_torch_does() -> None:
    proposals(DSPARK)


def check_dflash_proposes_what_torch_does() -> None:
    proposals(DFLASH, count=3)


def check_markov_heads() -> None:
    for kind in ("gated", "rnn"):
        proposals(DSPARK | {"markov_head_type": kind})


def check_a_backend_without_a_fixed_form() -> None:
    proposals(DSPARK, TRITON | {"attention_backend": "TORCH_MLA"})


def check_an_fp8_layout() -> None:
    """Between two values of the format either is right, so torch's tokens are not asked for: logits
    near its own are, and one proposal whatever the company."""
    with checkpoints(DSPARK) as (target, draft):
        plain, fused = (
            service(target, draft, DSPARK, kv_dtype="fp8", **how) for how in (PLAIN, TRITON)
        )
        attention = fused.info.attention
        assert attention is not None and attention.kv_bytes_per_token == 2 * BYTES["fp8"]
        ours, theirs = ([opened(m, n, GREEDY) for n in (15, 6)] for m in (fused, plain))
        for own, other in zip(ours, theirs, strict=True):
            found, wanted = written(fused, own), written(plain, other)
            far = (found - wanted).abs() > 2**-3 * wanted.abs() + 1e-2
            # The interpreter's fp8 loses the carry where a value rounds up to a power of two.
            assert float(far.float().mean()) < 0.03
        together = fused.propose([Request(context, 3) for context in ours])
        alone = [fused.propose([Request(context, 3)])[0] for context in ours]
        assert together == alone and all(len(draft.ids) == 3 for draft in together)


# -- in the target's pages -----------------------------------------------------------------------


def colocated(
    target: Path, draft: Path, method: str, kv: str, **how: Any
) -> tuple[NativeEngine, BlockDrafter]:
    config = EngineConfig(
        dtype="float32", kv_pages=32, max_length=64, page_tokens=PAGE, kv_dtype=kv, **how
    )
    return pair(target, draft, method, config, kv_group="same_cache")


def watched(drafter: BlockDrafter) -> dict[int, Tensor]:
    """Rows that the drafter of one session is given, by position."""
    rows: dict[int, Tensor] = {}
    write = drafter.write

    def keep(given: TapRows) -> None:
        for at, slot, row in zip(given.positions, given.slots, given.rows, strict=True):
            if int(slot) < drafter._scratch_slot:
                rows[int(at)] = row.clone()
        write(given)

    drafter.write = keep  # type: ignore[method-assign]
    return rows


def context_of(model: DFlashModel, table: PageTable) -> Tensor:
    """Bytes of the context of every layer."""
    pages = model.cache.data[:, torch.tensor(table.pages)].flatten(1, 2)
    return pages[:, : table.length].clone().view(torch.uint8)


def stepped(engine: NativeEngine, table: PageTable, ids: Sequence[int], drafts: int) -> list[int]:
    """The tokens behind `ids`, whose last `drafts` are guesses."""
    start = table.length
    context = ids[: len(ids) - drafts]
    item = Item(table, ids[start:], start, 1 + drafts, SAMPLED, context=context, prompt_len=8)
    return list(engine.step([item])[0].tokens)


def in_both_places(kv: str) -> None:
    """What a draft in its target's pages proposes, and its context, bit for bit, are those of a
    service that was sent the same rows; a prefix hit's are those of a cold run."""
    with checkpoints(ONE_DSPARK) as (target, draft):
        engine, drafter = colocated(target, draft, "dspark", kv, **TRITON)
        report = drafter._model.attention
        assert drafter._group.kind is KVGroup.SAME_CACHE and drafter._stepper is not None
        assert (report.policy, report.chosen) == ("inherit", "TRITON_MLA")
        assert report.kv_bytes_per_token == 2 * BYTES[kv]
        assert engine.attention.kv_dtype == report.kv_dtype
        rows, table, text = watched(drafter), engine.allocate(0), list(range(3, 13))
        text += stepped(engine, table, text, 0)
        (first,) = drafter.propose([Ask(table, text[-1], 2, SAMPLED)])
        text += stepped(engine, table, [*text, *first.ids], 2)
        (found,) = drafter.propose([Ask(table, text[-1], BLOCK, SAMPLED)])
        model, held = drafter._model, len(text) - 1
        assert table.length == held and len(found.ids) == BLOCK

        alone = service(target, draft, ONE_DSPARK, kv_dtype=kv, **TRITON)
        context = alone.open(text[:held], SAMPLED)
        sent = torch.stack([rows[at] for at in range(held)])
        alone.update(context, held, text[held:], [block(0, sent)])
        (proposed,) = alone.propose([Request(context, BLOCK)])
        assert proposed.ids == found.ids
        kept = context_of(model, table)
        assert torch.equal(context_of(alone._model, context.table), kept)

        table.publish(b"root", text[:held], held)
        hit = engine.allocate(0)
        hit.adopt(hit.find(b"root", text, held), 2 * PAGE)
        assert hit.length == 2 * PAGE and hit.covered == {"dspark": 0}
        assert stepped(engine, hit, text[:held], 0) == text[held : held + 1]
        assert torch.equal(context_of(model, hit), kept)
        (again,) = drafter.propose([Ask(hit, text[-1], BLOCK, SAMPLED)])
        assert again.ids == found.ids
        for used in (table, hit):
            used.free()
        engine.check_integrity()


def check_same_cache_is_the_draft_of_a_service() -> None:
    in_both_places("auto")


def check_same_cache_in_the_fp8_layout() -> None:
    in_both_places("fp8")


def check_rounds_are_those_of_torch() -> None:
    """Sessions together: proposals and text, which is that of plain decoding."""
    prompts = [list(range(3, 14)), list(range(20, 25))]
    for config, sampling in ((ONE_DFLASH, SAMPLED), (ONE_DSPARK, GREEDY)):
        with checkpoints(config) as (target, draft):
            plain, fused = (
                colocated(target, draft, method_of(config), "auto", **how)
                for how in (PLAIN, TRITON)
            )
            expected = rounds(*plain, prompts, sampling, 2)
            assert rounds(*fused, prompts, sampling, 2) == expected
            alone = rounds(plain[0], None, prompts, sampling, 8)
            for one, text in zip(expected, alone, strict=True):
                assert text_of(one) == text_of(text)[: len(text_of(one))]
