"""Every option against a reference in float64 written from its definition, on random logits, each
row of a block after the draft prefix before it; then all of them in any combination.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.api import Item, Sampling
from engine.choose import choose
from engine.kernels.cpu import ops
from engine.kv.pool import PagePool, PageTable
from engine.noise import gumbel
from engine.penalties import apply, changes_logits
from engine.sampling import draw

VOCAB = 61
DRAW = partial(draw, gumbel_argmax=ops.gumbel_argmax)
PROMPT, OUTPUT, DRAFTS = [3, 9, 9, 40], [9, 12, 12, 12, 5], [12, 7, 9]
OPTIONS = {
    "repetition": Sampling(repetition_penalty=1.3),
    "repetition below one": Sampling(repetition_penalty=0.6),
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=-0.7),
    "bias": Sampling(logit_bias=((2, -100.0), (9, 4.0), (60, 100.0))),
    "bad token": Sampling(bad_sequences=((30,), (31,))),
    "bad sequences": Sampling(bad_sequences=((5, 22), (12, 12, 5, 12, 7, 23), (9, 9), (40, 9, 1))),
    "min tokens": Sampling(min_tokens=7, stop_ids=(0, 50)),
    "all": Sampling(
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((9, 2.0), (12, -1.0)),
        bad_sequences=((7, 9), (8,)),
        min_tokens=6,
        stop_ids=(50,),
    ),
}


def reference(raw: list[float], s: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Processed logits of one row, token by token, in Python floats."""
    text = prompt + output
    out = []
    for token, logit in enumerate(raw):
        bad = any(
            q[-1] == token
            and len(q) <= len(output) + 1
            and output[len(output) - len(q) + 1 :] == list(q[:-1])
            for q in s.bad_sequences
        )
        if bad or (token in s.stop_ids and len(output) < s.min_tokens):
            out.append(-math.inf)
            continue
        logit += dict(s.logit_bias).get(token, 0.0)
        if token in text:
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        times = output.count(token)
        logit -= s.frequency_penalty * times + (s.presence_penalty if times else 0.0)
        out.append(logit)
    return out


def rows(count: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_sees_the_draft_prefix(name: str) -> None:
    """WC-42: no option is dropped for the rows of a verify block."""
    sampling, logits = OPTIONS[name], rows(4)
    raw = logits.tolist()
    assert changes_logits(sampling, len(OUTPUT))
    apply(logits, sampling, PROMPT + OUTPUT, len(PROMPT), DRAFTS)
    changed = 0
    for i, row in enumerate(logits):
        expected = reference(raw[i], sampling, PROMPT, OUTPUT + DRAFTS[:i])
        assert row.tolist() == pytest.approx(expected, abs=1e-5)
        changed += row.tolist() != raw[i]
        if name in ("repetition", "presence", "frequency", "all", "bad sequences") and i > 1:
            # What the row would be if the prefix were forgotten is something else.
            assert expected != pytest.approx(reference(raw[i], sampling, PROMPT, OUTPUT), abs=1e-3)
    assert changed >= 2


def test_a_banned_sequence_is_one_of_the_output() -> None:
    """As in vLLM: the prompt's last tokens are not its beginning; after a re-open they may be."""
    sampling = Sampling(bad_sequences=((5, 6), (7,)))
    for prompt_len, banned in ((4, {7}), (3, {7}), (2, {6, 7})):
        logits = rows(1)
        apply(logits, sampling, [1, 2, 5], prompt_len, [])
        assert {i for i in range(VOCAB) if logits[0, i] == -math.inf} == banned


def test_options_that_are_off_change_nothing() -> None:
    assert not changes_logits(Sampling(top_k=3, top_p=0.5, min_p=0.1, stop_ids=(4,)), 0)
    assert not changes_logits(Sampling(min_tokens=5, stop_ids=(4,)), 5)
    assert changes_logits(Sampling(min_tokens=5, stop_ids=(4,)), 4)


def kept(logits: list[float], s: Sampling) -> list[int]:
    """What min-p, top-k and top-p leave, ties with the last one included."""
    best = max(logits)
    weight = [math.exp((x - best) / s.temperature) for x in logits]
    left = [i for i in range(len(logits)) if weight[i] >= s.min_p]
    if 0 < s.top_k < len(left):
        lowest = sorted((logits[i] for i in left), reverse=True)[s.top_k - 1]
        left = [i for i in left if logits[i] >= lowest]
    total = sum(weight[i] for i in left)
    above = {i: sum(weight[j] for j in left if logits[j] > logits[i]) for i in left}
    return [i for i in left if above[i] < s.top_p * total or logits[i] == best]


def expected_token(raw: list[float], s: Sampling, output: list[int]) -> int:
    logits = reference(raw, s, PROMPT, output)
    if s.temperature == 0:
        return max(range(VOCAB), key=lambda i: (logits[i], -i))
    noise = gumbel(s.seed, s.choice, len(PROMPT) + len(output), VOCAB).double().tolist()
    scores = {i: logits[i] / s.temperature + noise[i] for i in kept(logits, s)}
    return max(scores, key=lambda i: (scores[i], -i))


def block(table: PageTable, s: Sampling, drafts: list[int], **fields: int) -> Item:
    context = PROMPT + OUTPUT
    return Item(
        table=table,
        ids=[context[-1], *drafts],
        start=len(context) - 1,
        draws=1 + len(drafts),
        sampling=s,
        context=context,
        prompt_len=len(PROMPT),
        **fields,
    )


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 20, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 15),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.3]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.floats(-9, 9, width=32), max_size=4
    ).map(lambda bias: tuple(sorted(bias.items()))),
    bad_sequences=st.lists(
        st.lists(st.sampled_from([5, 12, 7, 9, 30]), min_size=1, max_size=3).map(tuple), max_size=4
    ).map(tuple),
    min_tokens=st.integers(0, 10),
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(sampling=SAMPLINGS, seed=st.integers(0, 10_000), wrong=st.integers(0, 4))
def test_any_combination_and_speculation_equals_plain(
    sampling: Sampling, seed: int, wrong: int
) -> None:
    """A block whose drafts are what plain decoding gives, up to a wrong one, gives just that."""
    raw = rows(5, seed)
    output, wanted = list(OUTPUT), []
    for row in raw.tolist():
        wanted.append(expected_token(row, sampling, output))
        output.append(wanted[-1])
    drafts = list(wanted[:4])
    if wrong < 4:
        drafts[wrong] = (drafts[wrong] + 1) % VOCAB
    table = PagePool(4, 16).allocate(32)
    plain, blocked = Sampling(temperature=0.0), block(table, sampling, drafts, logprobs=3)
    mates = [block(table, plain, [1, 2]), blocked, block(table, plain, [])]
    logits = torch.cat([rows(3, 1), raw, rows(1, 2)])
    greedy, got, last = choose(logits, mates, DRAW)
    assert got.tokens == tuple(wanted[: wrong + 1]) and got.accepted == min(wrong, 4)
    assert greedy.tokens[0] == int(rows(3, 1)[0].argmax())
    assert last.tokens == (int(rows(1, 2).argmax()),)
    # Log probabilities are those of the raw logits, whatever the options did to them.
    law = raw.double().log_softmax(-1)
    for i, scored in enumerate(got.logprobs):
        assert scored.token == got.tokens[i]
        assert scored.logprob == pytest.approx(float(law[i, scored.token]), abs=1e-5)
    assert len(got.logprobs) == len(got.tokens)


def test_junk_drafts_leave_the_law_of_token_pairs() -> None:
    """WC-38, WC-40: with options on and drafts that have nothing to do with the text, the first
    token and the one after an accepted draft have the target's law; chi-square over all pairs."""
    vocab, trials = 8, 8_000
    generator = torch.Generator().manual_seed(5)
    first, after = (
        torch.randn(vocab, generator=generator),
        torch.randn(vocab, vocab, generator=generator),
    )
    s = Sampling(temperature=0.7, top_p=0.93, presence_penalty=0.5)

    def law(logits: Tensor, output: list[int]) -> Tensor:
        row = reference(logits.tolist(), s, [0], output)
        left = kept(row, s)
        weights = torch.zeros(vocab, dtype=torch.float64)
        weights[left] = torch.tensor([math.exp(row[i] / 0.7) for i in left], dtype=torch.float64)
        return weights / weights.sum()

    drafts = torch.randint(vocab, (trials,), generator=generator).tolist()
    table = PagePool(1, 16).allocate(8)
    items = [
        Item(table, [0, d], 0, 2, replace(s, seed=seed), context=[0], prompt_len=1)
        for seed, d in enumerate(drafts)
    ]
    logits = torch.stack([torch.stack((first, after[d])) for d in drafts]).flatten(0, 1)
    counts = torch.zeros(vocab + 1, vocab, dtype=torch.float64)
    for chosen in choose(logits, items, DRAW):
        counts[vocab, chosen.tokens[0]] += 1
        if chosen.accepted:
            counts[chosen.tokens[0], chosen.tokens[1]] += 1
    laws = torch.stack([*(law(after[d], [d]) for d in range(vocab)), law(first, [])])
    expected = laws * counts.sum(1, keepdim=True)
    assert counts[expected == 0].sum() == 0 and counts[:vocab].sum() > trials / 20
    present = expected > 0
    freedom = int(present.sum()) - int((expected.sum(1) > 0).sum())
    statistic = float(((counts - expected)[present] ** 2 / expected[present]).sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_logprobs_rank_and_ties() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, 2.0, 1.0, 2.0]])
    table = PagePool(4, 16).allocate(16)
    law = logits[0].double().log_softmax(0).tolist()

    def scored(top: int, **fields: tuple[tuple[int, float], ...]) -> object:
        s = replace(Sampling(temperature=0.0), **fields)
        item = Item(table, [1], 0, 1, s, logprobs=top)
        return choose(logits.clone(), [item], DRAW)[0].logprobs[0]

    first, forced = scored(4), scored(0, logit_bias=((4, 50.0),))
    assert (first.token, first.rank) == (1, 1)
    assert [i for i, _ in first.top] == [1, 3, 5, 0]
    assert [v for _, v in first.top] == pytest.approx([law[i] for i in (1, 3, 5, 0)], abs=1e-6)
    assert (forced.token, forced.rank, forced.top) == (4, 5, ())
    assert forced.logprob == pytest.approx(law[4], abs=1e-6)
    assert len(scored(20).top) == 6
