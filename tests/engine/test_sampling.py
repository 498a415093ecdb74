"""Noise against published vectors, filters against a naive reference, the law of the draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.api import Sampling
from engine.kernels.cpu import ops
from engine.noise import gumbel, philox
from engine.sampling import Draw, accept, draw, filter_row, signed64

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


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """Plain Python: order by logit, keep top_k, renormalise, keep until top_p is reached."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(order):
        order = order[:top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        kept.add(token)
        mass += weight / sum(weights)
        if mass >= top_p:
            break
    return kept


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (1, 1.0), (5, 1.0), (40, 0.8), (0, 0.01), (9999, 0.999)]
)
def test_filters_against_a_naive_reference(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = 3 * torch.randn(2000, generator=generator)
    out = filter_row(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    kept = set(out.isfinite().nonzero().flatten().tolist())
    assert kept == naive_kept(logits.tolist(), temperature, top_k, top_p)
    assert torch.equal(out[list(kept)], logits[list(kept)])


def test_ties_with_the_last_one_kept_are_kept() -> None:
    out = filter_row(torch.tensor([2.0, 1.0, 1.0, 0.0]), Sampling(top_k=2))
    assert out.isfinite().tolist() == [True, True, True, False]


def chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.6), Sampling(temperature=1.3, top_k=4)],
)
def test_draws_have_the_law_of_the_softmax(sampling: Sampling) -> None:
    trials = 20_000
    logits = torch.tensor([0.1, 1.2, -0.7, 2.0, 0.0, 0.9, -1.5, 1.1])
    filtered = filter_row(logits, sampling)
    law = (filtered / sampling.temperature).softmax(0)
    draws = [Draw(sampling, index) for index in range(trials)]
    rows = filtered.repeat(trials, 1)
    settings = torch.full((trials,), sampling.temperature)
    zeros, indices = torch.zeros(trials, dtype=torch.int64), torch.arange(trials)
    tokens = ops.gumbel_argmax(rows, settings, zeros, zeros, indices)
    counts = torch.bincount(tokens, minlength=8).double()
    assert counts[law == 0].sum() == 0
    present = law > 0
    # 99.99 % quantile for 7 degrees of freedom.
    assert chi_square(counts[present], law[present].double()) < 29.9
    few = draw(logits.repeat(16, 1), draws[:16], False, ops.gumbel_argmax)[0]
    assert few == tokens[:16].tolist()


def test_accept_stops_at_the_first_difference() -> None:
    assert accept([], [5]) == 0
    assert accept([5, 6], [5, 6, 7]) == 2
    assert accept([5, 9, 7], [5, 6, 7, 8]) == 1
    assert accept([9, 6], [5, 6, 7]) == 0


def test_seeds_keep_their_bits() -> None:
    assert signed64(2**64 - 1) == -1 and signed64(2**63) == -(2**63) and signed64(5) == 5
