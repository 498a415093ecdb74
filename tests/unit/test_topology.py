"""The cost model of `specwire plan`: numbers worked out by hand, and what must hold for any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.costs import Cost
from coordinator.topology import (
    StepTimes,
    Work,
    best_colocated,
    best_separate,
    break_even_ms,
    colocated,
    plain,
    separate,
    tau,
)
from coordinator.topology_link import Link


def steps(*points: tuple[int, int, float]) -> StepTimes:
    """Of (draft tokens, sessions, ms)."""
    return StepTimes(Cost(k, s, 0, ms / 1e3) for k, s, ms in points)


def work(
    verify: StepTimes | None = None,
    draft: StepTimes | None = None,
    beside: StepTimes | None = None,
    taus: dict[int, float] | None = None,
    batch: int = 1,
    row_bytes: int = 0,
) -> Work:
    draft = draft or steps((4, 1, 4.0))
    verify = verify or steps((0, 1, 10.0), (4, 1, 12.0))
    return Work(verify, draft, beside or draft, taus or {4: 2.5}, batch, row_bytes)


def test_tokens_a_round() -> None:
    assert tau([0.5, 0.4, 0.2], 0) == 1.0
    # 1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.2, then 0.2 again
    assert tau([0.5, 0.4, 0.2], 3) == pytest.approx(1.74)
    assert tau([0.5, 0.4, 0.2], 4) == pytest.approx(1.748)


def test_times_between_what_was_measured() -> None:
    table = steps((0, 1, 10.0), (8, 1, 18.0), (0, 5, 20.0), (8, 5, 60.0))
    assert table.ms(0, 1) == 10.0
    assert table.ms(4, 1) == 14.0
    assert table.ms(4, 5) == 40.0
    assert table.ms(4, 3) == 27.0
    two = StepTimes([Cost(0, 1, 64, 0.010), Cost(0, 1, 2048, 0.030)], context_tokens=1500)
    assert two.ms(0, 1) == 30.0


def test_more_sessions_are_more_work_for_the_services() -> None:
    """Once for each beyond the first in a plain round, twice with a proposal beside it, four times
    with a draft service and its rows."""
    ahead = Link(exchange_ms=0.5, ahead=10**9, free_run=10**9)  # and never asked
    none, some = ahead, replace(ahead, session_ms=0.05)
    many = work(batch=9)
    assert plain(many, some).cycle_ms - plain(many, none).cycle_ms == pytest.approx(0.4)
    inside = colocated(many, some, 4).cycle_ms - colocated(many, none, 4).cycle_ms
    assert inside == pytest.approx(0.8)
    apart = [separate(many, link, 4, 1).exchanges_ms for link in (some, none)]
    assert apart[0] - apart[1] == pytest.approx(1.6)
    halves = [separate(many, link, 4, 2).exchanges_ms for link in (some, none)]
    assert halves[0] - halves[1] == pytest.approx(0.8)  # five sessions in the larger half
    assert plain(work(), some) == plain(work(), none)


def test_who_has_to_be_asked_misses_a_round_of_the_others() -> None:
    """Once in 33 plain rounds, once in 9 beside a drafter; alone nothing is missed but the wait."""
    two = work(steps((0, 1, 10.0), (4, 1, 12.0)), batch=2)
    link = Link(exchange_ms=0.5)
    assert plain(two, link).cycle_ms == pytest.approx(10.2 * (1 + 1 / 33))
    assert colocated(two, link, 4).cycle_ms == pytest.approx(16.4 * (1 + 1 / 9))
    # A wire that is longer than their round is what is waited for.
    far = replace(link, target_rtt_ms=100.0)
    assert colocated(two, far, 4).cycle_ms == pytest.approx(16.4 + 100.3 / 9)


def test_one_session_by_hand() -> None:
    link = Link(rtt_ms=3.0, bandwidth_gbit=10.0, exchange_ms=0.5, target_rtt_ms=0.2)
    one = work(row_bytes=40_960)
    # Two fifths of an exchange's work lie between two steps of a target that runs ahead; the rest
    # and the wire come once in 33.
    assert plain(one, link).cycle_ms == pytest.approx(10.2 + 0.5 / 33)
    assert plain(one, link).tokens_per_s == pytest.approx(1000 / (10.2 + 0.5 / 33))
    # A proposal to the verdict: two turns.
    beside = colocated(one, replace(link, ahead=0), 4)
    assert beside.cycle_ms == pytest.approx(12.0 + 4.0 + 0.7 + 0.2)
    assert beside.tokens_per_s == pytest.approx(2500 / 16.9)
    # With 4 rounds that are not asked for.
    assert colocated(one, replace(link, ahead=4), 4).cycle_ms == pytest.approx(16.0 + 0.4 + 0.1)
    alone = separate(one, replace(link, ahead=0), 4, 1)
    # Rows: 2.5 of 40,960 bytes on 10 Gbit/s are 0.0819 ms, and are there before the word to go on.
    assert alone.rows_ms == 0.0
    assert alone.exchanges_ms == pytest.approx(0.7 + 3.5)
    assert alone.cycle_ms == pytest.approx(20.2)


def test_a_target_that_asks_for_its_rows_saves_an_exchange_a_round() -> None:
    """A turn and the exchange with the draft; that with the coordinator comes once in 9 rounds."""
    link = Link(rtt_ms=3.0, bandwidth_gbit=10.0, exchange_ms=0.5, target_rtt_ms=0.2)
    asked = separate(work(row_bytes=40_960), link, 4, 1)
    assert asked.exchanges_ms == pytest.approx(0.2 + 3.5 + (0.3 + 0.2) / 9)
    # The question is behind the rows of the same stream: all of their time is waited for.
    assert asked.rows_ms == pytest.approx(0.08192)
    parts = 12.0 + 4.0 + asked.exchanges_ms + asked.rows_ms
    assert asked.cycle_ms == pytest.approx(parts)
    # A drafter that reads none is asked through the coordinator, whatever the target could do.
    assert separate(work(), link, 4, 1).exchanges_ms == pytest.approx(0.7 + 3.5)
    far = replace(link, target_rtt_ms=20.0)
    longer = separate(work(row_bytes=40_960), far, 4, 1).cycle_ms - asked.cycle_ms
    assert longer == pytest.approx(19.8 / 9)
    # Of two sessions one that has to be asked finds the target free: no round is missed.
    two = separate(work(batch=2, row_bytes=1), link, 4, 1)
    assert two.exchanges_ms == pytest.approx(asked.exchanges_ms)
    # Where it is asked every round the halves of the exchange are the same work.
    each, none = replace(link, ahead=0), work()
    assert separate(work(row_bytes=1), each, 4, 1).exchanges_ms == pytest.approx(
        separate(none, each, 4, 1).exchanges_ms
    )


def test_rows_are_waited_for_where_the_wire_is_slow() -> None:
    link = Link(rtt_ms=3.0, bandwidth_gbit=0.1, exchange_ms=0.5)
    alone = separate(work(row_bytes=40_960), replace(link, ahead=0), 4, 1)
    # 819,200 bits at 100,000 a ms, less half of the target's exchange.
    assert alone.rows_ms == pytest.approx(8.192 - 0.25)
    assert alone.cycle_ms == pytest.approx(12 + 4 + 0.5 + 3.5 + 7.942)
    asked = separate(work(row_bytes=40_960), link, 4, 1)
    assert asked.cycle_ms == pytest.approx(12 + 4 + 0.2 + 3.5 + 0.3 / 9 + 8.192)


def test_break_even_by_hand() -> None:
    link = Link(exchange_ms=0.5, ahead=0, free_run=10**9)
    one = work()
    # 2.5 tokens in 2.5 x 10.2 ms are as fast as plain: 12 + 4 + 1 are spent without the wire.
    assert break_even_ms(one, link, plain(one, link)) == pytest.approx(8.5)
    # The same device times: an exchange more is never made up for.
    assert break_even_ms(one, link, best_colocated(one, link)) is None
    slow = work(beside=steps((4, 1, 6.0)))
    # 2 ms longer beside the target: they pay for 0.3 ms of work and 1.7 ms of wire.
    assert break_even_ms(slow, link, best_colocated(slow, link)) == pytest.approx(1.7)


def test_two_halves_in_turn_hide_the_draft_and_the_wire() -> None:
    """Compute-bound steps take half as long for half the sessions: both devices stay busy."""
    verify = steps((0, 8, 16.0), (0, 16, 32.0), (4, 8, 20.0), (4, 16, 40.0))
    draft = steps((4, 8, 10.0), (4, 16, 20.0))
    many = work(verify, draft, taus={4: 2.5}, batch=16)
    link = Link(rtt_ms=5.0, exchange_ms=0.5, ahead=10**9)
    assert separate(many, link, 4, 1).cycle_ms == pytest.approx(66.0)
    alone = best_separate(many, link)
    # 20 + 10 + 6 would be over before the target has done both halves.
    assert (alone.groups, alone.cycle_ms) == (2, 40.0)
    assert colocated(many, link, 4).cycle_ms == pytest.approx(60.4)
    # As fast as co-located while 20 + 10 + 1 + r stay within 60.4.
    assert break_even_ms(many, link, colocated(many, link, 4)) == pytest.approx(29.4)


def test_steps_bound_by_memory_gain_nothing_from_halves() -> None:
    verify = steps((0, 8, 16.0), (0, 16, 16.0), (4, 8, 20.0), (4, 16, 20.0))
    many = work(verify, steps((4, 8, 4.0), (4, 16, 4.0)), batch=16)
    assert best_separate(many, Link(rtt_ms=1.0)).groups == 1


def test_each_topology_takes_the_k_that_suits_it() -> None:
    """Where a round costs more beside its tokens, more of them pay."""
    chances = [0.8] * 8
    taus = {k: tau(chances, k) for k in range(1, 9)}
    one = work(steps((0, 1, 10.0), (8, 1, 26.0)), steps((1, 1, 1.0), (8, 1, 4.5)), taus=taus)
    near = best_separate(one, Link(rtt_ms=0.0)).k
    far = best_separate(one, Link(rtt_ms=60.0)).k
    assert best_colocated(one, Link()).k <= near < far


positive = st.floats(0.1, 100.0)
rtts = st.floats(0.0, 200.0)


@st.composite
def loads(draw: st.DrawFn) -> Work:
    def table() -> StepTimes:
        ms, by_token, by_session = draw(positive), draw(st.floats(0, 1)), draw(st.floats(0, 1))
        return steps(
            *(
                (k, s, ms * (1 + by_token * k) * (1 + by_session * (s - 1)))
                for k in (0, 7)
                for s in (1, 64)
            )
        )

    chances = draw(st.lists(st.floats(0, 1), min_size=1, max_size=7))
    ks = draw(st.sets(st.integers(1, 7), min_size=1))
    return Work(
        table(),
        table(),
        table(),
        {k: tau(chances, k) for k in ks},
        draw(st.integers(1, 64)),
        draw(st.integers(0, 200_000)),
    )


links = st.builds(Link, rtts, st.floats(0.01, 400.0), st.floats(0.0, 5.0), st.floats(0.0, 20.0))


@given(loads(), links, rtts)
def test_a_longer_wire_never_helps(load: Work, link: Link, more_ms: float) -> None:
    near, far = (best_separate(load, replace(link, rtt_ms=link.rtt_ms + d)) for d in (0, more_ms))
    assert far.tokens_per_s <= near.tokens_per_s * (1 + 1e-9)
    assert best_colocated(load, link) == best_colocated(load, replace(link, rtt_ms=more_ms))


@given(loads(), links, st.floats(1.0, 100.0))
def test_a_wider_wire_never_hurts(load: Work, link: Link, times: float) -> None:
    wide = replace(link, bandwidth_gbit=link.bandwidth_gbit * times)
    narrow_speed = best_separate(load, link).tokens_per_s
    assert best_separate(load, wide).tokens_per_s >= narrow_speed * (1 - 1e-9)


@given(loads(), links)
def test_no_device_works_more_than_all_the_time(load: Work, link: Link) -> None:
    one = best_separate(load, link)
    for ms in (one.verify_ms, one.draft_ms):
        assert one.groups * ms <= one.cycle_ms * (1 + 1e-9)
    parts = one.verify_ms + one.draft_ms + one.exchanges_ms + one.rows_ms
    assert one.cycle_ms >= parts * (1 - 1e-9)


@given(loads(), links)
def test_the_break_even_is_where_both_are_as_fast(load: Work, link: Link) -> None:
    for rival in (plain(load, link), best_colocated(load, link)):
        even = break_even_ms(load, link, rival)
        if even is None:
            at_zero = best_separate(load, replace(link, rtt_ms=0.0))
            assert at_zero.tokens_per_s <= rival.tokens_per_s * (1 + 1e-9)
            continue
        at = best_separate(load, replace(link, rtt_ms=even)).tokens_per_s
        beyond = best_separate(load, replace(link, rtt_ms=1.01 * even + 0.01)).tokens_per_s
        assert at >= rival.tokens_per_s * (1 - 1e-9)
        assert beyond < rival.tokens_per_s
