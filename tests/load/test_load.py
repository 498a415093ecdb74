"""The load generators themselves: what they count, and from when they count it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire.errors import Reason, SpecwireError
from tests.deploy.json_schema import Validator
from tests.load import coordinator, draft, target
from tests.load.openloop import UNFINISHED, Plan, Sample, run
from tests.load.report import SCHEMA, percentile, report, summary, table
from tests.service.coordinator_harness import ScriptedDraft, world
from tests.service.draft_peer import LIMITS, serving
from tests.service.target_harness import target as target_service
from tests.service.toy_engine import ToyEngine

PLAN = Plan(rate_per_s=60, duration_s=1.0, seed=3, drain_s=10)


def flags(command: Callable[[list[str]], int], *argv: str) -> argparse.Namespace:
    """What a generator's own parser makes of flags."""
    caught: list[argparse.Namespace] = []
    original = argparse.ArgumentParser.parse_args

    def keep(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        caught.append(original(self, args, namespace))
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", keep)
        command(list(argv))
    return caught[0]


def checked(found: dict[str, Any]) -> dict[str, Any]:
    """A report that survives JSON, fits its schema, and whose counts add up."""
    assert list(Validator(SCHEMA).errors(json.loads(json.dumps(found)))) == []
    counts = found["counts"]
    assert counts["scheduled"] == counts["ok"] + counts["failed"] + counts["unfinished"]
    assert counts["failed"] == sum(found["errors"].values())
    assert found["latency_ms"]["start_lag"]["count"] == counts["scheduled"]
    assert found["latency_ms"]["session"]["count"] == counts["ok"] + counts["unfinished"]
    assert str(counts["ok"]) in table(found)
    return found


# -- arrivals and statistics ---------------------------------------------------------------------


def test_arrivals_are_poisson_and_repeatable() -> None:
    plan = Plan(rate_per_s=50, duration_s=200, seed=1)
    times = plan.arrivals()
    assert times == plan.arrivals() != Plan(50, 200, 2).arrivals()
    assert times == sorted(times) and times[0] > 0 and times[-1] < 200
    # 10,000 expected: within five standard deviations.
    assert abs(len(times) - 10_000) < 500
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    # An exponential law has a standard deviation equal to its mean; a steady beat has none.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_percentiles_are_nearest_ranks() -> None:
    ordered = [float(i) for i in range(1, 1001)]
    assert [percentile(ordered, q) for q in (0.5, 0.9, 0.99, 0.999, 1.0)] == [
        500.0,
        900.0,
        990.0,
        999.0,
        1000.0,
    ]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.999) == 7.0
    assert summary([])["count"] == 0 and summary([3.0, 1.0])["max"] == 3.0


async def test_a_stall_shows_in_every_request_that_was_due() -> None:
    """A closed loop would note one slow request here; the schedule notes all that waited."""
    stall = asyncio.Event()
    asyncio.get_running_loop().call_later(0.7, stall.set)

    async def work(number: int, sample: Sample) -> None:
        await stall.wait()

    done = await run(PLAN, work)
    found = checked(report("target", "nowhere", PLAN, {}, done))
    due = [700 - at * 1000 for at in PLAN.arrivals() if at < 0.7]
    assert len(due) > 20
    measured = sorted((s.ended - s.scheduled) * 1000 for s in done.samples)[-len(due) :]
    assert all(m >= d - 1 for m, d in zip(measured, sorted(due), strict=True))
    latency = found["latency_ms"]["session"]
    assert latency["p99"] >= sorted(due)[-2] - 1 and latency["p50"] > 100
    assert found["latency_ms"]["start_lag"]["p50"] < latency["p50"]


async def test_failures_and_stragglers_are_counted_apart() -> None:
    plan = Plan(rate_per_s=100, duration_s=0.5, seed=5, drain_s=0.2)

    async def work(number: int, sample: Sample) -> None:
        sample.tokens = 2
        if number % 3 == 1:
            raise SpecwireError(Reason.QUEUE_FULL, "full")
        if number % 3 == 2:
            await asyncio.sleep(60)

    done = await run(plan, work)
    found = checked(report("draft", "nowhere", plan, {}, done))
    total = len(plan.arrivals())
    assert found["errors"] == {"QUEUE_FULL": len(range(1, total, 3))}
    assert found["counts"]["unfinished"] == len(range(2, total, 3))
    # The age of what never ended is in the percentiles; quick refusals are not.
    assert found["latency_ms"]["session"]["max"] >= 200
    assert {s.error for s in done.samples} == {"", "QUEUE_FULL", UNFINISHED}


async def test_a_bug_of_the_generator_is_no_result() -> None:
    async def work(number: int, sample: Sample) -> None:
        raise KeyError(number)

    with pytest.raises(KeyError):
        await run(Plan(100, 0.2, 1), work)


# -- one slice of each ---------------------------------------------------------------------------


async def test_target_load() -> None:
    engine = ToyEngine(pages=256)
    chosen = flags(target.command, "--prompt-tokens", "20", "--new-tokens", "24", "--k", "3")
    async with target_service(engine) as made:
        done = await target.load(made.app.address, PLAN, chosen)
        found = checked(report("target", made.app.address, PLAN, vars(chosen), done))
        assert found["counts"]["ok"] == len(PLAN.arrivals()) > 30
        assert {s.tokens for s in done.samples} == {24}
        await made.until_idle()
    # 24 tokens: one at the opening, the others in blocks; 0.7 + 0.49 + 0.34 accepted of 3.
    steps = found["latency_ms"]["step"]["count"] / found["counts"]["ok"]
    assert 23 / 2.8 < steps < 23 / 2.2
    assert found["latency_ms"]["first_token"]["p50"] <= found["latency_ms"]["session"]["p50"]


async def test_a_stalled_target_shows_in_the_tail() -> None:
    engine = ToyEngine(pages=512)
    chosen = flags(target.command, "--prompt-tokens", "8", "--new-tokens", "2", "--k", "0")
    plan = Plan(rate_per_s=50, duration_s=1.5, seed=2, drain_s=10)
    async with target_service(engine) as made:
        loading = asyncio.create_task(target.load(made.app.address, plan, chosen))
        async with asyncio.timeout(10):
            while len(engine.log) < 40:  # noqa: ASYNC110 - in the middle of the load
                await asyncio.sleep(0.005)
        engine.gate.clear()
        threading.Timer(0.6, engine.gate.set).start()
        found = checked(report("target", made.app.address, plan, {}, await loading))
    assert found["counts"]["ok"] == found["counts"]["scheduled"]
    # 0.6 s of 1.5 s: a third of all sessions were due while nothing moved.
    assert found["latency_ms"]["session"]["p99"] > 500
    assert found["latency_ms"]["session"]["p90"] > 150


@pytest.mark.parametrize("method", ["toy", "ngram"])
async def test_draft_load(method: str, tmp_path: Path) -> None:
    chosen = flags(draft.command, "--prompt-tokens", "20", "--new-tokens", "16", "--method", method)
    plan = Plan(rate_per_s=30, duration_s=1.0, seed=3)
    # Room for all at once: how fast they end is the machine's business.
    limits = replace(LIMITS, max_sessions=len(plan.arrivals()))
    async with serving(tmp_path, limits) as made:
        done = await draft.load(made.host.address, plan, chosen)
        found = checked(report("draft", made.host.address, plan, vars(chosen), done))
        assert found["counts"]["ok"] == len(plan.arrivals()), found["errors"]
        # Every forward saw its rows: the toy method fails without them.
        assert (sum(made.toy.batches) > 0) == (method == "toy")
        await made.idle()
    assert all(s.tokens >= 16 for s in done.samples)
    assert found["latency_ms"]["open"]["count"] == found["counts"]["ok"]


async def test_too_many_sessions_are_refused_by_reason(tmp_path: Path) -> None:
    """The draft takes eight sessions; held ones fill it up."""
    chosen = flags(draft.command, "--prompt-tokens", "20", "--new-tokens", "16", "--k", "2")
    plan = Plan(rate_per_s=60, duration_s=0.5, seed=3, drain_s=10)
    async with serving(tmp_path) as made:
        made.toy.gate.clear()
        threading.Timer(1.0, made.toy.gate.set).start()
        found = checked(
            report("draft", "", plan, {}, await draft.load(made.host.address, plan, chosen))
        )
    assert found["errors"].keys() == {"QUEUE_FULL"}
    assert found["counts"]["ok"] == 8


async def test_coordinator_load() -> None:
    chosen = flags(coordinator.command, "--prompt-tokens", "12", "--new-tokens", "20")
    plan = Plan(rate_per_s=40, duration_s=1.0, seed=3)
    async with world(ScriptedDraft(), {"pages": 256}) as made:
        done = await coordinator.load(made.host.address, plan, chosen)
        found = checked(report("coordinator", made.host.address, plan, vars(chosen), done))
        await made.until_idle()
    assert found["counts"]["ok"] == len(plan.arrivals())
    assert found["throughput"]["tokens_per_s"] > found["throughput"]["requests_per_s"] * 15
    assert {s.tokens for s in done.samples} == {20}


async def test_what_a_service_does_not_take_is_refused_before_the_start(tmp_path: Path) -> None:
    async with serving(tmp_path) as made:
        for argv, field in (
            (["--k", "6"], "--k"),
            (["--prompt-tokens", "60"], "--prompt-tokens + --new-tokens + k + 1"),
            (["--method", "none"], "--method"),
        ):
            with pytest.raises(SpecwireError) as caught:
                await draft.load(made.host.address, PLAN, flags(draft.command, *argv))
            assert caught.value.metadata["field"] == field


@pytest.mark.parametrize("module", [target, draft, coordinator])
def test_commands(module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        module.command(["--help"])
    assert caught.value.code == 0 and "--rate" in capsys.readouterr().out
    assert module.command(["--rate", "0"]) == 2
    assert "--rate is 0.0" in capsys.readouterr().err
    nobody = f"unix:{tmp_path}/nobody"
    assert module.command(["--address", nobody, "--duration-s", "0.1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
