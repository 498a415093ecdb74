"""Exported checkpoints in the engine: the logits of the training forward, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from draft_svc.training.draft import DraftNet
from draft_svc.training.export import export, load_export, read_spec
from draft_svc.training.spec import parse_spec
from draft_svc.training.trainer import Trainer
from engine.errors import CheckpointError
from engine.kv.pool import PageTable
from engine.models.dflash import Block, DFlashModel
from engine.models.draft_loading import load_dflash, load_dspark
from engine.models.draft_options import DFlashOptions
from engine.models.dspark import DSparkModel
from tests.engine.tiny import KERNELS, LATENT
from tests.training.toys import MASK, corpus_of, random_documents, spec, tiny_target, trainer_of

DFLASH = ("dflash", "dflash,window=6", "dflash,causal=true,layers=1", "dflash,heads=2,kv_heads=1")
DSPARK = ("dspark,rank=8", "dspark,rank=8,slots=next_token,block=7", "dspark,rank=4,confidence=0")


def exported(
    tmp_path: Path, text: str, family: str = "llama", **overrides: object
) -> tuple[Trainer, DraftNet, Path]:
    """A trained-looking draft whose training weights are exactly what its bf16 file holds."""
    net = tiny_target(tmp_path / "target", family, **overrides)
    trainer = trainer_of(net, [text + ",taps=0/2"], corpus_of(random_documents(6)))
    trainer.measure_scale()
    draft = trainer.drafts[0]
    for parameter in draft.parameters:
        parameter.data += torch.randn_like(parameter) * 0.05
    export(draft, tmp_path / "draft", {"seed": 0})
    with torch.no_grad():
        load_export(tmp_path / "draft", draft)
    return trainer, draft, tmp_path / "draft"


def options(kernels: str) -> DFlashOptions:
    return DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels=kernels)


def blocks_of(model: DFlashModel, trainer: Trainer) -> tuple[list[Block], torch.Tensor]:
    """Every block of the first batch in the engine, and the training forward's states."""
    batch, _ = next(trainer.batches.stream())
    _, taps = trainer._target(batch)
    with torch.no_grad():
        states = trainer.draft_states(trainer.drafts[0], batch, taps)
    blocks = []
    for place in batch.blocks.tolist():
        row, anchor = place // batch.anchors.shape[1], int(batch.anchors.flatten()[place])
        table = PageTable(model.pool, [])
        model.write_context(table, 0, taps[row, :anchor].flatten(1))
        blocks.append(Block(table, int(batch.ids[row, anchor]), anchor))
        if len(blocks) == 12:
            break
    proposals = trainer.drafts[0].spec.proposals
    return blocks, states.view(-1, proposals, states.shape[-1])[: len(blocks)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("text", DFLASH)
def test_dflash_in_the_engine_equals_training(tmp_path: Path, text: str, kernels: str) -> None:
    """DF-1, DF-8, DF-10: slots, positions, masks, RoPE and the folded tap scale agree."""
    trainer, draft, directory = exported(tmp_path, text)
    model = load_dflash(directory, str(tmp_path / "target"), options(kernels)).model
    blocks, states = blocks_of(model, trainer)
    wanted = F.linear(states, draft.net.head)
    torch.testing.assert_close(model.propose_logits(blocks), wanted, rtol=2e-3, atol=2e-3)


def test_a_draft_for_a_target_with_latent_attention(tmp_path: Path) -> None:
    """The body has plain heads of its own; taps are the engine's whatever the target's family."""
    more = LATENT | {"first_k_dense_replace": 1}
    trainer, draft, directory = exported(tmp_path, "dflash", "deepseek_v2", **more)
    assert (draft.spec.heads, draft.spec.kv_heads, draft.spec.head_dim) == (4, 1, 12)
    model = load_dflash(directory, str(tmp_path / "target"), options("torch")).model
    blocks, states = blocks_of(model, trainer)
    wanted = F.linear(states, draft.net.head)
    torch.testing.assert_close(model.propose_logits(blocks), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("text", DSPARK)
def test_dspark_in_the_engine_equals_training(tmp_path: Path, text: str, kernels: str) -> None:
    """DF-44: the slot mode decides which slots propose; the Markov walk follows what is drawn."""
    trainer, draft, directory = exported(tmp_path, text)
    model = load_dspark(directory, str(tmp_path / "target"), options(kernels)).model
    assert isinstance(model, DSparkModel)
    assert model.max_draft_tokens == draft.spec.proposals == 7
    blocks, states = blocks_of(model, trainer)
    found = model.propose(blocks, lambda _, logits: logits.topk(2).indices[:, 1])
    w1, w2 = draft.markov()
    previous = torch.tensor([block.anchor for block in blocks])
    for slot in range(7):
        with torch.no_grad():
            wanted = F.linear(states[:, slot], draft.net.head) + w1[previous] @ w2.t()
            torch.testing.assert_close(found.logits[:, slot], wanted, rtol=2e-3, atol=3e-3)
            if draft.spec.confidence:
                chance = draft.confidence_logit(states[:, slot], w1[previous]).sigmoid()
                assert found.confidence is not None
                torch.testing.assert_close(found.confidence[:, slot], chance, rtol=1e-3, atol=1e-3)
        previous = found.tokens[:, slot]
        assert torch.equal(previous, found.logits[:, slot].topk(2).indices[:, 1])
    assert (found.confidence is None) is not draft.spec.confidence
    short = model.propose(blocks[:3], lambda _, logits: logits.topk(2).indices[:, 1], 2)
    assert torch.equal(short.tokens, found.tokens[:3, :2])


def test_going_on_from_an_export_keeps_the_function(tmp_path: Path) -> None:
    """Config and weights survive a round trip, for any scale of the taps."""
    _, draft, directory = exported(tmp_path, "dspark,rank=8,causal=true,window=9")
    again = read_spec(directory, draft.spec.name, draft.net.config)
    assert again == draft.spec
    other = DraftNet(again, draft.net, 5)
    other.tap_scale = torch.rand_like(other.tap_scale) + 0.5
    load_export(directory, other)
    for name, tensor in other.export_state().items():
        torch.testing.assert_close(tensor, draft.export_state()[name], rtol=1e-2, atol=1e-6)


def test_refusals_of_a_dspark_config(tmp_path: Path) -> None:
    """DF-11, DF-12, DF-31, DF-45: a reserved or absent mask id, no taps, no slot mode."""
    _, _, directory = exported(tmp_path, "dspark,rank=8")
    target, path = str(tmp_path / "target"), directory / "config.json"
    good = json.loads(path.read_text())
    cases = {
        "mask_token_id": (-1, 96, 0, 1, 2, None),
        "target_layer_ids": ([], [2, 0], [1, 1], [4], None),
        "sample_from_anchor": (None,),
        "markov_head_type": ("lattice", None),
        "markov_rank": (0, None),
        "architectures": (["Qwen3ForCausalLM"],),
        "enable_confidence_head": (None,),
        "vocab_size": (95,),
    }
    for key, values in cases.items():
        for value in values:
            changed = good | {key: value}
            if value is None:
                del changed[key]
            path.write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match=key):
                load_dspark(directory, target)
    path.write_text(json.dumps(good | {"markov_rank": 4}))
    with pytest.raises(CheckpointError, match="markov_w1"):
        load_dspark(directory, target)
    path.write_text(json.dumps(good | {"enable_confidence_head": False}))
    with pytest.raises(CheckpointError, match="confidence_head"):
        load_dspark(directory, target)


def test_refusals_of_a_spec(tmp_path: Path) -> None:
    """DF-11, DF-12: mask ids that are pad, bos, eos or no ids at all; and other nonsense."""
    net = tiny_target(tmp_path)
    for mask in (0, 1, 2, -1, 96):
        with pytest.raises(CheckpointError, match="mask"):
            parse_spec(f"dflash,mask={mask}", net.config)
    for text, key in (
        ("eagle", "method"),
        ("dflash,taps=2/0", "taps"),
        ("dflash,taps=4", "taps"),
        ("dflash,rank=4", "rank"),
        ("dspark,rank=0", "rank"),
        ("dflash,slots=next_token", "slots"),
        ("dflash,colour=red", "colour"),
        ("dflash,layers=two", "layers"),
        ("dflash,block=1", "block"),
    ):
        with pytest.raises(CheckpointError, match=key):
            parse_spec(f"{text},mask={MASK}", net.config)
    assert spec(net, "dspark").rank == 64 and spec(net, "dflash").taps == (2,)
