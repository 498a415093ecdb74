"""What a trial of the policy measures is what is used afterwards: rounds that the target goes on
for by itself where it can, and nothing else stands for them."""

from __future__ import annotations

import pytest

from specwire.v1 import target_pb2
from tests.unit.round_world import RoundWorld

# A step takes 1 ms, a draft 0.3 ms, and at K=3 a round brings 2.3 tokens.
STEP, DRAFT, CHANCE = 1.0, 0.3, 0.64


def share(ks: list[int]) -> float:
    return sum(k > 0 for k in ks) / len(ks)


@pytest.mark.parametrize("here", [0.3, 0.6])
@pytest.mark.parametrize("poor_rounds", [0, 400])
async def test_it_settles_on_rounds_that_pay_though_driven_ones_do_not(
    here: float, poor_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead 1 + 0.3 + 2 hops of 0.3, driven two hops more, and those through the coordinator; also
    after text that nobody can guess, when only probes can find out."""
    shares, rates = [], []
    for seed in range(1, 5):
        world = RoundWorld(monkeypatch, STEP, DRAFT, here, 0.3, seed=seed)
        if poor_rounds:
            world.chances = [0.05]
            ks, _ = await world.rounds(poor_rounds)
            assert share(ks[-200:]) < 0.2
        world.chances = [CHANCE]
        await world.rounds(1500)
        ks, rate = await world.rounds(2000)
        shares.append(share(ks))
        rates.append(rate)
    assert sum(shares) / 4 > 0.75 and sum(rates) / 4 > 1.07


async def test_it_stays_plain_where_neither_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = RoundWorld(monkeypatch, STEP, 1.5, 0.3, 0.3)
    world.chances = [CHANCE]
    await world.rounds(500)
    ks, rate = await world.rounds(2000)
    assert share(ks) < 0.06 and rate > 0.95


async def test_short_sessions_together_find_out_what_plain_steps_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds with a draft take far longer than the tables say, plain steps do not; no session by
    itself is long enough to try everything."""
    world = RoundWorld(monkeypatch, STEP, DRAFT, 0.3, 0.3)
    world.chances = [CHANCE]
    monkeypatch.setattr(world, "_step", lambda k: STEP * (1.9 if k else 1.0))
    shares, rates = [], []
    for _ in range(20):
        world.begin()
        ks, rate = await world.rounds(50)
        shares.append(share(ks))
        rates.append(rate)
    assert sum(shares[8:]) / 12 < 0.1 and sum(rates[8:]) / 12 > 0.93
    # Where it begins to pay they notice, though none has time to look for long.
    monkeypatch.setattr(world, "_step", lambda k: STEP)
    shares.clear()
    for _ in range(60):
        world.begin()
        shares.append(share((await world.rounds(50))[0]))
    assert sum(shares[30:]) / 30 > 0.7


async def test_a_plain_run_waits_for_nobody_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing was asked the next step may go out before the text does."""
    world = RoundWorld(monkeypatch, STEP, 1.5, 0.3, 0.3)
    world.chances = [0.1]
    await world.rounds(300)
    for _ in range(100):
        await world.rounds(1)
        asked = world.drafting._asked is not None  # type: ignore[attr-defined]
        assert not (asked and world.drafting.in_hand == [])
        if world.plan._why_plain:
            assert world.drafting.in_hand == []
    world.at.attached = False
    assert world.drafting.in_hand is None


async def test_driven_rounds_are_judged_by_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the target cannot ask the draft, the same world is better off plain."""
    world = RoundWorld(monkeypatch, STEP, DRAFT, 0.3, 0.3, direct=False)
    world.chances = [CHANCE]
    await world.rounds(500)
    ks, rate = await world.rounds(2000)
    assert share(ks) < 0.06 and rate > 0.95


async def test_a_trial_is_one_run_and_notes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every K that is chosen or tried has its costs from rounds ahead; the driven ones, of the few
    rounds that begin, stand by themselves."""
    world = RoundWorld(monkeypatch, STEP, DRAFT, 0.6, 0.3)
    world.chances = [0.8]
    await world.rounds(1000)
    tried = set(world.record.drafted[1:])
    for costs, ahead_ms, driven_ms in (
        (world.target.costs, STEP, STEP + 1.2),
        (world.standing.costs, DRAFT + 0.6, DRAFT + 1.2),
    ):
        for cells, expected in ((costs.ahead._cells, ahead_ms), (costs.driven._cells, driven_ms)):
            seen = [(k, 1e3 * s) for cell in cells.values() for k, s in cell.seen.items() if k]
            assert seen and [s for _, s in seen] == pytest.approx([expected] * len(seen))
            if cells is costs.ahead._cells:
                assert {k for k, _ in seen} == {k for k in tried if k} and len(tried) > 2


@pytest.mark.parametrize("again", [True, False])
async def test_an_answer_kept_from_a_run_is_no_cost_of_another_k(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last verdict of a run said `late`; asked once more, with the K of now, the draft says at
    once what it had by then."""
    world = RoundWorld(monkeypatch, STEP, DRAFT, 0.3, 0.3)
    drafting, world.at.told = world.drafting, 9
    if again:
        drafting._run.begin(2, 0)
    late = target_pb2.Verdict(step_id=4, base_len=9, new_len=10, tokens=[1])
    late.proposal.step_id, late.proposal.base_len, late.proposal.reason = 4, 10, "late"
    late.proposal.timings.queue_ns = 50_000_000
    drafting.advance(late, [1] * 10, 3)
    assert await drafting.proposal() == [1, 1, 1]
    costs = world.standing.costs
    noted = [
        {k for c in way._cells.values() for k in c.seen} for way in (costs.driven, costs.ahead)
    ]
    assert noted == ([set(), {2}] if again else [{3}, set()])
    assert (world.standing.proposal_s == 0) is again
