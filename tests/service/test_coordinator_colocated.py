"""A drafter in the target's process: found, driven with one exchange a round, and lost again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from coordinator.info_view import worker_table
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, generate_pb2, generate_pb2_grpc, target_pb2
from tests.service.colocated_toy import ColocatedToy, perfect, proposal
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, row_drafter
from tests.service.fleet_harness import fleet_world, until
from tests.service.toy_engine import VOCAB, continuation

Proposal = common_pb2.Proposal
Verdict = target_pb2.Verdict


def rough(verdict: Verdict, ids: list[int], k: int) -> Proposal:
    """Each proposal's third token is wrong."""
    right = continuation(ids, k)
    return proposal(verdict, [(t + (i == 2)) % VOCAB for i, t in enumerate(right)], source="toy_a")


# -- one exchange a round --------------------------------------------------------------------------


async def test_a_round_is_one_exchange() -> None:
    """K=3, all accepted: 40 tokens are the prompt's step and 10 rounds of 4, and nobody else is
    asked. The verdict before brings what each round verifies."""
    toy = ColocatedToy()
    async with fleet_world(infos=[toy], num_speculative_tokens=3, draft_ahead=0) as made:
        result = await made.generate(max_tokens=41)
        assert list(result.token_ids) == continuation(PROMPT, 41)
        record = result.acceptance
        assert (record.rounds, record.draft_tokens, record.accepted_tokens) == (10, 30, 30)
        assert record.placement == "colocated" and record.method == "toy" and not record.fallbacks
        assert record.phase_ms["draft"] == pytest.approx(10 * 0.001)
        assert len(record.per_step_outside_us) == 10
        (opened,) = toy.opens
        assert (opened.colocated.method, opened.colocated.then_propose) == ("toy", 3)
        assert len(toy.verifies) == 10 and toy.draft_links == 0
        # What the last steps can use is known before: nothing is asked for in vain.
        assert [v.then_propose for v in toy.verifies] == [3] * 9 + [2]
        await until(lambda: not toy.sessions)


async def test_a_target_that_goes_on_by_itself_is_asked_once_in_a_while() -> None:
    """The same rounds, each verdict with the next proposal; every one is accounted for."""
    toy = ColocatedToy(rough)
    records = []
    for ahead in (0, 3):
        settings = {"num_speculative_tokens": 3, "draft_ahead": ahead}
        async with fleet_world(infos=[toy], **settings) as made:
            result = await made.generate(max_tokens=60)
            assert list(result.token_ids) == continuation(PROMPT, 60)
            records.append(result.acceptance)
            assert not made.host.fleet.targets[0].link.dropped
    asked, ahead_of_it = records
    assert ahead_of_it.per_step_drafted == asked.per_step_drafted
    assert ahead_of_it.per_step_accepted == asked.per_step_accepted
    assert ahead_of_it.accepted_by_source == asked.accepted_by_source and not asked.fallbacks
    rounds = asked.rounds
    one, two = toy.verifies[:rounds], toy.verifies[rounds:]
    assert not any(v.free_run or v.drafts_ahead for v in one)
    assert len(two) == -(-rounds // 4)
    assert all(v.free_run == 3 and v.drafts_ahead for v in two if v.then_propose)


async def test_a_target_that_is_older_than_runs_ahead_is_asked_for_one_only() -> None:
    """Its steps are plain but for the first, and only the last brings a proposal; that is no
    breaker's case, since the drafter never failed to answer."""

    def script(verdict: Verdict, ids: list[int], k: int) -> Proposal | None:
        run = toy.verifies[-1] if toy.verifies else None
        last = run.step_id + run.free_run if run is not None else 0
        return perfect(verdict, ids, k) if verdict.step_id >= last else None

    toy = ColocatedToy(script)
    settings = {"num_speculative_tokens": 3, "draft_ahead": 3, "breaker_lates": 2}
    async with fleet_world(infos=[toy], **settings) as made:
        result = await made.generate(max_tokens=61)
        assert list(result.token_ids) == continuation(PROMPT, 61)
        record = result.acceptance
        assert dict(record.fallbacks) == {"no_proposal": 3}
        assert list(record.per_step_drafted[:8]) == [3, 0, 0, 0, 3, 3, 3, 3]
        assert not any(v.drafts_ahead or v.free_run for v in toy.verifies[1:])


@pytest.mark.parametrize("k", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
async def test_every_k_gives_the_same_tokens(k: int, tokens: int) -> None:
    toy = ColocatedToy(rough)
    async with fleet_world(infos=[toy]) as made:
        result = await made.generate(max_tokens=tokens, num_speculative_tokens=k)
        assert list(result.token_ids) == continuation(PROMPT, tokens)
        assert not result.acceptance.fallbacks
        assert result.acceptance.accepted_by_source == (
            {"toy_a": result.acceptance.accepted_tokens}
            if result.acceptance.accepted_tokens
            else {}
        )


async def test_a_stop_string_ends_a_session_whose_next_step_is_on_its_way() -> None:
    """That step goes out before the text is worked on."""
    toy = ColocatedToy()
    words = continuation(PROMPT, 40)
    async with fleet_world(infos=[toy], num_speculative_tokens=3) as made:
        stream = made.client.stream(
            token_ids=PROMPT, max_tokens=40, temperature=0.0, seed=0, stop=[f"w{words[9]} "]
        )
        async with stream:
            text = "".join([e.text async for e in stream if hasattr(e, "text")])
        assert text.startswith("".join(f"w{t} " for t in words[:9]))
        assert f"w{words[9]} " not in text
        await until(lambda: not toy.sessions)


async def test_answers_of_one_prompt_share_it() -> None:
    toy = ColocatedToy()
    async with fleet_world(infos=[toy], num_speculative_tokens=2) as made:
        stream = made.client.stream(
            token_ids=PROMPT, max_tokens=12, temperature=0.0, seed=0, n=3, return_token_ids=True
        )
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async with stream:
            async for event in stream:
                ids[event.choice] += getattr(event, "token_ids", ())
        assert [ids[c][:12] for c in range(3)] == [
            continuation(PROMPT, 12, 7919 * choice) for choice in range(3)
        ]
        assert [o.HasField("fork_of") for o in toy.opens] == [False, True, True]


# -- the policy ------------------------------------------------------------------------------------


async def test_the_policy_switches_a_useless_drafter_off_and_tries_again() -> None:
    """Proposals that are always wrong, and slow: most steps are free runs, probed now and then.
    Whatever is asked for while switching comes one round late and is still used."""

    def wrong(verdict: Verdict, ids: list[int], k: int) -> Proposal:
        slow = common_pb2.Timings(compute_ns=5_000_000)
        return proposal(verdict, [(t + 1) % VOCAB for t in continuation(ids, k)], timings=slow)

    toy = ColocatedToy(wrong, step_s=0.0005)
    async with fleet_world(infos=[toy]) as made:
        result = await made.generate(max_tokens=400)
        assert list(result.token_ids) == continuation(PROMPT, 400)
        record = result.acceptance
        assert record.fallbacks["does_not_pay"] > 200, record.fallbacks
        asked = [tokens for tokens in record.per_step_drafted if tokens]
        assert 8 <= len(asked) < 80
        probed = [v for v in toy.verifies if v.free_run and v.then_propose and not v.drafts_ahead]
        assert probed, "after a free run"
        # A round is counted once: as one with draft tokens, or by the reason why not.
        assert sum(record.fallbacks.values()) == record.rounds - len(asked)


async def test_the_policy_raises_k_for_a_good_drafter() -> None:
    toy = ColocatedToy(step_s=0.002)
    async with fleet_world(infos=[toy]) as made:
        result = await made.generate(max_tokens=300)
        assert list(result.token_ids) == continuation(PROMPT, 300)
        assert max(result.acceptance.per_step_drafted) == 7
        assert result.acceptance.tau > 4


async def test_what_the_drafter_doubts_is_cut_before_it_is_verified() -> None:
    """The third token is always wrong and said to be: the policy learns to leave it out. Steps take
    the same time whatever their width, so without `draft_ahead` 0 the target would run ahead."""

    def doubtful(verdict: Verdict, ids: list[int], k: int) -> Proposal:
        found = rough(verdict, ids, k)
        found.confidences.extend([0.95, 0.9, *[0.02] * 5][:k])
        return found

    toy = ColocatedToy(doubtful, step_s=0.002)
    costs = [common_pb2.StepCost(rows=r, sessions=1, compute_ns=1000 * r) for r in (1, 3, 8)]
    async with fleet_world(infos=[toy], draft_ahead=0) as made:
        toy.info.costs.extend(costs)
        result = await made.generate(max_tokens=300)
        assert list(result.token_ids) == continuation(PROMPT, 300)
        asked = sum(v.then_propose for v in toy.verifies)
        assert result.acceptance.draft_tokens < asked


# -- who has it ------------------------------------------------------------------------------------


async def test_what_serves_is_said() -> None:
    toy = ColocatedToy()
    async with fleet_world([ScriptedDraft()], infos=[toy]) as made:
        info = await made.client.info()
        assert [(w.role, w.placement, w.methods) for w in info.workers] == [
            ("target", "", ()),
            ("draft", "colocated", ("toy",)),
            ("draft", "separate", ("toy",)),
        ]
        assert info.workers[0].address == info.workers[1].address != info.workers[2].address
        assert info.methods == ("plain", "toy", "toy@colocated", "toy@separate")
        assert info.default_method == "toy"
        roles = list(worker_table(info).columns[0].cells)
        assert roles == ["target", "draft, co-located", "draft"]


@pytest.mark.parametrize(
    ("method", "placement"),
    [
        ("", "colocated"),
        ("toy", "colocated"),
        ("toy@colocated", "colocated"),
        ("toy@separate", "separate"),
        ("plain", ""),
    ],
)
async def test_a_request_names_the_method_and_may_name_the_place(
    method: str, placement: str
) -> None:
    toy, draft = ColocatedToy(), ScriptedDraft()
    async with fleet_world([draft], infos=[toy], num_speculative_tokens=3) as made:
        result = await made.generate(method=method)
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.placement == placement
        assert bool(draft.advances) == (placement == "separate")
        assert bool(result.acceptance.accepted_tokens) == (method != "plain")


@pytest.mark.parametrize(
    "method", ["toy@moon", "toy@", "other@colocated", "@colocated", "toy@separate"]
)
async def test_what_nobody_has_is_refused_and_what_there_is_named(method: str) -> None:
    async with fleet_world(infos=[ColocatedToy()]) as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate(method=method)
        assert caught.value.reason is Reason.METHOD_UNKNOWN
        assert method in caught.value.message and "plain, toy" in caught.value.message


@pytest.mark.parametrize("broken", [None, "INTERNAL", "UNIMPLEMENTED"])
async def test_another_incarnation_is_not_co_located(broken: str | None) -> None:
    """WC-29: co-located is proved by the one process's incarnation, never by a host name or by what
    a container shares. Two processes behind one address: the target serves, without that drafter.
    So does one whose draft role does not answer."""
    toy = ColocatedToy()
    toy.false_incarnation = 7
    toy.broken_info = getattr(grpc.StatusCode, broken) if broken else None
    async with fleet_world(infos=[toy]) as made:
        assert (await made.client.info()).methods == ("plain",)
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert not toy.opens[0].HasField("colocated")


async def test_a_co_located_drafter_that_does_not_fit_is_refused_with_both_values() -> None:
    toy = ColocatedToy(target_hidden_size=4096)
    async with fleet_world(infos=[toy]) as made:
        info = await made.client.info()
        assert info.methods == ("plain",) and info.workers[1].state == "refused"
        assert "4096" in info.workers[1].reason and "8" in info.workers[1].reason
        assert list((await made.generate()).token_ids) == continuation(PROMPT, 40)
        with pytest.raises(SpecwireError, match="4096"):
            await made.generate(method="toy@colocated")


async def test_rows_of_a_co_located_drafter_are_compared_by_their_taps_only() -> None:
    """It never sees an encoded row: no dtype and no width of rows can be wrong, a layer can."""
    fits = row_drafter(dtype=common_pb2.D_TYPE_FLOAT32, width=1)
    async with fleet_world(infos=[ColocatedToy(**fits)]) as made:
        assert "toy" in (await made.client.info()).methods
    async with fleet_world(infos=[ColocatedToy(**row_drafter(tap_ids=(1, 99)))]) as made:
        info = await made.client.info()
        assert info.methods == ("plain",) and "99" in info.workers[1].reason


async def test_rope_and_the_id_map_are_the_drafts_own() -> None:
    """DF-8, DF-34: its checkpoint alone decides them. They are told, and never compared."""
    own: dict[str, Any] = {"rope_style": "interleaved", "rope_theta": 700.0}
    toy = ColocatedToy(**own, d2t_hash="of its own")
    async with fleet_world(infos=[toy]) as made:
        assert (await made.generate(method="toy")).acceptance.accepted_tokens > 0


async def test_its_address_as_that_of_a_separate_draft_is_refused() -> None:
    toy, absent = ColocatedToy(), ScriptedDraft()
    async with fleet_world([absent], infos=[toy], start=False, num_speculative_tokens=3) as made:
        await toy.start()
        # Both addresses lead to the one process.
        os.symlink(toy.address.removeprefix("unix:"), absent.address.removeprefix("unix:"))
        target, draft = made.host.fleet.targets[0], made.host.fleet.drafts[0]
        await until(lambda: target.link.ready and draft.info is not None)
        worker = (await made.client.info()).workers[2]
        assert (worker.placement, worker.state) == ("separate", "refused")
        assert f"co-located with the target at {toy.address}" in worker.reason
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.placement == "colocated"


async def test_sessions_go_where_their_drafter_is() -> None:
    """Two targets of one model, one with a drafter inside: it is preferred by who wants it, and not
    by who does not."""
    toy = ColocatedToy()
    async with fleet_world(infos=[{}, toy], num_speculative_tokens=3) as made:
        for _ in range(3):
            result = await made.generate(method="toy")
            assert result.acceptance.placement == "colocated"
        assert len(toy.opens) == 3


async def test_a_call_that_is_traced_and_cancelled_ends_at_the_target() -> None:
    """WC-33: the context of a trace travels in the items, not through an interceptor that a cancel
    could get lost in."""
    toy, trace = (
        ColocatedToy(step_s=0.002),
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    async with (
        fleet_world(infos=[toy], num_speculative_tokens=3) as made,
        grpc.aio.insecure_channel(made.host.address) as channel,
    ):
        request = generate_pb2.GenerateRequest(
            tokens=generate_pb2.TokenInput(ids=PROMPT),
            sampling=common_pb2.Sampling(temperature=0.0, seed=0),
            max_tokens=400,
        )
        stub = generate_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(request, metadata=(("traceparent", trace),))
        assert (await call.read()).HasField("delta")
        (opened,) = toy.opens
        assert opened.traceparent == trace
        call.cancel()
        await until(lambda: not toy.sessions and not made.host.servicer.sessions, 1.0)
        assert (await made.generate()).usage.completion_tokens == 40


# -- hints, and who fails --------------------------------------------------------------------------


def _other_key(verdict: Verdict, **changes: int) -> common_pb2.SessionKey:
    key = common_pb2.SessionKey()
    key.CopyFrom(verdict.key)
    for name, value in changes.items():
        setattr(key, name, value)
    return key


TRICKS: dict[str, Callable[[Verdict, list[int], int], Proposal]] = {
    "session": lambda v, ids, k: proposal(v, [1] * k, key=_other_key(v, session_id=99)),
    "generation": lambda v, ids, k: proposal(v, [1] * k, key=_other_key(v, generation=99)),
    "step": lambda v, ids, k: proposal(v, [1] * k, step_id=v.step_id + 1),
    "length": lambda v, ids, k: proposal(v, [1] * k, base_len=v.new_len + 1),
    "vocab_range": lambda v, ids, k: proposal(v, [VOCAB, *[1] * (k - 1)]),
    "too_many": lambda v, ids, k: proposal(v, [1] * (k + 9)),
}


@pytest.mark.parametrize("trick", TRICKS)
async def test_a_proposal_that_cannot_be_is_dropped_and_counted(trick: str) -> None:
    """WC-10: never an error, never a token of another text. The drafter behaves again."""

    def script(verdict: Verdict, ids: list[int], k: int) -> Proposal:
        tricks = verdict.step_id in (0, 3)
        return TRICKS[trick](verdict, ids, k) if tricks else proposal(verdict, continuation(ids, k))

    toy = ColocatedToy(script)
    async with fleet_world(infos=[toy], num_speculative_tokens=3) as made:
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        cause = "session" if trick == "generation" else trick
        assert made.host.fleet.targets[0].link.dropped == {cause: 2}
        lost = {} if trick == "too_many" else {"no_proposal": 2}
        assert result.acceptance.fallbacks == lost
        assert result.acceptance.accepted_tokens > 20


async def test_proposals_that_nobody_asked_for_are_dropped() -> None:
    toy = ColocatedToy()
    run = toy._run

    def talkative(session: object, step: int, draft: list[int]) -> Verdict:
        verdict = run(session, step, draft)  # type: ignore[arg-type]
        verdict.proposal.CopyFrom(proposal(verdict, [1, 2, 3]))
        return verdict

    toy._run = talkative  # type: ignore[assignment]
    async with fleet_world(infos=[toy]) as made:
        for options in ({"method": "plain"}, {"num_speculative_tokens": 0}):
            result = await made.generate(**options)
            assert list(result.token_ids) == continuation(PROMPT, 40)
            assert result.acceptance.draft_tokens == 0


@pytest.mark.parametrize("silent", [True, False], ids=["says nothing", "says that it failed"])
async def test_a_drafter_that_fails_leaves_its_sessions_plain_with_the_reason(silent: bool) -> None:
    """WC-12: three failures in a row open its breaker: free runs, and a try now and then."""
    broken = True

    def script(verdict: Verdict, ids: list[int], k: int) -> Proposal | None:
        if not broken:
            return proposal(verdict, continuation(ids, k))
        return None if silent else proposal(verdict, [], reason="draft_failed")

    toy = ColocatedToy(script)
    settings = {"num_speculative_tokens": 3, "breaker_open_ms": 100}
    async with fleet_world(infos=[toy], **settings) as made:
        result = await made.generate(max_tokens=60)
        assert list(result.token_ids) == continuation(PROMPT, 60)
        lost = result.acceptance.fallbacks
        assert lost["no_proposal" if silent else "draft_failed"] == 3, lost
        assert lost["breaker_open"] > 40 and result.acceptance.draft_tokens == 0
        assert sum(lost.values()) == result.acceptance.rounds
        broken = False
        breaker = made.host.fleet.targets[0].colocated.standings["toy"].breaker  # type: ignore[union-attr]
        await until(lambda: not breaker.open)
        again = await made.generate()
        assert again.acceptance.accepted_tokens > 20 and not again.acceptance.fallbacks


@pytest.mark.parametrize("reason", [Reason.METHOD_UNKNOWN, Reason.UNSUPPORTED, Reason.ROWS_REFUSED])
async def test_a_target_that_refuses_the_drafter_serves_without(reason: Reason) -> None:
    toy = ColocatedToy()
    toy.refuse = reason
    async with fleet_world(infos=[toy]) as made:
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.fallbacks == {reason.lower(): 1}
        assert [o.HasField("colocated") for o in toy.opens] == [True, False]
        assert toy.opens[1].free_run > 0


@pytest.mark.parametrize("method", ["toy", "toy@colocated"])
async def test_a_separate_drafter_stands_in_unless_the_request_names_the_place(method: str) -> None:
    toy, draft = ColocatedToy(), ScriptedDraft()
    toy.refuse = Reason.UNSUPPORTED
    async with fleet_world([draft], infos=[toy], num_speculative_tokens=3) as made:
        result = await made.generate(method=method)
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert bool(result.acceptance.accepted_tokens) == (method == "toy") == bool(draft.opens)


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.KV_PAGES_EXHAUSTED])
async def test_a_target_that_sends_its_sessions_away(reason: Reason) -> None:
    """The other target of the model has no drafter of its own: the session goes on there, plain."""
    toy = ColocatedToy(step_s=0.002)
    async with fleet_world(infos=[toy, {}], num_speculative_tokens=3) as made:
        task = await made.started(40, method="toy")
        toy.away = reason
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.target_moves == 1
        assert result.acceptance.fallbacks["target_lost"] == 1
