"""What a slot may see: the context strictly before its anchor, and its own block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draft_svc.training.batches import Batch
from draft_svc.training.draft import inside, visible
from draft_svc.training.net import load_target
from draft_svc.training.trainer import Trainer
from engine.attention.base import LayerMode
from tests.training.toys import corpus_of, random_documents, tiny_target, trainer_of

VARIANTS = ("dflash", "dflash,causal=true", "dflash,window=5", "dflash,causal=true,window=3")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tiny_target(directory)
    return directory


def setting(target: Path, text: str) -> tuple[Trainer, Batch, Tensor]:
    net = load_target(target, torch.device("cpu"), torch.float32)
    trainer = trainer_of(net, [text + ",taps=0/2"], corpus_of(random_documents(6)))
    batch, _ = next(trainer.batches.stream())
    _, taps = trainer._target(batch)
    return trainer, batch, taps


def states_of(trainer: Trainer, batch: Batch, taps: Tensor) -> Tensor:
    with torch.no_grad():
        return trainer.draft_states(trainer.drafts[0], batch, taps)


@pytest.mark.parametrize("text", VARIANTS)
def test_nothing_at_or_after_the_anchor_is_seen(target: Path, text: str) -> None:
    """DF-2, DF-3: taps at the anchor and later change no bit of the block."""
    trainer, batch, taps = setting(target, text)
    plain = states_of(trainer, batch, taps).view(len(batch.blocks), -1)
    rows = batch.blocks // batch.anchors.shape[1]
    anchors = batch.anchors.flatten()[batch.blocks]
    for number in range(0, len(batch.blocks), 5):
        row, anchor = int(rows[number]), int(anchors[number])
        dirty = taps.clone()
        dirty[row, anchor:] = torch.randn_like(dirty[row, anchor:]) * 100
        assert torch.equal(states_of(trainer, batch, dirty).view_as(plain)[number], plain[number])
        dirty = taps.clone()
        dirty[row, anchor - 1] += 10
        assert not torch.equal(
            states_of(trainer, batch, dirty).view_as(plain)[number], plain[number]
        )


def test_blocks_do_not_see_each_other(target: Path) -> None:
    """A block's states are those of the same anchor alone in its document."""
    trainer, batch, taps = setting(target, "dflash")
    plain = states_of(trainer, batch, taps).view(len(batch.blocks), -1)
    rows = batch.blocks // batch.anchors.shape[1]
    for number in range(0, len(batch.blocks), 7):
        row, place = int(rows[number]), int(batch.blocks[number])
        anchor = batch.anchors.flatten()[place]
        alone = replace(
            batch,
            ids=batch.ids[row : row + 1],
            anchors=anchor.view(1, 1),
            blocks=torch.tensor([0]),
            reach=(batch.ids.shape[1],),
        )
        got = states_of(trainer, alone, taps[row : row + 1]).flatten()
        torch.testing.assert_close(got, plain[number], rtol=1e-4, atol=1e-5)


def test_inputs_of_a_block_are_anchor_and_masks(target: Path) -> None:
    """Changing the tokens after an anchor, taps kept, changes no bit: no label is an input."""
    trainer, batch, taps = setting(target, "dflash")
    plain = states_of(trainer, batch, taps)
    ids = batch.ids.clone()
    anchored = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, batch.anchors, True)
    ids[~anchored] = 5
    assert torch.equal(states_of(trainer, replace(batch, ids=ids), taps), plain)


@pytest.mark.parametrize("text", ["dflash,causal=true", "dflash,window=3"])
def test_a_window_or_a_causal_block_hides_later_slots(target: Path, text: str) -> None:
    """The last slot cannot reach the first one where the mode says so."""
    trainer, _, _ = setting(target, text)
    mode = trainer.drafts[0].spec.mode
    seen = inside(mode, 8, torch.device("cpu"))
    for i in range(8):
        for j in range(8):
            wanted = (j <= i or not mode.causal) and (
                mode.window is None or abs(i - j) < mode.window
            )
            assert bool(seen[i, j]) is wanted
    anchors, keys = torch.tensor([[12]]), torch.arange(20)
    far = visible(LayerMode(False, 6), anchors, keys, 8)[0, 0]
    for slot in range(8):
        wanted = [k for k in range(20) if k < 12 and k > 12 + slot - 6]
        assert far[slot].nonzero().flatten().tolist() == wanted
