"""The breaker of a draft, with a clock of its own."""

from __future__ import annotations

from coordinator.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(3, 2.0, clock)
    for _ in range(3):
        asked, clock.now = clock.now, clock.now + 0.1
        assert breaker.allows()
        breaker.failure(asked)
    return breaker


def test_lateness_in_a_row_opens_it_and_one_success_between_does_not() -> None:
    clock = Clock()
    assert opened(clock).open
    breaker = Breaker(3, 2.0, clock)
    for late in (True, True, False, True, True):
        asked, clock.now = clock.now, clock.now + 0.1
        if late:
            breaker.failure(asked)
        else:
            breaker.success()
    assert not breaker.open and breaker.allows()


def test_one_slow_step_of_many_sessions_is_one_incident() -> None:
    clock = Clock()
    breaker = Breaker(3, 2.0, clock)
    for _ in range(2):
        asked, clock.now = clock.now, clock.now + 0.1
        for _ in range(12):
            breaker.failure(asked)
    assert not breaker.open


def test_after_the_pause_one_session_asks_and_the_rest_wait_for_it() -> None:
    """WC-12: lateness ends, and so does the pause."""
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.allows()
    clock.now += 2.01
    assert breaker.allows()
    assert not breaker.allows() and breaker.open
    breaker.success()
    assert breaker.allows() and breaker.allows()


def test_a_late_probe_opens_it_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 2.01
    asked = clock.now
    assert breaker.allows()
    clock.now += 0.1
    breaker.failure(asked)
    clock.now += 1.9
    assert not breaker.allows()
    clock.now += 0.2
    assert breaker.allows()


def test_a_probe_that_is_never_heard_of_gives_way_to_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 2.01
    assert breaker.allows()
    clock.now += 2.01
    assert breaker.allows() and not breaker.allows()
