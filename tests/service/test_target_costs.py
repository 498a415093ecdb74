"""What a target measures of itself at start and says in the handshake."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest

import draft_svc
from coordinator.costs import from_wire
from engine.api import WarmUp, nothing
from engine.errors import CheckpointError
from specwire.errors import Reason, SpecwireError
from specwire.v1 import target_pb2, target_pb2_grpc
from target_svc.app import Loaded, TargetApp
from target_svc.costs import BUDGET_S, measure, prepared
from target_svc.draft_layers import draft_layers
from target_svc.settings import TargetSettings
from tests.engine.test_dflash import write_draft
from tests.engine.tiny import write_llama
from tests.service.toy_engine import ToyEngine

CHECKPOINTS = Path(draft_svc.__file__).parent / "checkpoints"


class TimedEngine(ToyEngine):
    """Its clock moves by a known time a step: 1 ms, and 0.1 ms for each row."""

    def __init__(self, step_ns: int = 1_000_000, **options: Any) -> None:
        super().__init__(**options)
        self.now_ns, self.step_ns = 0, step_ns
        self._run = self._nothing  # type: ignore[method-assign]

    def clock_ns(self) -> int:
        return self.now_ns

    def _nothing(self, item: Any) -> Any:
        assert item.table.length == item.start
        assert item.start + len(item.ids) <= item.table.capacity
        self.now_ns += 100_000 * len(item.ids)

    def step(self, items: Any, launched: Any = nothing) -> Any:
        self.now_ns += self.step_ns
        return super().step(items, launched)


def test_each_point_is_measured_and_no_page_is_kept() -> None:
    engine = TimedEngine(pages=200)
    found = measure(engine, True, engine.clock_ns)
    points = {(c.rows, c.sessions, c.context_tokens): c.compute_ns for c in found}
    assert set(points) == {(r, s, n) for r in (1, 4, 8) for s in (1, 4) for n in (64, 503)}
    assert all(ns == 1_000_000 + 100_000 * r * s for (r, s, _), ns in points.items())
    stats = engine.stats()
    assert stats.free == stats.total and not stats.tables
    # The coordinator counts draft tokens: a target's rows are one more.
    assert {cost.tokens for cost in from_wire(found, anchor=1)} == {0, 3, 7}


def test_a_pool_too_small_for_many_leaves_those_points_out() -> None:
    engine = TimedEngine(pages=40)
    found = measure(engine, True, engine.clock_ns)
    assert {(c.sessions, c.context_tokens) for c in found} == {(1, 64), (1, 503), (4, 64)}
    engine.check_integrity()


def test_a_slow_engine_stops_in_time() -> None:
    engine = TimedEngine(step_ns=300_000_000, pages=200)
    found = measure(engine, True, engine.clock_ns)
    assert 0 < len(found) < 4
    assert engine.now_ns < (BUDGET_S + 1.3) * 1e9


class ColdEngine(TimedEngine):
    """On a GPU: the first step of a shape takes two seconds more."""

    def __init__(self, device: str = "cuda:0 of its own") -> None:
        super().__init__(pages=200)
        self.info = replace(self.info, device=device)
        self.met: set[tuple[int, int]] = set()
        self.asked: list[WarmUp] = []

    def step(self, items: Any, launched: Any = nothing) -> Any:
        shape = len(items), len(items[0].ids)
        if shape not in self.met:
            self.met.add(shape)
            self.now_ns += 2_000_000_000
        return super().step(items, launched)

    def warm_up(self, wanted: WarmUp) -> int:
        self.asked.append(wanted)
        self.met |= set(product((1, 2, 4, 8), (1, 2, 4, 8)))
        return len(self.met)


def test_what_is_slow_once_leaves_no_point_out() -> None:
    engine, settings = ColdEngine(), TargetSettings(max_draft_tokens=3, warm_taps=(1, 2))
    costs = prepared(engine, settings, colocated=False, clock_ns=engine.clock_ns)
    assert len(costs) == 12 and all(cost.compute_ns < 10_000_000 for cost in costs)
    # The points that are measured are met, too.
    assert engine.asked == [WarmUp(sessions=8, widest=8, exports=(1, 2), apart=False)]


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), ("cuda:0 of its own", {"warm_sessions": 0})]
)
def test_nothing_is_run_on_a_cpu_or_where_it_is_switched_off(
    device: str, options: dict[str, int]
) -> None:
    engine = ColdEngine(device)
    costs = prepared(engine, TargetSettings(**options), False, engine.clock_ns)
    assert not engine.asked and 0 < len(costs) < 12


@pytest.mark.parametrize("device", ["cpu", "cuda:0 of its own"])
def test_layers_that_the_model_lacks_are_refused_on_any_device(device: str) -> None:
    engine = ColdEngine(device)
    last = engine.info.layer_count - 1
    prepared(engine, TargetSettings(warm_taps=(0, last)), False, engine.clock_ns)
    with pytest.raises(SpecwireError, match=f"warm_taps is .*accepted: .*0 to {last}") as caught:
        prepared(engine, TargetSettings(warm_taps=(0, last + 1)), False, engine.clock_ns)
    assert caught.value.reason is Reason.SETTINGS_INVALID
    for taps in ("-1", "2,1", "1,1"):
        with pytest.raises(SpecwireError, match=f"warm_taps is '{taps}'; accepted: layers"):
            TargetSettings.load(["--warm-taps", taps])


def test_sessions_that_are_not_drafted_for_are_thought_of() -> None:
    for colocated, context, apart in (
        (True, "own", True),
        (True, "all", False),
        (False, "own", False),
    ):
        engine, settings = ColdEngine(), TargetSettings(draft_context=context)
        prepared(engine, settings, colocated, engine.clock_ns)
        assert engine.asked[0].apart == apart


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_shipped_drafts_ask_for_the_same_layers(name: str) -> None:
    """Graphs of the one are good for the other."""
    config = json.loads((CHECKPOINTS / f"smollm2-135m-{name}" / "config.json").read_text())
    layers = (config.get("dflash_config") or config)["target_layer_ids"]
    assert tuple(layers) == draft_layers(TargetSettings())


def test_rows_that_a_known_draft_asks_for_are_thought_of(tmp_path: Path) -> None:
    def exports(**options: Any) -> tuple[int, ...]:
        engine = ColdEngine()
        prepared(engine, TargetSettings(**options), False, engine.clock_ns)
        return engine.asked[0].exports

    write_llama(tmp_path / "target")
    write_draft(tmp_path / "draft")
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert exports() == draft_layers(TargetSettings()) == (1, 8, 14, 20, 27)
    assert not exports(model=target) and not exports(warm_draft="") and not exports(colocate="x")
    assert exports(model=target, warm_draft=draft, warm_taps=(3,)) == (3,)
    found = exports(model=target, warm_draft=draft)
    assert found and found == tuple(config["dflash_config"]["target_layer_ids"])
    with pytest.raises(CheckpointError):
        exports(model=target, warm_draft=target)
    # Nothing is read on a CPU.
    engine = ColdEngine("cpu")
    assert prepared(engine, TargetSettings(warm_draft="/none"), False, engine.clock_ns)


async def test_what_was_measured_is_said(tmp_path: Path) -> None:
    engine = TimedEngine(pages=200)
    costs = tuple(measure(engine, True, engine.clock_ns))
    settings = TargetSettings(address=f"unix:{tmp_path}/t", reflection=False)
    app = TargetApp(settings, lambda _: Loaded(engine, b"{}", costs=costs))
    await app.start()
    try:
        async with grpc.aio.insecure_channel(app.address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            info = await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        assert tuple(info.costs) == costs
    finally:
        await app.stop()
