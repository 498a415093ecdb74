"""Noise against published vectors, filters against a naive reference, the law of the draws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.api import Sampling
from engine.draw_rows import DrawRows, DrawWords, draw_words
from engine.kernels.cpu import ops
from engine.noise import gumbel, philox
from engine.sampling import Draw, Filter, accept, draw, signed64

ONES = 0xFFFFFFFF
# Random123, kat_vectors, philox4x32 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(philox(torch.tensor(counter), key).tolist()) == expected


def test_noise_is_keyed_by_everything_and_by_nothing_else() -> None:
    base = gumbel(7, 0, 3, 101)
    assert torch.equal(base, gumbel(7, 0, 3, 400)[:101])  # a trimmed head sees the same noise
    for other in (gumbel(8, 0, 3, 101), gumbel(7, 1, 3, 101), gumbel(7, 0, 4, 101)):
        assert not torch.equal(base, other)
    assert not torch.equal(base, gumbel(7 + (1 << 40), 0, 3, 101))  # the high half of the seed
    assert torch.isfinite(gumbel(1, 0, 0, 200_000)).all()


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 17, 2**64 - 1])
def test_draws_follow_the_reference_noise(seed: int) -> None:
    logits = torch.randn(4, 777, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.7, seed=seed, choice=2)
    draws = [Draw(sampling, 10 + row) for row in range(4)]
    noise = torch.stack([gumbel(seed, 2, 10 + row, 777) for row in range(4)])
    expected = (logits / 0.7 + noise).argmax(-1).tolist()
    for kernel in (ops.gumbel_argmax, ops.gumbel_argmax_ref):
        assert draw(logits.clone(), draws, False, kernel)[0] == expected


def test_greedy_breaks_ties_to_the_lowest_id_and_reports_margins() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.5, 2.5, 1.0]])
    draws = [Draw(Sampling(temperature=0.0), 0)] * 2
    assert draw(logits, draws, True, ops.gumbel_argmax) == ([1, 2], [0.0, 1.5])


def naive_kept(logits: list[float], sampling: Sampling) -> set[int]:
    """Plain Python: order by logit, drop what min_p says, keep top_k, renormalise, keep until
    top_p is reached."""
    s = sampling
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - logits[order[0]]) / s.temperature) for i in order}
    order = [i for i in order if weight[i] >= s.min_p]
    if 0 < s.top_k < len(order):
        order = order[: s.top_k]
    total = sum(weight[i] for i in order)
    kept, mass = set(), 0.0
    for token in order:
        kept.add(token)
        mass += weight[token] / total
        if mass >= s.top_p:
            break
    return kept


FILTERS = [
    Sampling(top_p=0.9),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=40, top_p=0.8),
    Sampling(top_p=0.01),
    Sampling(top_k=9999, top_p=0.999),
    Sampling(min_p=0.2),
    Sampling(min_p=1.0),
    Sampling(min_p=0.02, top_k=30, top_p=0.7),
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("given", FILTERS)
def test_filters_against_a_naive_reference(temperature: float, given: Sampling) -> None:
    logits = 3 * torch.randn(2000, generator=torch.Generator().manual_seed(given.top_k))
    sampling = replace(given, temperature=temperature)
    row = Filter(logits, sampling)
    kept = {i for i, value in enumerate(logits.tolist()) if row.keeps(value)}
    assert kept == naive_kept(logits.tolist(), sampling)


@pytest.mark.parametrize("given", FILTERS)
def test_filtered_draws_are_the_argmax_over_what_is_kept(given: Sampling) -> None:
    """By the definition, with the reference noise; a flat law, so that many first draws fail."""
    logits = 0.7 * torch.randn(30, 300, generator=torch.Generator().manual_seed(3))
    sampling = replace(given, temperature=1.2, seed=11)
    expected = []
    for index, row in enumerate(logits):
        score = row.double() / 1.2 + gumbel(11, 0, index, 300).double()
        kept = sorted(naive_kept(row.tolist(), sampling))
        expected.append(kept[int(score[kept].argmax())])
    unfiltered = draw(
        logits,
        [Draw(replace(sampling, top_k=0, top_p=1.0, min_p=0.0), i) for i in range(30)],
        False,
        ops.gumbel_argmax,
    )[0]
    assert unfiltered != expected or sampling.top_p > 0.99
    before = logits.clone()
    draws = [Draw(sampling, index) for index in range(30)]
    for kernel in (ops.gumbel_argmax, ops.gumbel_argmax_ref):
        tokens, margins = draw(logits, draws, True, kernel)
        assert tokens == expected
    assert torch.equal(logits, before)
    for row, margin in zip(logits, margins, strict=True):
        kept = sorted(row[sorted(naive_kept(row.tolist(), sampling))].tolist(), reverse=True)
        assert margin == pytest.approx(kept[0] - kept[1] if len(kept) > 1 else math.inf)


def test_rows_behind_a_refused_draft_cost_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(4, 50)
    logits[:, 7] = 20.0
    sampling = Sampling(top_k=1)
    made: list[int] = []
    build = Filter.__init__

    def counted(self: Filter, row: Tensor, s: Sampling) -> None:
        made.append(1)
        build(self, row, s)

    monkeypatch.setattr(Filter, "__init__", counted)
    given = [None, 7, 8, 7]  # the second draft token is wrong
    draws = [Draw(sampling, index, token) for index, token in enumerate(given)]
    assert draw(logits, draws, False, ops.gumbel_argmax)[0][:2] == [7, 7]
    assert len(made) == 2


def test_ties_with_the_last_one_kept_are_kept() -> None:
    row = Filter(torch.tensor([2.0, 1.0, 1.0, 0.0]), Sampling(top_k=2))
    assert [row.keeps(value) for value in (2.0, 1.0, 0.0)] == [True, True, False]


def chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.3, top_k=4),
        Sampling(temperature=1.1, top_p=0.8, min_p=0.05),
    ],
)
def test_draws_have_the_law_of_the_softmax(sampling: Sampling) -> None:
    trials = 8_000
    logits = torch.tensor([0.1, 1.2, -0.7, 2.0, 0.0, 0.9, -1.5, 1.1])
    law = (logits.double() / sampling.temperature).softmax(0)
    dropped = [i for i in range(8) if i not in naive_kept(logits.tolist(), sampling)]
    law[dropped] = 0.0
    law /= law.sum()
    draws = [Draw(sampling, index) for index in range(trials)]
    tokens = draw(logits.repeat(trials, 1), draws, False, ops.gumbel_argmax)[0]
    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    assert counts[law == 0].sum() == 0
    present = law > 0
    # 99.99 % quantile for 7 degrees of freedom.
    assert chi_square(counts[present], law[present]) < 29.9


def test_broken_logits_end_the_draw_all_the_same() -> None:
    logits = torch.tensor([[math.nan, 1.0, 2.0], [1.0, math.inf, 0.0], [-math.inf] * 3])
    sampling = Sampling(top_k=1, top_p=0.5, min_p=0.5)
    tokens = draw(logits, [Draw(sampling, i) for i in range(3)], True, ops.gumbel_argmax)[0]
    assert tokens[1] == 1 and all(0 <= token < 3 for token in tokens)


def test_options_of_32_bits_fit_the_words_of_a_step() -> None:
    """One session's top_k must not fail the step of all others."""
    words = np.full(draw_words(2), -1, np.int32)
    written = DrawWords(words, 2)
    written.clear()
    written.write(1, 1, Sampling(top_k=2**32 - 1, choice=2**32 - 2, seed=2**64 - 3), 7)
    how = DrawRows.of(torch.from_numpy(words), 2)
    assert how.top_k is not None and how.top_k.tolist() == [0, 2**31 - 1]
    assert int(how.choice[1]) % 2**32 == 2**32 - 2
    assert int(how.seed[1]) % 2**64 == 2**64 - 3 and int(how.index[1]) == 7


@pytest.mark.parametrize("rows", range(1, 10))
def test_arrays_of_draws_begin_where_kernels_load_them_at_once(rows: int) -> None:
    """Otherwise a kernel is compiled for each remainder of the rows."""
    words = torch.zeros(draw_words(rows), dtype=torch.int32)
    how = DrawRows.of(words, rows)
    fields = [how.temperature, how.min_p, how.top_p, how.top_k, how.choice, how.index, how.seed]
    assert all(field is not None and len(field) == rows for field in fields)
    places = [field.data_ptr() - words.data_ptr() for field in fields if field is not None]
    assert places == sorted(set(places)) and all(place % 16 == 0 for place in places)


def test_accept_stops_at_the_first_difference() -> None:
    assert accept([], [5]) == 0
    assert accept([5, 6], [5, 6, 7]) == 2
    assert accept([5, 9, 7], [5, 6, 7, 8]) == 1
    assert accept([9, 6], [5, 6, 7]) == 0


def test_seeds_keep_their_bits() -> None:
    assert signed64(2**64 - 1) == -1 and signed64(2**63) == -(2**63) and signed64(5) == 5
