"""Row export of a target: bytes, ranges, refusals, overflow, reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.api import Projection
from specwire.errors import Reason
from specwire.rpc import CHUNK_BYTES
from specwire.v1 import common_pb2, draft_pb2, target_pb2
from target_svc import progress, push_stream
from target_svc.features import _allowed
from target_svc.metrics import Metrics
from target_svc.rows import RowHistory
from target_svc.sessions import Key
from target_svc.settings import TargetSettings
from tests.service.fleet_harness import until
from tests.service.target_harness import (
    TAPS,
    FakeDraft,
    draft_server,
    key,
    open_target,
    push_to,
    target,
    verify,
)
from tests.service.toy_engine import EOS, HIDDEN, ToyEngine, continuation, projected, row

PROMPT = list(range(10, 80))
TEXT = continuation(PROMPT, 40)
ROW_BYTES = 2 * HIDDEN * len(TAPS)
WAITING = 10 * ROW_BYTES  # in the test of sessions in step


def expected(start: int, end: int, ids: list[int]) -> bytes:
    rows = [row(ids[: p + 1], TAPS).view(torch.uint16).numpy().tobytes() for p in range(start, end)]
    return b"".join(rows)


def joined(chunks: Iterable[draft_pb2.FeatureChunk], step_id: int) -> tuple[int, bytes]:
    """First position and bytes of one step's rows, which have no gaps."""
    of_step = [c for c in chunks if c.step_id == step_id]
    for before, after in pairwise(of_step):
        assert before.start + before.count == after.start
    return of_step[0].start, b"".join(c.rows for c in of_step)


async def test_rows_are_the_engines_taps(tmp_path: Path) -> None:
    """Every prompt row from rows_from on, in chunks, then accepted + 1 rows of each step."""
    address = f"unix:{tmp_path / 'd.sock'}"
    ids = [*PROMPT, *TEXT]
    async with draft_server(address, FakeDraft()) as draft, target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address), rows_from=5))
        opened = await peer.verdict()
        assert (opened.rows_start, opened.rows_count) == (5, 65)
        await peer.send(verify(1, 71, [*TEXT[1:3], 0]))
        verdict = await peer.verdict()
        assert (verdict.accepted, verdict.rows_start, verdict.rows_count) == (2, 70, 3)
        chunks = await draft.rows(68)
        assert len({(c.start) for c in chunks if c.step_id == 0}) == 3  # three prompt chunks
        assert joined(chunks, 0) == (5, expected(5, 70, ids))
        assert joined(chunks, 1) == (70, expected(70, 73, ids))
        await until(lambda: service.count("row_bytes", outcome="sent") == 68 * ROW_BYTES)
        assert all(c.key == key() for c in chunks)


async def test_rows_of_a_plain_run_go_out_with_its_last_step(tmp_path: Path) -> None:
    """Nobody proposes behind the others, and each message costs target and draft the same."""
    address = f"unix:{tmp_path / 'd.sock'}"
    ids = [*PROMPT, *TEXT]
    async with draft_server(address, FakeDraft()) as draft, target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        await draft.rows(70)
        await peer.send(verify(1, 71, free_run=5))
        verdicts = [await peer.verdict() for _ in range(6)]
        assert [v.rows_count for v in verdicts] == [0, 0, 0, 0, 0, 6]
        assert verdicts[-1].rows_start == 70
        chunks = await draft.rows(76)
        assert {c.step_id for c in chunks} == {0, 6}
        assert joined(chunks, 6) == (70, expected(70, 76, ids))
        # Where an item ends the run its rows wait no longer.
        service.engine.step_s = 0.05
        await peer.send(verify(7, 77, free_run=30))
        assert (await peer.verdict()).rows_count == 0
        await peer.send(verify(20, 78))
        told = {76}
        while (last := await peer.verdict()).step_id != 20:
            told |= set(range(last.rows_start, last.rows_start + last.rows_count))
        told |= set(range(last.rows_start, last.rows_start + last.rows_count))
        assert told >= {76, 77} and last.new_len == 79
        chunks = await draft.rows(78)
        late = [c for c in chunks if c.step_id > 6]
        assert {p for c in late for p in range(c.start, c.start + c.count)} >= {76, 77}
        assert all(c.rows == expected(c.start, c.start + c.count, ids) for c in late)


async def test_rows_wait_only_where_they_are_kept(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd.sock'}"
    async with (
        draft_server(address, FakeDraft()) as draft,
        target(row_history_tokens=2) as service,
    ):
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        await peer.send(verify(1, 71, free_run=5))
        counts = [(await peer.verdict()).rows_count for _ in range(6)]
        assert counts == [1] * 6
        chunks = await draft.rows(76)
        rows = b"".join(c.rows for c in chunks if c.step_id)
        assert rows == expected(70, 76, [*PROMPT, *TEXT])


async def test_rows_that_waited_fit_the_queue_of_sessions_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that begin together end together; what has waited by then is bounded."""
    address, count = f"unix:{tmp_path / 'd.sock'}", 8
    engine = ToyEngine(pages=500)
    monkeypatch.setattr(progress, "_WAITING_BYTES", WAITING)
    async with (
        draft_server(address, FakeDraft()) as draft,
        target(engine, push_queue_bytes=8 * WAITING + 256) as service,
    ):
        peer = service.peer()
        for number in range(1, count + 1):
            ids = [*PROMPT[:8], 100 + number]
            await peer.send(open_target(ids, 200, key(number), push_to=push_to(address)))
            await peer.verdict()
        await draft.rows(9 * count)
        engine.step_s = 0.002
        for number in range(1, count + 1):
            await peer.send(verify(1, 10, at=key(number), free_run=63))
        verdicts = [await peer.verdict() for _ in range(64 * count)]
        assert sum(v.rows_count for v in verdicts) == 64 * count
        # A few rows a message, and sessions in turn.
        told = [v.step_id for v in verdicts if v.rows_count]
        assert len(told) < 64 * count / 3
        assert max(told.count(step) for step in range(1, 64)) < count
        await draft.rows((9 + 64) * count)
        assert service.count("row_bytes", outcome="overflow") == 0


async def test_rows_end_at_a_stop(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd.sock'}"
    engine = ToyEngine()
    engine.forced[72] = EOS
    async with draft_server(address, FakeDraft()) as draft, target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        after = continuation([*PROMPT, *TEXT[:2], EOS], 2)
        await peer.send(verify(1, 71, [TEXT[1], EOS, *after]))
        verdict = await peer.verdict()
        assert (verdict.new_len, verdict.rows_start, verdict.rows_count) == (73, 70, 2)
        chunks = await draft.rows(72)
        assert joined(chunks, 1)[1] == expected(70, 72, [*PROMPT, *TEXT])


async def test_rows_again_and_after_a_restart(tmp_path: Path) -> None:
    """ExportRows sends recent rows under the latest step's id; the stream comes back by itself."""
    address = f"unix:{tmp_path / 'd.sock'}"
    ids = [*PROMPT, *TEXT]
    async with target(row_history_tokens=40) as service:
        peer = service.peer()
        async with draft_server(address, FakeDraft()) as first:
            await peer.send(open_target(PROMPT, push_to=push_to(address)))
            await peer.verdict()
            await first.rows(70)
        async with draft_server(address, FakeDraft()) as second:
            await peer.send(verify(1, 71, TEXT[1:3]))
            await peer.verdict()
            second.chunks.clear()
            for _ in range(50):  # what is sent while the stream breaks may be lost
                second.chunks.clear()
                await peer.send(target_pb2.ExportRows(key=key(), **{"from": 60}))
                await peer.heartbeat()
                await asyncio.sleep(0.1)
                if sum(c.count for c in second.chunks) == 13:
                    break
            assert joined(second.chunks, 1) == (60, expected(60, 73, ids))


async def test_rows_that_are_gone_are_refused_by_interval_and_the_rest_is_sent(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path / 'd.sock'}"
    async with (
        draft_server(address, FakeDraft()) as draft,
        target(row_history_tokens=10) as service,
    ):
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        await draft.rows(70)
        draft.chunks.clear()
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 0}))
        refused = await peer.refused()
        assert (refused.error.reason, refused.step_id) == (Reason.ROWS_REFUSED, 0)
        kept = int(refused.error.metadata["kept_from"])
        assert 40 < kept <= 60 and refused.error.metadata["kept_to"] == "70"
        assert f"[{kept}, 70)" in refused.error.message
        chunks = await draft.rows(70 - kept)
        assert joined(chunks, 0) == (kept, expected(kept, 70, PROMPT))
        # One before the first is refused; asking for what is there is answered with rows alone.
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": kept - 1}))
        assert (await peer.refused()).error.metadata["kept_from"] == str(kept)
        for wanted in (kept, 69, 70):
            await peer.send(target_pb2.ExportRows(key=key(), **{"from": wanted}))
            assert await peer.heartbeat(key()) == []
        await peer.send(verify(1, 71, TEXT[1:3]))
        assert (await peer.verdict()).accepted == 2


async def test_rows_from_beyond_the_end_are_none_from_now_on(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd.sock'}"
    engine = ToyEngine()
    async with draft_server(address, FakeDraft()) as draft, target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        await draft.rows(70)
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 2**32 - 1}))
        await peer.send(verify(1, 71, TEXT[1:3]))
        verdict = await peer.verdict()
        assert (verdict.accepted, verdict.rows_start, verdict.rows_count) == (2, 0, 0)
        assert await peer.heartbeat(key()) == []
        assert sum(chunk.count for chunk in draft.chunks) == 70
        session = service.app.scheduler.sessions.named(Key(1, 1, 1))
        assert session is not None and session.history.end == 0
        # Once more is as well; what was kept is not to be had again, and no draft is asked.
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 2**32 - 1}))
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 0}))
        refused = await peer.refused()
        assert refused.error.reason == Reason.ROWS_REFUSED
        assert "wanted any more" in refused.error.message


async def test_without_a_history_all_rows_are_gone(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd.sock'}"
    async with draft_server(address, FakeDraft()) as draft, target(row_history_tokens=0) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        await draft.rows(70)
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 3}))
        assert "only [70, 70)" in (await peer.refused()).error.message


async def test_a_new_session_ends_the_pause_of_a_broken_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DF-13: a draft that is back gets the first rows of a session, not those two seconds later."""
    monkeypatch.setattr(push_stream, "_BACKOFF_S", (600.0, 600.0))
    address = f"unix:{tmp_path / 'd.sock'}"
    async with target() as service:
        peer = service.peer()
        async with draft_server(address, FakeDraft()) as first:
            await peer.send(open_target(PROMPT, push_to=push_to(address)))
            await peer.verdict()
            await first.rows(70)
        await asyncio.sleep(0.3)  # the stream has noticed, and pauses
        async with draft_server(address, FakeDraft()) as second:
            await peer.send(open_target(PROMPT, at=key(2), push_to=push_to(address)))
            await peer.verdict()
            await second.rows(70)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"encoding": 0}, "encoding"),
        ({"convention": 0}, "convention"),
        ({"dtype": common_pb2.D_TYPE_FLOAT32}, "dtype"),
        ({"tap_ids": (3, 1)}, "tap_ids"),
        ({"tap_ids": (1, 4)}, "tap_ids"),
        ({"tap_ids": ()}, "tap_ids"),
        ({"width": 8}, "width"),
    ],
)
async def test_formats_that_do_not_fit(change: dict[str, object], field: str) -> None:
    """WC-15: both values are named."""
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to("unix:/nowhere", **change)))
        refused = await peer.refused()
        assert refused.error.reason == "ROWS_REFUSED"
        assert refused.error.metadata["field"] == f"push_to.format.{field}"
        assert refused.error.metadata["accepted"]


PROJECTION = Projection("draft-fp", TAPS, 3)
OWN = {"encoding": 2, "width": 3, "projection": "draft-fp"}


async def test_rows_through_a_drafts_projection(tmp_path: Path) -> None:
    """Beside a session that is sent the layers' own; sent again they are the same."""
    address = f"unix:{tmp_path / 'd.sock'}"
    ids = [*PROMPT, *TEXT]
    engine = ToyEngine(projection=PROJECTION)
    async with draft_server(address, FakeDraft()) as draft, target(engine) as service:
        told = await service.stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        (offered,) = told.projections
        assert offered == push_to(address, **OWN).format
        peer = service.peer()
        to = target_pb2.PushTo(address=address, format=offered)
        await peer.send(open_target(PROMPT, push_to=to, rows_from=60))
        await peer.send(open_target(PROMPT, at=key(2), push_to=push_to(address), rows_from=60))
        await peer.verdict()
        await peer.verdict()
        await peer.send(verify(1, 71, [TEXT[1], 5]))
        await peer.verdict()
        await draft.rows(10 + 10 + 2)
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 60}))
        chunks = await draft.rows(10 + 10 + 2 + 12)
    own = torch.stack([projected(row(ids[: p + 1], TAPS), 3) for p in range(60, 72)])
    bits = own.view(torch.uint16).numpy().tobytes()
    mine = [c for c in chunks if c.key == key()]
    assert b"".join(c.rows for c in mine) == bits + bits
    assert joined([c for c in chunks if c.key == key(2)], 0) == (60, expected(60, 70, ids))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"projection": "another"}, "projection"),
        ({"tap_ids": TAPS[:-1]}, "tap_ids"),
        ({"width": 3 * len(TAPS)}, "width"),
        ({"encoding": 3}, "encoding"),
    ],
)
async def test_a_projection_that_is_not_there(change: dict[str, object], field: str) -> None:
    async with target(ToyEngine(projection=PROJECTION)) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to("unix:/nowhere", **{**OWN, **change})))
        refused = await peer.refused()
        assert refused.error.reason == "ROWS_REFUSED"
        assert refused.error.metadata["field"] == f"push_to.format.{field}"
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to("unix:/nowhere", **OWN)))
        refused = await peer.refused()
        assert refused.error.metadata["accepted"] == "TAPS (1)"


async def test_addresses_that_are_not_allowed() -> None:
    async with target(push_allow=("unix:*", "draft-*:7000")) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to("10.0.0.1:7000")))
        assert (await peer.refused()).error.reason == "PUSH_ADDRESS_REFUSED"
        await service.until_idle()


def test_patterns_match_one_host_and_port() -> None:
    local = TargetSettings().push_allow
    good = ("unix:/run/d.sock", "localhost:1", "127.0.0.1:7002", "[::1]:7002")
    bad = (
        "localhost:1,evil:2",
        "localhost:80.evil",
        "localhost:x:2",
        "dns:///localhost:1",
        "",
        ":1",
    )
    assert all(_allowed(address, local) for address in good)
    assert not any(_allowed(address, local) for address in bad)


async def test_a_dead_or_silent_draft_never_blocks(tmp_path: Path) -> None:
    """No server, then one that gives no credit: steps go on, rows overflow and are counted."""
    dead, silent = f"unix:{tmp_path / 'no.sock'}", f"unix:{tmp_path / 's.sock'}"
    limits = {"push_queue_bytes": 1024, "push_window_bytes": 1024}
    async with draft_server(silent, FakeDraft(credit=False)), target(**limits) as service:
        for number, address in enumerate((dead, silent), start=1):
            peer = service.peer()
            await peer.send(open_target(PROMPT, at=key(number), push_to=push_to(address)))
            assert (await peer.verdict()).new_len == 71
            await peer.send(verify(1, 71, TEXT[1:8], at=key(number)))
            assert (await peer.verdict()).new_len == 79
            assert service.count("row_bytes", outcome="overflow") > 0


async def test_idle_streams_make_place(tmp_path: Path) -> None:
    async with target(push_max_streams=1) as service:
        peer = service.peer()
        first, second = (push_to(f"unix:{tmp_path / name}") for name in ("a", "b"))
        await peer.send(open_target(PROMPT, at=key(1), push_to=first))
        await peer.verdict()
        await peer.send(open_target(PROMPT, at=key(2), push_to=second))
        assert (await peer.refused()).error.reason == "ROWS_REFUSED"
        await peer.send(target_pb2.CloseSession(key=key(1)))
        await peer.reply()
        await peer.send(open_target(PROMPT, at=key(2), push_to=second))
        assert (await peer.verdict()).new_len == 71


def test_kept_rows_hold_no_more_memory_than_their_own() -> None:
    """The row of one session is a part of a tensor with those of all its mates in the step."""
    history = RowHistory(8)
    for position in range(8):
        step = torch.full((64 * 8, 4), position, dtype=torch.uint16).numpy()
        history.add(position, step[5:6])
    kept = [rows for _, rows in history.since(0)]
    assert [int(rows[0, 0]) for rows in kept] == list(range(8))
    owners = [rows if rows.base is None else rows.base for rows in kept]
    assert sum(owner.nbytes for owner in owners) == 8 * 8


async def test_rows_of_many_sessions_share_a_frame() -> None:
    """As many chunks as a frame and the draft's credit have room for; one at least goes."""
    settings = TargetSettings(push_window_bytes=CHUNK_BYTES + 300)
    metrics = Metrics()
    stream = push_stream.PushStream("unix:/nowhere", settings, 1, metrics)
    sizes = [100, 200, CHUNK_BYTES - 300, 200, 300, 100]
    for number, size in enumerate(sizes):
        stream.put(push_stream.Chunk(common_pb2.SessionKey(), number, 0, 1, bytes(size)))

    def frame() -> list[tuple[int, int]]:
        request = stream._following()
        return [] if request is None else [(c.step_id, len(c.rows)) for c in request.chunks]

    assert frame() == list(enumerate(sizes[:3]))
    assert frame() == [(3, 200)]  # the next would exceed the credit
    assert frame() == []
    stream._in_flight = 0
    assert frame() == [(4, 300), (5, 100)]
    await stream.close()
