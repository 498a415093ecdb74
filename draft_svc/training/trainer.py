"""`train`: several drafts from one pass over the data, with checkpoints, resume and a gate.

The target runs once a step over padded documents; its taps and logits are never stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_svc.training.batches import Batch, Batches, Place, ahead
from draft_svc.training.draft import DraftNet, block_attention
from draft_svc.training.evaluate import Gate, SetReport, evaluate
from draft_svc.training.net import TargetNet
from draft_svc.training.objective import Head, gather_slots, run_heads
from draft_svc.training.schedule import TrainOptions, optimizers, schedule
from draft_svc.training.shards import Corpus
from draft_svc.training.spec import DraftSpec
from engine.errors import CheckpointError

_SCALE_BATCHES = 8


class Trainer:
    """Drafts, their optimisers and the place in the data. Every draft must propose equally many
    tokens, since they share their slots."""

    def __init__(
        self,
        net: TargetNet,
        specs: Sequence[DraftSpec],
        corpus: Corpus,
        options: TrainOptions,
        say: Callable[[str], None] = print,
    ) -> None:
        if len({spec.proposals for spec in specs}) != 1 or not specs:
            raise CheckpointError("drafts trained together must propose equally many tokens")
        if len({spec.name for spec in specs}) != len(specs):
            raise CheckpointError("drafts trained together must have different names")
        self.net, self.options, self.say = net, options, say
        self.taps = tuple(sorted({tap for spec in specs for tap in spec.taps}))
        self.drafts = [DraftNet(spec, net, options.seed + i) for i, spec in enumerate(specs)]
        self.batches = Batches(corpus, options.batches, options.seed)
        self.place: Place = (0, 0)
        self.step, self.elapsed, self.tokens, self.blocks = 0, 0.0, 0, 0
        self._optimizers = [optimizers(draft, options) for draft in self.drafts]

    # -- one step ----------------------------------------------------------------------------

    @torch.no_grad()
    def _target(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, length = batch.ids.shape
        states, taps = self.net.forward(
            batch.ids.flatten(), self.net.causal(rows, length), self.taps
        )
        assert taps is not None
        return states, taps.view(rows, length, len(self.taps), -1)

    def _columns(self, taps: Tensor, draft: DraftNet) -> Tensor:
        """The draft's own taps out of those captured for all of them."""
        if draft.spec.taps == self.taps:
            return taps.flatten(2)
        return taps[:, :, [self.taps.index(tap) for tap in draft.spec.taps]].flatten(2)

    def draft_states(self, draft: DraftNet, batch: Batch, taps: Tensor) -> Tensor:
        """Final states of the proposing slots [N * K, D] of the batch's blocks, with a graph."""
        spec = draft.spec
        rows, count = batch.anchors.shape
        device = draft.device
        positions = torch.arange(batch.ids.shape[1], device=device).expand(rows, -1)
        context = draft.context(self._columns(taps, draft), positions)
        steps = torch.arange(spec.block, device=device)
        places = (batch.anchors[..., None] + steps).flatten(1)
        ids = torch.full((rows, count, spec.block), spec.mask, device=device)
        ids[:, :, 0] = batch.ids.gather(1, batch.anchors)
        attend = block_attention(
            spec.mode, context, batch.anchors, spec.block, batch.reach, draft.dtype
        )
        states = draft.block(ids.flatten(1), places, attend)
        states = states.view(rows * count, spec.block, -1)[batch.blocks]
        first = spec.first_slot
        return states[:, first : first + spec.proposals].flatten(0, 1)

    def train_step(self, batch: Batch, progress: float) -> list[dict[str, Tensor]]:
        """Forward, backward and update of every draft."""
        options = self.options
        states, taps = self._target(batch)
        slots = gather_slots(
            batch.ids,
            batch.lengths,
            batch.anchors,
            batch.blocks,
            states,
            self.drafts[0].spec.proposals,
        )
        heads = [Head(d, self.draft_states(d, batch, taps), slots) for d in self.drafts]
        mix = options.loss.at(progress)
        found = run_heads(heads, slots, self.net.head, mix, options.loss)
        factor = schedule(progress, options)
        for draft, opts in zip(self.drafts, self._optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(draft.parameters, options.clip)
            for optimizer in opts:
                for group in optimizer.param_groups:
                    group["lr"] = options.lr * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return found

    def measure_scale(self) -> None:
        """Per-channel standard deviation of the taps over the first batches, position 0 left out;
        `fc` is trained on taps divided by it."""
        total = square = None
        count = 0
        for built, _ in islice(self.batches.stream(), _SCALE_BATCHES):
            batch = built.to(self.net.device)
            _, taps = self._target(batch)
            places = torch.arange(batch.ids.shape[1], device=self.net.device)
            inside = (places > 0) & (places < batch.lengths[:, None])
            rows = taps[inside].double()
            total = rows.sum(0) if total is None else total + rows.sum(0)
            square = rows.square().sum(0) if square is None else square + rows.square().sum(0)
            count += len(rows)
        assert total is not None and square is not None
        deviation = (square / count - (total / count).square()).clamp(min=1e-12).sqrt().float()
        for draft in self.drafts:
            index = [self.taps.index(tap) for tap in draft.spec.taps]
            draft.tap_scale = (1 / deviation[index].flatten()).clamp(max=1e4).clone()

    # -- the run -----------------------------------------------------------------------------

    def run(
        self,
        gate: Gate | None = None,
        checkpoint: Path | None = None,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> bool:
        """Trains until the budget ends; true when it did, false when this call's time did."""
        o = self.options
        begun = told = gated = saved = time.monotonic()
        before, idle = self.elapsed, 0.0
        told_tokens, told_blocks, told_step = self.tokens, self.blocks, self.step
        feed = ahead(self.batches.stream(self.place))
        while True:
            now = time.monotonic()
            self.elapsed = before + now - begun - idle
            progress = self.step / o.steps if o.steps else self.elapsed / (o.minutes * 60)
            if progress >= 1:
                break
            if o.stop_after_minutes and now - begun > o.stop_after_minutes * 60:
                self._save(checkpoint)
                return False
            batch, after = next(feed)
            found = self.train_step(batch.to(self.net.device), progress)
            self.place = after
            self.step += 1
            self.tokens += batch.answer_tokens
            self.blocks += batch.blocks.numel()
            if now - told > 10 or (o.steps and self.step == o.steps):
                each = _numbers(found)  # waits for the device
                now = time.monotonic()
                self._tell(each, progress, now - told, told_tokens, told_blocks, told_step)
                told = now
                told_tokens, told_blocks, told_step = self.tokens, self.blocks, self.step
            if gate is not None and now - gated > o.gate_minutes * 60:
                idle += self._gate(gate)
                gated = told = time.monotonic()
            if now - saved > o.checkpoint_minutes * 60:
                self._save(checkpoint)
                on_checkpoint()
                saved = time.monotonic()
        self._save(checkpoint)
        return True

    def _tell(
        self,
        each: list[dict[str, float]],
        progress: float,
        seconds: float,
        tokens: int,
        blocks: int,
        step: int,
    ) -> None:
        parts = []
        for draft, m in zip(self.drafts, each, strict=True):
            if not math.isfinite(m["loss"]):
                raise CheckpointError(f"the loss of {draft.spec.name} is not finite; lower --lr")
            parts.append(
                f"{draft.spec.name}: loss {m['loss']:.3f} ce {m['ce']:.3f} tv {m['tv']:.3f} "
                f"forced tau {m['tau']:.2f} first {m['first']:.3f}"
            )
        block = self.drafts[0].spec.block
        self.say(
            f"{self.elapsed:6.0f} s {progress:5.1%} step {self.step} "
            f"({seconds / max(self.step - step, 1) * 1e3:.0f} ms) "
            f"{(self.tokens - tokens) / seconds:,.0f} answer tokens/s "
            f"{(self.blocks - blocks) * block / seconds:,.0f} block tokens/s  " + "; ".join(parts)
        )

    def _gate(self, gate: Gate) -> float:
        """Prints tau of the real loop per draft; returns the seconds it took."""
        begun = time.monotonic()
        for draft, reports in zip(self.drafts, self.gate_reports(gate), strict=True):
            cells = "  ".join(f"{r.category} {r.tau:.2f}" for r in reports)
            self.say(f"gate {draft.spec.name}: tau {cells}")
        return time.monotonic() - begun

    def gate_reports(self, gate: Gate) -> list[list[SetReport]]:
        return [
            evaluate(d, gate.prompts, max_new=gate.max_new, stop_ids=gate.stop_ids)
            for d in self.drafts
        ]

    # -- checkpoints -------------------------------------------------------------------------

    def _save(self, path: Path | None) -> None:
        if path is None:
            return
        state = {
            "specs": [asdict(d.spec) for d in self.drafts],
            "params": [{n: p.detach().cpu() for n, p in d.p.items()} for d in self.drafts],
            "scales": [d.tap_scale.cpu() for d in self.drafts],
            "optimizers": [[o.state_dict() for o in opts] for opts in self._optimizers],
            "place": self.place,
            "counters": (self.step, self.elapsed, self.tokens, self.blocks),
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def resume(self, path: Path) -> None:
        """Goes on from `_save`. Raises CheckpointError when it was another set of drafts."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if state["specs"] != [asdict(d.spec) for d in self.drafts]:
            raise CheckpointError("the checkpoint to resume from holds other drafts")
        for i, draft in enumerate(self.drafts):
            with torch.no_grad():
                for name, value in state["params"][i].items():
                    draft.p[name].copy_(value)
            draft.tap_scale = state["scales"][i].to(draft.device)
            for optimizer, saved in zip(self._optimizers[i], state["optimizers"][i], strict=True):
                optimizer.load_state_dict(saved)
        self.place = tuple(state["place"])
        self.step, self.elapsed, self.tokens, self.blocks = state["counters"]


def _numbers(found: Sequence[dict[str, Tensor]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in each.items()} for each in found]
