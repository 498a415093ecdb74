"""K and the way in which rounds follow each other are one choice, by what a round costs in the end:
the exchange that begins a run included, wherever the coordinator is."""

from __future__ import annotations

import pytest

from tests.unit.round_world import LIMIT, RoundWorld

STEP, DRAFT, THERE = 1.0, 0.3, 0.3


async def fixed(world: RoundWorld, k: int, rounds: int = 2000) -> float:
    """Tokens a millisecond with K held; 0: plain."""
    if k:
        world.plan._adaptive, world.plan._k = False, k
    else:
        world.plan.tokens = lambda *_: world.plan._plain("does_not_pay", 32)  # type: ignore[method-assign]
    await world.rounds(200)
    return (await world.rounds(rounds))[1]


@pytest.mark.parametrize("here", [0.3, 1.0, 5.0, 10.0, 20.0])
@pytest.mark.parametrize("chance", [0.64, 0.9])
async def test_it_comes_near_the_best_from_wherever_it_drives(
    here: float, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of nine rounds pays one exchange, one of plain steps a thirty-third of one: from afar
    plain is faster where it is not from nearby."""

    def world(seed: int) -> RoundWorld:
        made = RoundWorld(monkeypatch, STEP, DRAFT, here, THERE, seed=seed)
        made.chances = [chance]
        return made

    held = [await fixed(world(9), k) for k in range(LIMIT + 1)]
    rates = []
    for seed in range(4):
        adaptive = world(seed)
        await adaptive.rounds(1000)
        rates.append((await adaptive.rounds(2000))[1])
    mean = sum(rates) / len(rates)
    print(f"here={here} chance={chance} adaptive={mean:.3f} {[f'{rate:.3f}' for rate in held]}")
    assert mean > 0.94 * max(held)


@pytest.mark.parametrize("here", [0.3, 5.0, 10.0])
async def test_probes_cost_little_where_an_exchange_is_dear(
    here: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def world() -> RoundWorld:
        made = RoundWorld(monkeypatch, STEP, 1.5, here, THERE)
        made.chances = [0.3]
        return made

    adaptive = world()
    await adaptive.rounds(3000)
    ks, rate = await adaptive.rounds(9000)
    assert sum(k > 0 for k in ks) > 0, "it still looks"
    assert rate > 0.98 * await fixed(world(), 0)


@pytest.mark.parametrize("here", [0.3, 1.0])
@pytest.mark.parametrize("beside", [False, True])
async def test_a_drafter_that_says_how_sure_it_is_is_no_worse_off(
    here: float, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer step takes longer, but all tokens are as likely: a cut saves nothing, and what a run
    saves is kept."""
    for says in (False, True):
        there = 0.0 if beside else THERE
        made = RoundWorld(monkeypatch, STEP, DRAFT, here, there, rise=0.1, says=says, beside=beside)
        made.chances = [0.75]
        await made.rounds(1000)
        asked = made.asked
        ks, rate = await made.rounds(2000)
        print(f"here={here} beside={beside} says={says} {rate:.3f}")
        assert sum(k > 0 for k in ks) > 0.95 * len(ks) and rate > 1.12
        assert made.asked - asked < 0.25 * len(ks), "most rounds go on by themselves"


@pytest.mark.parametrize(("here", "driven"), [(0.05, True), (1.0, False)])
@pytest.mark.parametrize("beside", [False, True])
async def test_rounds_are_driven_where_what_a_cut_saves_is_more_than_an_exchange(
    here: float, driven: bool, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is easy or hard, and the drafter knows; each token more takes half a step."""
    rates = []
    for says in (False, True):
        there = 0.0 if beside else 0.05
        made = RoundWorld(monkeypatch, STEP, 0.2, here, there, rise=0.5, says=says, beside=beside)
        made.chances = [0.95, 0.1]
        await made.rounds(500)
        asked = made.asked
        ks, rate = await made.rounds(2000)
        rates.append(rate)
    print(f"here={here} beside={beside} {rates}")
    assert (made.asked - asked > 0.6 * len(ks)) is driven
    assert rates[1] > (1.05 if driven else 0.97) * rates[0]


async def test_what_k_costs_is_learned_at_a_target_that_is_older_than_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes a run for plain steps: asked once, and never again."""
    world = RoundWorld(monkeypatch, STEP, DRAFT, 0.3, 0.0, rise=0.1, beside=True, old=True)
    world.chances = [0.9]
    await world.rounds(100)
    assert not world.target.drafts_ahead and world.record.fallbacks["no_proposal"] <= 8
    asked = world.asked
    ks, rate = await world.rounds(1000)
    assert world.asked - asked > 0.98 * len(ks) and rate > 1.6
    ahead, driven = (
        {k: 1e3 * s for cell in costs._cells.values() for k, s in cell.seen.items() if k}
        for costs in (world.target.costs.ahead, world.target.costs.driven)
    )
    assert not ahead and len(driven) > 1
    assert driven == pytest.approx({k: world._step(k) + 0.6 for k in driven})
