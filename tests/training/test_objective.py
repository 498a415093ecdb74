"""The chunked loss against autograd on the whole thing, and the weights of the slots."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from draft_svc.training import objective
from draft_svc.training.kernels import LossMix
from draft_svc.training.objective import Head, LossOptions, gather_slots, run_heads
from tests.training.toys import corpus_of, random_documents, tiny_target, trainer_of


@pytest.mark.parametrize("text", ["dflash", "dspark,rank=4,confidence=true"])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_gradients_equal_autograd(tmp_path, monkeypatch, text: str, weighting: str) -> None:
    """DF-23: each part of a step is divided by what the whole step counts, not by its own count."""
    monkeypatch.setattr(objective, "_CHUNK_ROWS", 64)  # several chunks
    net = tiny_target(tmp_path)
    trainer = trainer_of(net, [text + ",taps=0/2"], corpus_of(random_documents(5)))
    draft = trainer.drafts[0]
    if draft.spec.rank:  # zeros would hide the Markov head
        for name, parameter in draft.p.items():
            if "markov" in name or "confidence" in name:
                parameter.data.normal_(0, 0.3)
    batch, _ = next(trainer.batches.stream())
    states, taps = trainer._target(batch)
    slots = gather_slots(batch.ids, batch.lengths, batch.anchors, batch.blocks, states, 7)
    mix = LossMix(0.6, 0.3, 0.8)
    options = LossOptions(weighting=weighting, confidence=0.5)
    head = Head(draft, trainer.draft_states(draft, batch, taps), slots)
    run_heads([head], slots, net.head, mix, options)
    got = {name: p.grad.clone() for name, p in draft.p.items() if p.grad is not None}

    for parameter in draft.parameters:
        parameter.grad = None
    h = trainer.draft_states(draft, batch, taps)
    logits = F.linear(h, net.head)
    if draft.spec.rank:
        w1, w2 = draft.markov()
        rows = w1[slots.previous.flatten()]
        logits = logits + rows @ w2.t()
    p = F.linear(slots.states.flatten(0, 1), net.head).softmax(-1)
    log_q = logits.log_softmax(-1)
    labels = slots.labels.flatten()
    ce = F.nll_loss(log_q, labels, reduction="none")
    kl = (p * (p.log() - log_q)).sum(-1)
    tv = 0.5 * (p - log_q.exp()).abs().sum(-1)
    valid = slots.valid.float()
    steps = torch.arange(7)
    if weighting == "decay":
        weights = valid * torch.exp(-steps / 4.0)
        weights = weights / weights.sum()
    else:
        q = log_q.gather(1, labels[:, None]).exp().detach().view(-1, 7)
        prefix = (0.5 + 0.5 * q).cumprod(1) * valid
        weights = torch.stack([prefix[:, k:].sum(1) for k in range(7)], 1) * valid / len(valid)
    loss = ((mix.ce * ce + mix.kl * kl + mix.tv * tv) * weights.flatten()).sum()
    if draft.spec.confidence:
        c = draft.confidence_logit(h.detach(), rows.detach())
        each = F.binary_cross_entropy_with_logits(c, 1 - tv.detach(), reduction="none")
        loss = loss + 0.5 * (each * valid.flatten()).sum() / valid.sum()
    loss.backward()
    for name, parameter in draft.p.items():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=2e-3, atol=2e-6, msg=name)
        else:
            assert name not in got


def test_labels_are_the_tokens_after_the_anchor(tmp_path) -> None:
    """DF-1: proposal k stands for the token at anchor + k, whatever the slot mode."""
    net = tiny_target(tmp_path)
    documents = random_documents(4)
    trainer = trainer_of(net, ["dflash"], corpus_of(documents))
    batch, _ = next(trainer.batches.stream())
    states, _ = trainer._target(batch)
    slots = gather_slots(batch.ids, batch.lengths, batch.anchors, batch.blocks, states, 7)
    rows = (batch.blocks // batch.anchors.shape[1]).tolist()
    for n, (row, place) in enumerate(zip(rows, batch.blocks.tolist(), strict=True)):
        text = batch.ids[row, : int(batch.lengths[row])].tolist()
        anchor = int(batch.anchors.flatten()[place])
        after = text[anchor + 1 : anchor + 8]
        assert slots.labels[n, : len(after)].tolist() == after
        assert slots.previous[n, : len(after)].tolist() == text[anchor : anchor + 7][: len(after)]
        assert slots.valid[n].tolist() == [True] * len(after) + [False] * (7 - len(after))
        expected = net.logits(states.view(*batch.ids.shape, -1)[row, anchor])
        torch.testing.assert_close(net.logits(slots.states[n, 0]), expected)
