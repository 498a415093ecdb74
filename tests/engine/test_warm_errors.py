"""A warm-up that runs out of memory, meets a kernel that does not compile, or is to end early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from draft_svc.methods.base import Draft, Request
from draft_svc.methods.first_runs import Proposer, first_runs
from engine.api import WarmUp
from engine.block_step import CallShape
from engine.errors import BackendUnavailable
from tests.engine.fake_graphs import FakeGraphs
from tests.load.free_model import FreeEngine

Fail = Callable[[int, int, bool], Exception | None]
SHAPES = [
    CallShape(4, 2, False, captured=False),
    *(CallShape(2, k, f) for f in (False, True) for k in (2, 1)),
    CallShape(1, 2, False),
]


def engine_that(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> tuple[FreeEngine, list[int]]:
    """`fail` is asked for each step's sessions, rows and whether it may be captured."""
    engine, run = FreeEngine(8), list[int]()
    assert engine._stepper is not None
    engine._stepper._graphs = FakeGraphs()
    plain = engine._step

    def step(items: Any, launched: Any = None, capture: bool = True) -> Any:
        error = fail(len(items), len(items[0].ids), capture)
        if error is not None:
            raise error
        run.append(len(items))
        return plain(items, capture=capture)

    monkeypatch.setattr(engine, "_step", step)
    return engine, run


def test_a_target_goes_on_without_memory_or_kernels_of_many_sessions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(sessions: int, rows: int, capture: bool) -> Exception | None:
        if sessions == 2 and rows == 4:
            return torch.OutOfMemoryError("none left")
        return None if capture else OutOfResources(300_000, 232_448, "shared memory")

    wanted = WarmUp(sessions=2, widest=4)
    whole, _ = engine_that(lambda *_: None, monkeypatch)
    every = whole.warm_up(wanted)
    engine, run = engine_that(fail, monkeypatch)
    assert 0 < engine.warm_up(wanted) == len(run) < every and max(run) == 2
    assert "no memory to meet Shape(sessions=2, rows=4" in caplog.text
    assert "cannot be compiled: out of resource: shared memory" in caplog.text
    stats = engine.stats()
    assert (stats.free, stats.tables) == (stats.total, 0)


def test_a_target_without_a_kernel_for_its_sessions_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = engine_that(
        lambda n, rows, _: PTXASError("bad") if rows == 2 else None, monkeypatch
    )
    text = r"kernel of the step Shape\(sessions=1, rows=2.* cannot be compiled .*bad"
    with pytest.raises(BackendUnavailable, match=text):
        engine.warm_up(WarmUp(sessions=1, widest=2))
    assert engine.stats().free == engine.stats().total


def test_a_target_that_is_to_end_meets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run = engine_that(lambda *_: None, monkeypatch)
    wanted = WarmUp(sessions=8, widest=8, stopped=lambda: len(run) >= 5)
    assert engine.warm_up(wanted) == len(run) == 5
    assert wanted == WarmUp(sessions=8, widest=8)


class Draws:
    """A method that proposes nothing but notes down how it was asked."""

    def __init__(self, fail: Fail = lambda *_: None) -> None:
        self.info = SimpleNamespace(
            method="toy", device="cpu", max_draft_tokens=2, max_length_tokens=99, block_size=4
        )
        self.open, self.run, self._fail = 0, list[tuple[int, int, bool]](), fail

    def fill(self, sessions: int, length: int) -> list[Any]:
        self.open += sessions
        return [SimpleNamespace(sampling=None) for _ in range(sessions)]

    def propose(self, requests: Sequence[Request[Any]], capture: bool = True) -> list[Draft]:
        shape = len(requests), requests[0].k, capture
        error = self._fail(*shape)
        if error is not None:
            raise error
        self.run.append(shape)
        return [Draft((1,) * request.k, ()) for request in requests]

    def close(self, context: Any) -> None:
        self.open -= 1


def runs(draws: Draws, stopped: Callable[[], bool] = lambda: False) -> list[tuple[int, int, bool]]:
    try:
        first_runs(cast(Proposer, draws), draws.fill, SHAPES, (3,), stopped)
    finally:
        assert draws.open == 0
    return draws.run


def test_a_draft_meets_every_shape() -> None:
    wanted = [(shape.blocks, shape.slots, shape.captured) for shape in SHAPES]
    assert runs(Draws()) == wanted and not wanted[0][2]


def test_a_draft_goes_on_without_memory_or_kernels_of_many_blocks() -> None:
    def fail(blocks: int, slots: int, capture: bool) -> Exception | None:
        if not capture:
            return OutOfResources(2, 1, "registers")
        return torch.OutOfMemoryError() if (blocks, slots) == (2, 2) else None

    assert runs(Draws(fail)) == [(2, 1, True), (2, 1, True), (1, 2, True)]


def test_a_draft_without_a_kernel_says_so() -> None:
    draws = Draws(lambda blocks, slots, _: PTXASError("bad") if slots == 1 else None)
    with pytest.raises(BackendUnavailable, match=r"step CallShape\(blocks=2, slots=1.*bad"):
        runs(draws)


def test_a_draft_that_is_to_end_meets_no_more() -> None:
    draws = Draws()
    assert runs(draws, lambda: len(draws.run) >= 2) == [(4, 2, False), (2, 2, True)]
    assert not runs(Draws(), lambda: True)
