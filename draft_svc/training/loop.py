"""The real speculative loop, batched over prompts: propose, verify, accept what the target drew.

Tokens are drawn as the engine draws them: argmax(logits / T + noise), noise keyed by (seed, choice,
index, token), `choice` being the number of the prompt. Draft and target share the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.draft import BlockAttend, DraftNet, fold, inside, visible
from draft_svc.training.net import StaticCache, TargetNet
from engine.noise import philox

_PREFILL_TOKENS = 32768


@dataclass(slots=True)
class Outcome:
    """What one prompt gave. `accepted[i]` is what round i accepted of `proposed[i]` drafts; rounds
    cut by a stop id or the limit count only what was emitted."""

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean tokens per verify round, the target's own one included."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else 0.0


def noise(seed: int, choices: Tensor, index: Tensor, vocab: int) -> Tensor:
    """Gumbel noise fp32 [P, W, V] of the tokens at positions `index` [P, W]: the engine's own."""
    groups = -(-vocab // 4)
    counter = torch.zeros(*index.shape, groups, 4, dtype=torch.int64, device=index.device)
    counter[..., 0] = torch.arange(groups, device=index.device)
    counter[..., 1] = index[..., None]
    counter[..., 2] = choices[:, None, None]
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    uniform = ((words.flatten(-2)[..., :vocab] >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


class DraftCache:
    """Context K/V of every layer at absolute positions, [P, kv_heads, max_length, head_dim]."""

    def __init__(self, draft: DraftNet, rows: int, max_length: int) -> None:
        s = draft.spec
        shape = (s.layers, rows, s.kv_heads, max_length, s.head_dim)
        self.k = torch.zeros(shape, dtype=draft.dtype, device=draft.device)
        self.v = torch.zeros(shape, dtype=draft.dtype, device=draft.device)
        self._draft = draft

    def write(self, slots: Tensor, positions: Tensor, taps: Tensor) -> None:
        """taps [P, W, n * D] of the tokens at `positions` [P, W]."""
        rows = slots[:, None]
        for i, (k, v) in enumerate(self._draft.context(taps, positions)):
            self.k[i][rows, :, positions] = k.transpose(1, 2)
            self.v[i][rows, :, positions] = v.transpose(1, 2)

    def attend(self, anchors: Tensor, limit: int) -> BlockAttend:
        """One block per row behind the context before `anchors` [P]."""
        spec = self._draft.spec
        mode, slots = spec.mode, spec.block
        keys = torch.arange(limit, device=anchors.device)
        far = visible(mode, anchors[:, None], keys, slots)[:, 0]
        own = inside(mode, slots, anchors.device).expand(len(anchors), -1, -1)
        mask = torch.cat((far, own), -1)[:, None]
        mask = mask.repeat(1, 1, spec.heads // spec.kv_heads, 1)

        def run(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = torch.cat((self.k[layer][:, :, :limit], k), 2)
            values = torch.cat((self.v[layer][:, :, :limit], v), 2)
            y = F.scaled_dot_product_attention(fold(q, spec.kv_heads), keys, values, attn_mask=mask)
            return y.reshape(q.shape)

        return run


class Loop:
    """Prompts in flight together."""

    def __init__(
        self,
        net: TargetNet,
        draft: DraftNet,
        prompts: Sequence[Sequence[int]],
        *,
        max_new: int,
        stop_ids: Sequence[int],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.net, self.draft = net, draft
        self.k = draft.spec.proposals
        self.max_new, self.temperature, self.seed = max_new, temperature, seed
        self.stops = set(stop_ids)
        self.outcomes = [Outcome(prompt) for prompt in prompts]
        longest = max(len(prompt) for prompt in prompts) + max_new + draft.spec.block + 1
        longest = -(-longest // 16) * 16
        if longest > net.config.max_positions:
            raise ValueError(f"{longest} positions needed, {net.config.max_positions} there are")
        rows = len(prompts)
        self._cache = StaticCache(net, rows, longest)
        self._context = DraftCache(draft, rows, longest)
        self._choices = torch.arange(rows, device=net.device)
        w2 = draft.markov() if draft.spec.rank else None
        self._markov = None if w2 is None else tuple(t.to(draft.dtype) for t in w2)

    def _draw(self, logits: Tensor, gumbel: Tensor | None) -> Tensor:
        return (logits if gumbel is None else logits / self.temperature + gumbel).argmax(-1)

    def _noise(self, index: Tensor) -> Tensor | None:
        if self.temperature == 0:
            return None
        return noise(self.seed, self._choices, index, self.net.config.vocab_size)

    def _prefill(self) -> tuple[Tensor, Tensor]:
        """Runs the prompts; returns the anchors (first tokens drawn) and their positions [P]."""
        device, taps_of = self.net.device, self.draft.spec.taps
        order = sorted(range(len(self.outcomes)), key=lambda i: len(self.outcomes[i].prompt))
        anchors = torch.zeros(len(order), dtype=torch.int64, device=device)
        lengths = torch.tensor([len(o.prompt) for o in self.outcomes], device=device)
        while order:
            longest = len(self.outcomes[order[-1]].prompt)
            count = max(1, min(len(order), _PREFILL_TOKENS // longest))
            group, order = order[-count:], order[:-count]
            slots = torch.tensor(group, device=device)
            prompts = [list(self.outcomes[i].prompt) for i in group]
            ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
            attend = self.net.causal(count, longest, self._cache, slots)
            states, taps = self.net.forward(ids.flatten(), attend, taps_of)
            assert taps is not None
            positions = torch.arange(longest, device=device).expand(count, -1)
            self._context.write(slots, positions, taps.view(count, longest, -1))
            rows = torch.arange(count, device=device)
            last = states.view(count, longest, -1)[rows, lengths[slots] - 1]
            logits = self.net.logits(last)
            if self.temperature:
                index = lengths[slots][:, None]
                vocab = self.net.config.vocab_size
                gumbel = noise(self.seed, self._choices[slots], index, vocab)[:, 0]
                logits = logits / self.temperature + gumbel
            anchors[slots] = logits.argmax(-1)
        return anchors, lengths

    def _propose(self, anchors: Tensor, starts: Tensor, gumbel: Tensor | None) -> Tensor:
        """Proposals int64 [P, K] for the tokens after the anchors at positions `starts`."""
        spec = self.draft.spec
        ids = torch.full((len(anchors), spec.block), spec.mask, device=anchors.device)
        ids[:, 0] = anchors
        positions = starts[:, None] + torch.arange(spec.block, device=anchors.device)
        attend = self._context.attend(starts, int(starts.max()))
        states = self.draft.block(ids, positions, attend)
        states = states[:, spec.first_slot : spec.first_slot + self.k]
        base = self.net.logits(states.reshape(-1, states.shape[-1]))
        base = base.view(*states.shape[:2], -1)
        if self._markov is None:
            return self._draw(base, None if gumbel is None else gumbel[:, : self.k])
        w1, w2 = self._markov
        chosen, previous = [], anchors
        for step in range(self.k):
            logits = base[:, step] + F.linear(w1[previous], w2).float()
            previous = self._draw(logits, None if gumbel is None else gumbel[:, step])
            chosen.append(previous)
        return torch.stack(chosen, 1)

    @torch.inference_mode()
    def run(self) -> list[Outcome]:
        anchors, starts = self._prefill()
        for outcome, token in zip(self.outcomes, anchors.tolist(), strict=True):
            outcome.ids.append(token)
        steps = torch.arange(self.k + 1, device=anchors.device)
        alive = [o.ids[0] not in self.stops and self.max_new > 1 for o in self.outcomes]
        while any(alive):
            gumbel = self._noise(starts[:, None] + 1 + steps)
            proposals = self._propose(anchors, starts, gumbel)
            ids = torch.cat((anchors[:, None], proposals), 1)
            positions = starts[:, None] + steps
            attend = self.net.cached(self._cache, positions, int(starts.max()) + self.k + 1)
            states, taps = self.net.forward(ids.flatten(), attend, self.draft.spec.taps)
            assert taps is not None
            drawn = self._draw(self.net.logits(states).view(*ids.shape, -1), gumbel)
            self._context.write(self._choices, positions, taps.view(*ids.shape, -1))
            accepted = (proposals == drawn[:, :-1]).long().cumprod(1).sum(1)
            self._commit(alive, accepted.tolist(), drawn.tolist())
            anchors = drawn[self._choices, accepted]
            # A row that is over runs on at the beginning of its cache, where nobody reads it: the
            # last round may have accepted beyond the limit.
            going = torch.tensor(alive, device=anchors.device)
            starts = torch.where(going, starts + accepted + 1, 0)
        return self.outcomes

    def _commit(self, alive: list[bool], accepted: list[int], drawn: list[list[int]]) -> None:
        for row, outcome in enumerate(self.outcomes):
            if not alive[row]:
                continue
            new = drawn[row][: accepted[row] + 1][: self.max_new - len(outcome.ids)]
            stop = next((i for i, token in enumerate(new) if token in self.stops), None)
            if stop is not None:
                new = new[: stop + 1]
            outcome.ids += new
            outcome.accepted.append(accepted[row])
            outcome.emitted.append(len(new))
            alive[row] = stop is None and len(outcome.ids) < self.max_new


def speculate(
    net: TargetNet,
    draft: DraftNet,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    together: int = 64,
) -> list[Outcome]:
    """Runs the loop on all prompts, `together` at a time."""
    found: list[Outcome] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), together):
        group = [prompts[i] for i in order[first : first + together]]
        loop = Loop(
            net,
            draft,
            group,
            max_new=max_new,
            stop_ids=stop_ids,
            temperature=temperature,
            seed=seed,
        )
        found += loop.run()
    by_place = dict(zip(order, found, strict=True))
    return [by_place[i] for i in range(len(prompts))]
