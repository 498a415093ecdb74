"""Several targets and drafts: placement, what happens when one is lost, workers absent."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from coordinator.session import Session
from coordinator.validation import check
from specwire.errors import Reason, SpecwireError
from specwire.request import build_request
from specwire.v1 import common_pb2, draft_pb2, generate_pb2
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, row_drafter
from tests.service.fleet_harness import FleetWorld, fleet_world, until
from tests.service.toy_engine import continuation

SLOW = {"step_s": 0.007}
LONG = 100
# Long enough for blocks of the prefix index.
PREFIX = [7 * i % 900 for i in range(70)]


async def test_sessions_go_to_the_least_busy_target() -> None:
    async with fleet_world() as made:
        prompts = [[i, i + 1] for i in range(6)]
        for target in made.targets:
            target.engine.gate.clear()  # none says that sessions wait, and none ends
        tasks = [asyncio.create_task(made.generate(p, max_tokens=LONG)) for p in prompts]
        await until(lambda: sum(target.sessions for target in made.targets) == 6)
        assert [target.sessions for target in made.targets] == [3, 3]
        for target in made.targets:
            target.engine.gate.set()
        for prompt, task in zip(prompts, tasks, strict=True):
            assert list((await task).token_ids) == continuation(prompt, LONG)
        await until(lambda: not any(worker.placed for worker in made.host.fleet.targets))


async def test_the_same_beginning_goes_where_it_is_cached() -> None:
    async with fleet_world() as made:
        first = await made.generate(PREFIX)
        await made.generate([3, 1])
        had = next(t for t in made.targets if t.engine.log[0][0][1][:4] == tuple(PREFIX[:4]))
        before = had.opened
        turn = PREFIX + list(first.token_ids) + [5, 6, 7]
        for _ in range(3):
            await made.generate(PREFIX)
        await made.generate(turn)
        assert had.opened == before + 4


async def test_a_busy_target_shares_even_what_it_has_cached() -> None:
    async with fleet_world(engine=SLOW) as made:
        await made.generate(PREFIX)
        tasks = [asyncio.create_task(made.generate(PREFIX, max_tokens=60)) for _ in range(12)]
        await until(lambda: sum(target.sessions for target in made.targets) == 12)
        assert min(target.sessions for target in made.targets) >= 4
        for task in tasks:
            assert list((await task).token_ids) == continuation(PREFIX, 60)


async def test_a_target_without_pages_is_passed_over() -> None:
    async with fleet_world(engine={**SLOW, "pages": 14}) as made:
        task = await made.started(160)
        full = made.at()
        await made.generate(max_tokens=80)
        result = await made.generate([4, 4], max_tokens=150)
        assert list(result.token_ids) == continuation([4, 4], 150)
        assert made.other(full).opened >= 2 and full.opened == 1
        await task


@pytest.mark.parametrize("kind", ["plain", "ids", "rows"])
async def test_a_target_that_is_killed_goes_on_at_another(kind: str) -> None:
    """Target loss (failure matrix): the same tokens, none again and none taken back."""
    fields = row_drafter() if kind == "rows" else {}
    drafts = [ScriptedDraft(**fields)] if kind != "plain" else []
    for draft in drafts:
        draft.seed = 3
    async with fleet_world(drafts, SLOW, num_speculative_tokens=2) as made:
        task = await made.started(LONG, temperature=0.7, seed=3)
        lost = made.at()
        await lost.stop()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG, seed=3)
        assert result.acceptance.target_moves == 1
        assert result.acceptance.fallbacks["target_lost"] == 1
        assert made.other(lost).opened == 1
        if drafts:
            assert result.acceptance.per_step_accepted[-4] == 2
        # The next requests do not wait for the one that is gone.
        assert list((await made.generate()).token_ids) == continuation(PROMPT, 40)
        await until(lambda: not any(target.sessions for target in made.targets))


async def test_targets_that_keep_dying_end_the_request_in_the_end() -> None:
    options = {"target_moves": 2, "target_return_ms": 300}
    async with fleet_world(engine={"step_s": 0.02}, **options) as made:
        task = await made.started(400)
        for _ in range(3):
            lost = made.at()
            moves = lost.engine.log
            await lost.stop()
            if made.host.servicer.sessions:
                await lost.start()
                await made.wait_ready()
            assert moves
        with pytest.raises(SpecwireError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_DOWN
        assert int(caught.value.metadata["tokens"]) >= 10


@pytest.mark.parametrize(("exactness", "moves"), [("exact", False), ("fast", True)])
async def test_an_exact_session_never_goes_to_other_numerics(exactness: str, moves: bool) -> None:
    infos = ({}, {"numerics": "another build"})
    options = {"target_return_ms": 200}
    async with fleet_world(engine=SLOW, infos=infos, **options) as made:
        task = await made.started(LONG, exactness=exactness)
        await made.at().stop()
        if moves:
            assert list((await task).token_ids) == continuation(PROMPT, LONG)
            return
        with pytest.raises(SpecwireError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_DOWN


@pytest.mark.parametrize(("exactness", "goes_on"), [("exact", False), ("fast", True)])
async def test_a_target_that_comes_back_computing_otherwise_is_another(
    exactness: str, goes_on: bool
) -> None:
    """It came back while the session waited for a slow client, so that its link was up again."""
    options = {"target_return_ms": 200, "free_run": 0}
    async with fleet_world(infos=({},), **options) as made:
        (target,), ids, reads = made.targets, list[int](), asyncio.Event()

        async def deliver(delta: generate_pb2.Delta) -> None:
            ids.extend(delta.token_ids)
            if len(ids) >= 10:
                await reads.wait()

        group = made.host.fleet.group("")
        request = build_request(
            {
                "token_ids": PROMPT,
                "max_tokens": LONG,
                "seed": 0,
                "temperature": 0.0,
                "exactness": exactness,
                "return_token_ids": True,
            }
        )
        session = Session(group, 1, check(request, group, group.text, None), group.text)
        task = asyncio.create_task(session.run(deliver))
        await until(lambda: len(ids) >= 10)
        await target.stop()
        target._info = {"numerics": "another build"}
        await target.start()
        await until(lambda: made.host.fleet.targets[0].numerics == "another build")
        await made.wait_ready()
        reads.set()
        if goes_on:
            await task
            assert ids == continuation(PROMPT, LONG)
            return
        with pytest.raises(SpecwireError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_DOWN


async def test_the_wait_goes_on_when_the_first_that_comes_back_computes_otherwise() -> None:
    async with fleet_world(engine=SLOW, target_return_ms=10_000) as made:
        task = await made.started(LONG)
        first, second = made.at(), made.other(made.at())
        await second.stop()
        await first.stop()
        first._info = {"numerics": "another build"}
        await first.start()
        worker = next(t for t in made.host.fleet.targets if t.address == first.address)
        await until(lambda: worker.numerics == "another build" and worker.link.ready)
        await asyncio.sleep(0.3)  # the session has looked at what came
        await second.start()
        assert list((await task).token_ids) == continuation(PROMPT, LONG)
        assert (first.opened, second.opened) == (0, 1)


async def test_another_model_is_another_group() -> None:
    infos = ({}, {"name": "other", "fingerprint": "other-fp"})
    async with fleet_world(engine=SLOW, infos=infos, target_return_ms=200) as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate(model="third")
        assert caught.value.reason is Reason.MODEL_UNKNOWN
        assert "toy, other" in caught.value.metadata["accepted"]
        with pytest.raises(SpecwireError):
            await made.generate()  # which of the two?
        for _ in range(2):
            await made.generate(model="other")
        assert [target.opened for target in made.targets] == [0, 2]
        info = await made.client.info()
        assert "other-fp" in info.workers[1].reason and info.workers[1].state == "ready"
        task = await made.started(LONG, model="toy")
        await made.targets[0].stop()
        with pytest.raises(SpecwireError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_DOWN
        with pytest.raises(SpecwireError) as caught:
            await made.generate(model="toy")
        assert caught.value.reason is Reason.NO_TARGET and caught.value.retry_after_ms > 0


async def test_a_draining_target_ends_its_sessions_and_gets_no_new_ones() -> None:
    async with fleet_world(engine=SLOW) as made:
        for target in made.targets:
            await target.stop()
            await target.start(drain_ms=8000)
        await made.wait_ready()
        task = await made.started(LONG)
        draining = made.at()
        assert draining.app is not None
        stopping = asyncio.create_task(draining.app.stop())
        await asyncio.sleep(0)
        others = [await made.generate([i, 1], max_tokens=5) for i in range(4)]
        for i, result in enumerate(others):
            assert list(result.token_ids) == continuation([i, 1], 5)
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert result.acceptance.target_moves == 0
        await stopping
        assert draining.opened == 1 and made.other(draining).opened == 4
        draining.app = None


@pytest.mark.parametrize("rows", [False, True])
async def test_a_draft_that_is_lost_is_replaced_by_another(rows: bool) -> None:
    """Draft loss costs speed only: another fitting draft takes over, with rows of its own."""
    fields = row_drafter() if rows else {}
    drafts = [ScriptedDraft(**fields), ScriptedDraft(**fields)]
    async with fleet_world(drafts, SLOW, num_speculative_tokens=2) as made:
        task = await made.started(LONG)
        used = next(d for d in drafts if d.sessions)
        other = next(d for d in drafts if d is not used)
        await used.stop()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert result.acceptance.fallbacks["draft_lost"] == 1
        assert len(other.opens) == 1
        assert result.acceptance.per_step_accepted[-4] == 2
        assert result.acceptance.target_moves == 0
        assert bool(sum(other.row_bytes.values())) is rows
        await until(lambda: not other.sessions)


async def test_drafts_share_the_sessions_and_one_that_is_open_gets_none() -> None:
    drafts = [ScriptedDraft(), ScriptedDraft()]
    async with fleet_world(drafts, SLOW, num_speculative_tokens=2) as made:
        tasks = [asyncio.create_task(made.generate([i, 2], max_tokens=60)) for i in range(6)]
        await until(lambda: sum(len(d.sessions) for d in drafts) == 6)
        assert [len(d.sessions) for d in drafts] == [3, 3]
        await asyncio.gather(*tasks)
        breaker = made.host.fleet.drafts[0].standings["toy"].breaker
        for _ in range(3):
            breaker.failure(breaker.clock())
        assert breaker.open
        before = len(drafts[0].opens)
        await asyncio.gather(*(made.generate([i, 3], max_tokens=10) for i in range(4)))
        assert len(drafts[0].opens) == before


async def test_a_draft_serves_the_target_that_it_fits() -> None:
    infos = ({}, {"fingerprint": "other-fp", "name": "other"})
    drafts = [
        ScriptedDraft(target_fingerprint="toy-fp"),
        ScriptedDraft(target_fingerprint="other-fp"),
    ]
    async with fleet_world(drafts, infos=infos) as made:
        for model, draft in (("toy", drafts[0]), ("other", drafts[1])):
            before = [len(d.opens) for d in drafts]
            result = await made.generate(model=model)
            assert result.acceptance.accepted_tokens > 0
            grew = [len(d.opens) - n for d, n in zip(drafts, before, strict=True)]
            assert grew[drafts.index(draft)] == 1 and sum(grew) == 1


async def test_workers_that_are_absent_at_start() -> None:
    async with fleet_world([ScriptedDraft()], start=False, num_speculative_tokens=2) as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate()
        assert caught.value.reason is Reason.NO_TARGET
        assert caught.value.retry_after_ms > 0
        await until(lambda: all(w.link.reason for w in made.host.fleet.workers))
        states = {(w.role, w.state) for w in (await made.client.info()).workers}
        assert states == {("target", "connecting"), ("draft", "connecting")}
        await made.targets[1].start()
        await until(lambda: made.host.fleet.serving)
        assert list((await made.generate()).token_ids) == continuation(PROMPT, 40)
        draft = made.drafts[0]
        await draft.start(draft.address)
        await until(lambda: made.host.fleet.drafts[0].link.ready)
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.accepted_tokens > 0


async def test_info_tells_the_load_of_each_worker() -> None:
    async with fleet_world([ScriptedDraft()], SLOW, num_speculative_tokens=2) as made:
        task = await made.started(LONG)
        workers = (await made.client.info()).workers
        assert [w.role for w in workers] == ["target", "target", "draft"]
        assert sorted(w.sessions for w in workers[:2]) == [0, 1] and workers[2].sessions == 1
        busy = next(w for w in workers if w.sessions)
        assert 0 < busy.pages_free < busy.pages_total
        await task


async def _leaves(made: FleetWorld, **options: Any) -> None:
    task = await made.started(LONG, **options)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_leaves_is_counted_out_everywhere() -> None:
    async with fleet_world([ScriptedDraft()], SLOW) as made:
        await _leaves(made)
        await until(lambda: not any(t.sessions for t in made.targets))
        await until(lambda: not any(w.placed for w in made.host.fleet.targets))
        assert not any(w.link.sessions for w in made.host.fleet.workers)


async def test_nothing_is_left_after_many_sessions_with_random_cancels() -> None:
    """WC-8: sessions that end in any way are counted out of every worker and table."""
    rng = random.Random(8)
    drafts = [ScriptedDraft(**row_drafter()), ScriptedDraft(**row_drafter())]

    async def one(made: FleetWorld, number: int) -> None:
        ids = [number % 900, 1, 2]
        options = {"max_tokens": rng.randrange(1, 30), "n": rng.choice([1, 1, 3])}
        task = asyncio.create_task(made.generate(ids, **options))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.05)
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(result, BaseException):
            wanted = continuation(ids, result.usage.completion_tokens)
            assert list(result.token_ids) == wanted

    async with fleet_world(drafts, max_sessions=128) as made:
        for start in range(0, 300, 30):
            await asyncio.gather(*(one(made, start + i) for i in range(30)))
        await until(lambda: not any(t.sessions for t in made.targets))
        await until(lambda: not any(d.sessions for d in drafts))
        assert not made.host.servicer.sessions
        assert not any(w.link.sessions for w in made.host.fleet.workers)
        assert not any(t.placed for t in made.host.fleet.targets)
        for target in made.targets:
            stats = target.engine.stats()
            assert stats.free == stats.total
            target.engine.check_integrity()


_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"target_hidden_size": 9}, "9", "8"),
    ({"target_layer_count": 5}, "5", "4"),
    ({"target_vocab_size": 1001}, "1001", "1000"),
    ({"tokenizer_hash": "another"}, "another", ""),
    ({"target_fingerprint": "another"}, "another", "toy-fp"),
    ({"mask_token_id": 1000}, "1000", "below 1000"),
    ({"block_size": 7, "slot_mode": draft_pb2.SLOT_MODE_FILL_IN}, "7", "6, its block of 7"),
    (row_drafter(tap_ids=(1, 4)), "[1, 4]", "below 4"),
    (row_drafter(dtype=common_pb2.D_TYPE_FLOAT32), "FLOAT32", "BFLOAT16"),
    (row_drafter(width=24), "24", "16"),
    (row_drafter(convention=0), "UNSPECIFIED", "OUTPUT_OF_LAYER"),
    (row_drafter(encoding=0), "UNSPECIFIED", "TAPS"),
]


async def test_each_field_that_does_not_match_refuses_the_draft_over_the_wire() -> None:
    """WC-15, WC-17: refused before the first token, both values named; requests go on plain."""
    drafts = [ScriptedDraft(**fields) for fields, _, _ in _FIELDS]
    async with fleet_world(drafts, infos=({},), start=False) as made:
        await made.targets[0].start()
        await until(lambda: made.host.fleet.serving)
        await asyncio.gather(*(draft.start(draft.address) for draft in drafts))
        await until(lambda: all(d.link.state == "refused" for d in made.host.fleet.drafts))
        workers = (await made.client.info()).workers[1:]
        for worker, (_, draft_has, target_has) in zip(workers, _FIELDS, strict=True):
            assert worker.state == "refused" and not worker.methods
            assert draft_has in worker.reason
            assert target_has in worker.reason
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.method == "plain"


async def test_a_draft_with_another_protocol_is_refused() -> None:
    class Newer(ScriptedDraft):
        async def GetInfo(self, request: Any, context: Any) -> Any:
            info = await super().GetInfo(request, context)
            info.worker.protocol_major = 2
            return info

    async with fleet_world([Newer()], infos=({},), start=False) as made:
        await made.targets[0].start()
        await made.drafts[0].start(made.drafts[0].address)
        worker = made.host.fleet.drafts[0]
        await until(lambda: worker.link.state == "refused")
        assert "major 2" in worker.link.reason and "this coordinator 1" in worker.link.reason
