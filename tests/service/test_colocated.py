"""A drafter in its target's process: one address, one exchange a round, the same text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draft_svc.methods.base import Draft
from draft_svc.methods.dflash import DFlashMethod
from engine.api import Item, Sampling
from engine.models.dflash import Block
from engine.models.draft_loading import load_dflash
from engine.models.draft_options import DFlashOptions
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, draft_pb2, target_pb2
from target_svc.drafters import find_drafter
from target_svc.settings import TargetSettings
from tests.engine.test_dflash import BASE, BLOCK, TAPS, write_draft
from tests.engine.tiny import KERNELS, load_tiny, random_ids, rewrite_config, write_llama
from tests.service.colocated_harness import FACTORIES, colocated_target, generate
from tests.service.target_harness import key, open_target, push_to, target, verify
from tests.service.test_draft_dspark import write_dspark
from tests.service.toy_engine import ToyEngine

K = BLOCK - 1
DRAFTS = {"dflash": write_draft, "dspark": write_dspark}
METHODS = pytest.mark.parametrize("method", DRAFTS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A tiny target and a random draft of a method for it, as settings."""
    directory = tmp_path_factory.mktemp("pair")
    write_llama(directory / "target")
    for method, write in DRAFTS.items():
        write(directory / method)

    def pair(method: str) -> dict[str, Any]:
        return {
            "model": directory / "target",
            "draft": directory / method,
            "colocate": method,
        }

    return pair


Pairs = Callable[[str], dict[str, Any]]


def colocated_draft(k: int = K, **fields: Any) -> target_pb2.ColocatedDraft:
    return target_pb2.ColocatedDraft(method="dflash", then_propose=k, **fields)


# -- the handshake -------------------------------------------------------------------------------


async def test_both_services_are_one_process(pairs: Pairs) -> None:
    async with colocated_target(**pairs("dflash"), reflection=True) as running:
        target = await running.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        draft = await running.draft.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
        assert draft.worker.incarnation == target.worker.incarnation != 0
        assert draft.worker.device == target.worker.device == "cpu"
        (info,) = draft.drafters
        assert (info.method, info.max_draft_tokens) == ("dflash", K)
        assert list(info.row_format.tap_ids) == list(TAPS) and info.is_default
        assert {cost.rows for cost in info.costs} == {1, K} and target.costs
        # 3 layers of K and V, 2 heads of 24, fp32; the draft's own, whatever the target's is.
        assert info.attention.kv_bytes_per_token == 3 * 2 * 2 * 24 * 4
        assert target.attention.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
        assert draft.load.pages_total == target.load.pages_total == 64
        async with grpc.aio.insecure_channel(running.app.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("specwire.v1.TargetService", "specwire.v1.DraftService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = {s.name for s in (await call.read()).list_services_response.service}
            assert {"specwire.v1.TargetService", "specwire.v1.DraftService"} <= listed
            await call.done_writing()
        await generate(running.peer(), random_ids(9), 12, K)
        names = {metric.name for metric in running.app.metrics.registry.collect()}
        assert {"specwire_target_tokens", "specwire_draft_tokens"} <= names
        drafted = running.app.metrics.registry.get_sample_value(
            "specwire_draft_tokens_total", {"method": "dflash"}
        )
        assert drafted


async def test_the_draft_role_serves_no_session_of_others(pairs: Pairs) -> None:
    async with colocated_target(**pairs("dflash")) as running:
        call = running.draft.Link()
        items = [
            draft_pb2.DraftItem(open=draft_pb2.OpenDraft(key=key(1), method="dflash")),
            draft_pb2.DraftItem(advance=draft_pb2.Advance(key=key(1), step_id=4)),
            draft_pb2.DraftItem(close=target_pb2.CloseSession(key=key(1))),
            draft_pb2.DraftItem(heartbeat=target_pb2.Heartbeat(sessions=[key(1), key(2)])),
        ]
        await call.write(draft_pb2.DraftServiceLinkRequest(items=items))
        frame = await call.read()
        opened, advanced, closed, beat = frame.replies
        for refused in (opened.refused, advanced.refused):
            assert refused.error.reason == Reason.UNSUPPORTED
            assert "co-located" in refused.error.message
        assert (opened.refused.key, advanced.refused.step_id) == (key(1), 4)
        assert closed.closed.key == key(1)
        assert list(beat.heartbeat_ack.unknown) == [key(1), key(2)]
        await call.done_writing()
        push = running.draft.PushFeatures()
        chunk = draft_pb2.FeatureChunk(key=key(1), start=0, count=1, rows=b"1234")
        await push.write(draft_pb2.PushFeaturesRequest(chunks=[chunk]))
        (ack,) = (await push.read()).acks
        assert (ack.error.reason, ack.credit_bytes) == (Reason.UNSUPPORTED, 4)
        await push.done_writing()


async def test_what_cannot_be_is_refused_by_name(pairs: Pairs) -> None:
    async with colocated_target(**pairs("dflash")) as running:
        peer = running.peer()
        other = target_pb2.ColocatedDraft(method="eagle")
        await peer.send(open_target([1, 2], at=key(1), colocated=other))
        refused = await peer.refused()
        assert refused.error.reason == Reason.METHOD_UNKNOWN
        assert refused.error.metadata["accepted"] == "dflash"
        both = {"colocated": colocated_draft(), "push_to": push_to("unix:/tmp/x.sock")}
        await peer.send(open_target([1, 2], at=key(2), **both))
        refused = await peer.refused()
        assert refused.error.reason == Reason.FIELD_INVALID
        assert refused.error.metadata["field"] == "colocated"
        await peer.send(open_target([1, 2], at=key(3)))
        length = (await peer.verdict()).new_len
        await peer.send(verify(1, length, at=key(3), then_propose=2))
        refused = await peer.refused()
        assert (
            refused.error.reason == Reason.UNSUPPORTED and "then_propose" in refused.error.message
        )
        await peer.send(verify(1, length, at=key(3), drafts_ahead=True))
        refused = await peer.refused()
        assert refused.error.metadata["field"] == "drafts_ahead"
        await peer.send(verify(1, length, at=key(3)))  # the session goes on
        assert (await peer.verdict()).step_id == 1
    async with target(ToyEngine()) as plain:
        peer = plain.peer()
        await peer.send(open_target([1, 2], colocated=colocated_draft()))
        assert (await peer.refused()).error.reason == Reason.UNSUPPORTED


def test_drafters_are_found_by_name(pairs: Pairs) -> None:
    with pytest.raises(SpecwireError, match="dflash, dspark") as caught:
        find_drafter(TargetSettings(colocate="eagle"), FACTORIES)
    assert caught.value.reason is Reason.METHOD_UNKNOWN
    with pytest.raises(SpecwireError, match="draft_checkpoint"):
        find_drafter(TargetSettings(colocate="dflash", draft_checkpoint="/nowhere"), FACTORIES)
    assert find_drafter(TargetSettings(), FACTORIES) is None


# -- proposals -----------------------------------------------------------------------------------


async def test_proposals_are_those_of_the_draft_over_the_same_rows(pairs: Pairs) -> None:
    """Against a draft with pages of its own that gets the target's rows in one piece."""
    prompt, pair = random_ids(21), pairs("dflash")
    async with colocated_target(**pair) as running:
        found = await generate(running.peer(), prompt, 24, K)
    engine = load_tiny(pair["model"])
    options = DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels="torch")
    model = load_dflash(pair["draft"], str(pair["model"]), options).model
    text, length = prompt + found.tokens, len(prompt) + 1
    for proposal in found.proposals:
        table = engine.allocate(length - 1)
        result = engine.step([Item(table, text[: length - 1], 0, 0, Sampling(0.0), TAPS)])[0]
        table.free()
        context = model.pool.allocate(0)
        assert result.rows is not None
        model.write_context(context, 0, result.rows)
        logits = model.propose_logits([Block(context, text[length - 1], length - 1)])[0]
        context.free()
        assert list(proposal) == logits.argmax(-1).tolist()[: len(proposal)]
        expected = text[length : length + len(proposal)]
        right = [a == b for a, b in zip(proposal, expected, strict=False)]
        length += (right.index(False) if False in right else len(right)) + 1


@METHODS
@pytest.mark.parametrize("kernels", KERNELS)
async def test_the_text_is_that_of_plain_decoding(pairs: Pairs, method: str, kernels: str) -> None:
    prompt = random_ids(33, seed=3)
    async with colocated_target(**pairs(method), kernels=kernels) as running:
        for temperature in (0.0, 0.9):
            options = {"temperature": temperature, "no_prefix_cache": True}
            plain = await generate(running.peer(), prompt, 30, 0, **options)
            assert len(plain.tokens) == 30
            for k in (1, 3, K, K + 2):
                found = await generate(running.peer(), prompt, 30, k, **options)
                assert found.tokens == plain.tokens
                assert max(map(len, found.proposals)) == min(k, K)
                cut = [r for p, r in zip(found.proposals, found.reasons, strict=True) if len(p) < k]
                assert set(cut) <= {"k_limit"}
        await running.idle()


@METHODS
async def test_a_draft_that_is_right_is_accepted(pairs: Pairs, method: str) -> None:
    """The context and the noise are the right ones: drafts of a random model hit now and then, and
    far more often than chance."""
    accepted = proposed = 0
    async with colocated_target(**pairs(method)) as running:
        for seed in range(4):
            prompt = random_ids(20, seed=seed)
            found = await generate(running.peer(), prompt, 60, K, temperature=3.0, seed=seed)
            accepted += found.accepted
            proposed += len(found.proposals)
    assert accepted / proposed > 0.1  # by chance 1 in 96 of the first tokens


async def test_a_repeat_brings_the_kept_proposal_again(pairs: Pairs) -> None:
    async with colocated_target(**pairs("dflash")) as running:
        peer = running.peer()
        opening = open_target(random_ids(12), 40, colocated=colocated_draft(3, max_draft_tokens=3))
        await peer.send(opening)
        first = await peer.verdict()
        assert len(first.proposal.ids) == 3 and first.proposal.timings.compute_ns > 0
        await peer.send(opening)
        assert await peer.verdict() == first
        step = verify(1, first.new_len, list(first.proposal.ids), then_propose=9)
        await peer.send(step)
        second = await peer.verdict()
        assert len(second.proposal.ids) == 3 and second.proposal.reason == "k_limit"
        again = running.peer()
        await again.send(step)
        assert await again.verdict() == second
        await again.send(verify(2, second.new_len))  # nothing asked for, nothing said
        assert not (await again.verdict()).HasField("proposal")


async def test_a_free_run_proposes_at_its_end(pairs: Pairs) -> None:
    async with colocated_target(**pairs("dflash")) as running:
        peer, prompt = running.peer(), random_ids(12)
        await peer.send(open_target(prompt, 40, free_run=3, colocated=colocated_draft()))
        verdicts = [await peer.verdict() for _ in range(4)]
        assert [v.HasField("proposal") for v in verdicts] == [False] * 3 + [True]
        assert verdicts[-1].proposal.base_len == verdicts[-1].new_len == len(prompt) + 4
        await peer.send(verify(4, len(prompt) + 4, free_run=2, then_propose=K))
        verdicts = [await peer.verdict() for _ in range(3)]
        assert [v.HasField("proposal") for v in verdicts] == [False, False, True]
        # The same as where nothing ran free.
        text = prompt + [t for v in verdicts for t in v.tokens]
        found = await generate(running.peer(), prompt, 40, 0)
        assert text[-3:] == found.tokens[4:7]
        cold = open_target(prompt + found.tokens[:6], 30, key(9), colocated=colocated_draft())
        await peer.send(cold)
        assert (await peer.verdict()).proposal.ids == verdicts[-1].proposal.ids


@METHODS
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_run_ahead_is_the_rounds_that_would_have_been_asked_for(
    pairs: Pairs, method: str, temperature: float
) -> None:
    prompt, sampling = random_ids(12), common_pb2.Sampling(temperature=temperature, seed=5)
    async with colocated_target(**pairs(method)) as running:
        options = {"temperature": temperature, "no_prefix_cache": True}
        asked = await generate(running.peer(), prompt, 40, K, **options)
        peer, beside = running.peer(), target_pb2.ColocatedDraft(then_propose=K)
        opening = {"sampling": sampling, "ignore_eos": True, "no_prefix_cache": True}
        await peer.send(open_target(prompt, 40, colocated=beside, **opening))
        last = await peer.verdict()
        tokens, proposals, step = [*last.tokens], [tuple(last.proposal.ids)], 1
        while not last.finish:
            ids = list(last.proposal.ids)
            await peer.send(
                verify(step, last.new_len, ids, free_run=2, then_propose=K, drafts_ahead=True)
            )
            for number in range(step, step + 3):
                last = await peer.verdict()
                assert (last.step_id, last.base_len) == (number, len(prompt) + len(tokens))
                tokens += last.tokens
                if last.finish:
                    break
                assert last.proposal.base_len == last.new_len
                proposals.append(tuple(last.proposal.ids))
            step += 3
        assert (tokens, proposals) == (asked.tokens, asked.proposals)
        # One that is asked for something else gives way, as every free run does.
        await peer.send(open_target(prompt, 40, key(2), colocated=beside, **opening))
        last = await peer.verdict()
        ids = list(last.proposal.ids)
        ahead = {"free_run": 30, "then_propose": K, "drafts_ahead": True}
        await peer.send(verify(1, last.new_len, ids, key(2), **ahead))
        await peer.verdict()
        await peer.send(verify(99, len(prompt) + 1, ids, key(2), then_propose=K))
        while (last := await peer.verdict()).step_id != 99:
            pass
        assert list(last.tokens) == asked.tokens[1 : 1 + len(last.tokens)]


async def test_what_a_drafter_says_wrong_is_not_run_ahead_of_either(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids out of range and too many of them: dropped and counted, as on a link."""
    prompt = random_ids(12)
    async with colocated_target(**pairs("dflash")) as running:
        plain = await generate(running.peer(), prompt, 30, 0)

        def bad(self: DFlashMethod, wanted: list[Any]) -> list[Draft]:
            return [Draft((5, 10**6, 7) if own.block.start % 2 else (5,) * 40) for own in wanted]

        monkeypatch.setattr(DFlashMethod, "draft", bad)
        peer = running.peer()
        await peer.send(open_target(prompt, 30, colocated=colocated_draft(), ignore_eos=True))
        last = await peer.verdict()
        tokens = [*last.tokens]
        ahead = {"free_run": 30, "then_propose": K, "drafts_ahead": True}
        await peer.send(verify(1, last.new_len, [5], **ahead))
        while not last.finish:
            last = await peer.verdict()
            tokens += last.tokens
        assert tokens == plain.tokens
        for cause in ("draft_id_range", "draft_too_long"):
            assert running.app.metrics.value("dropped", cause=cause) > 0


async def test_a_run_ahead_keeps_to_what_a_step_takes(pairs: Pairs) -> None:
    """`max_draft_tokens` bounds every block, also one that nobody sent."""
    async with colocated_target(**pairs("dflash"), max_draft_tokens=1) as running:
        peer = running.peer()
        await peer.send(open_target(random_ids(12), 30, colocated=colocated_draft()))
        last = await peer.verdict()
        ahead = {"free_run": 4, "then_propose": K, "drafts_ahead": True}
        await peer.send(verify(1, last.new_len, [5], **ahead))
        for _ in range(5):
            last = await peer.verdict()
            assert len(last.proposal.ids) <= 1 and len(last.tokens) <= 2


async def test_no_proposal_for_what_has_ended(pairs: Pairs) -> None:
    async with colocated_target(**pairs("dflash")) as running:
        peer = running.peer()
        await peer.send(open_target(random_ids(12), 1, colocated=colocated_draft()))
        verdict = await peer.verdict()
        assert verdict.finish == common_pb2.FINISH_REASON_LENGTH
        assert not verdict.HasField("proposal")
        # One token may come: its step needs no draft.
        await peer.send(open_target(random_ids(12), 2, key(2), colocated=colocated_draft()))
        proposal = (await peer.verdict()).proposal
        assert not proposal.ids and proposal.reason == "k_limit"


async def test_behind_the_drafts_limit_there_are_no_blocks(tmp_path: Path) -> None:
    """The draft has 256 positions, the target 512: rows behind are not written, and cost nobody."""
    write_llama(tmp_path / "target")
    write_draft(tmp_path / "draft")
    prompt = random_ids(240)
    async with colocated_target(tmp_path / "target", tmp_path / "draft") as running:
        plain = await generate(running.peer(), prompt, 60, 0)
        found = await generate(running.peer(), prompt, 60, K)
        assert found.tokens == plain.tokens
        assert found.reasons[0] == "" and found.reasons[-1] == "k_limit"
        assert set(found.reasons) == {"", "draft_capacity", "k_limit"}
        lengths = [len(proposal) for proposal in found.proposals]
        assert lengths[0] == K and not any(lengths[20:])


# -- shared pages --------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("kernels", KERNELS)
async def test_turn_2_after_a_hit_equals_a_cold_run(
    pairs: Pairs, method: str, kernels: str
) -> None:
    """Proposals included: the draft's context came with the target's pages."""
    options: dict[str, Any] = {"kernels": kernels, "prefill_chunk_tokens": 16}
    prompt = random_ids(45, seed=7)
    async with colocated_target(**pairs(method), **options) as running:
        first = await generate(running.peer(), prompt, 30, K, temperature=0.7)
        turn = prompt + first.tokens + random_ids(11, seed=8)
        hit = await generate(running.peer(), turn, 24, K, temperature=0.7)
        assert hit.cached >= 32
        cold = await generate(running.peer(), turn, 24, K, temperature=0.7, no_prefix_cache=True)
        assert cold.cached == 0
    assert (hit.tokens, hit.proposals, hit.reasons) == (cold.tokens, cold.proposals, cold.reasons)


async def test_pages_without_the_drafts_group_shorten_its_context_only(pairs: Pairs) -> None:
    """A session that nobody drafts for fills pages; another one takes all of them."""
    prompt = random_ids(70)
    options: dict[str, Any] = {"draft_context": "own", "prefill_chunk_tokens": 16}
    async with colocated_target(**pairs("dflash"), **options) as running:
        plain = await generate(running.peer(), prompt, 40, 0)
        found = await generate(running.peer(), prompt, 40, K)
        assert found.cached == 64 and found.tokens == plain.tokens
        # The context begins at 64, where the pages found end.
        assert set(found.reasons[:1]) == {""} and len(found.proposals[0]) == K
        other = await generate(running.peer(), prompt, 40, K, no_prefix_cache=True)
        assert other.tokens == plain.tokens and other.proposals[0] != found.proposals[0]
    engine = load_tiny(pairs("dflash")["model"])
    own = DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels="torch")
    pair = pairs("dflash")
    model = load_dflash(pair["draft"], str(pair["model"]), own).model
    table, context = engine.allocate(70), model.pool.allocate(0)
    rows = engine.step([Item(table, prompt, 0, 0, Sampling(0.0), TAPS)])[0].rows
    assert rows is not None
    model.write_context(context, 64, rows[64:], origin=64)
    logits = model.propose_logits([Block(context, found.tokens[0], 70, origin=64)])[0]
    assert list(found.proposals[0]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
async def test_a_fork_shares_the_context_to_the_middle_of_a_page(
    pairs: Pairs, kernels: str
) -> None:
    prompt = random_ids(41)  # a third page with 9 tokens
    chosen: dict[str, Any] = {"kernels": kernels, "prefill_chunk_tokens": 16}
    async with colocated_target(**pairs("dflash"), **chosen) as running:
        peer = running.peer()
        options = {"no_prefix_cache": True, "colocated": colocated_draft(), "ignore_eos": True}
        await peer.send(open_target(prompt, 40, key(1), **options))
        parent = await peer.verdict()
        await peer.send(open_target(prompt, 40, key(2), fork_of=key(1), **options))
        child = await peer.verdict()
        assert child.cached_tokens == (40 if kernels == "native" else 32)
        assert child.proposal.ids == parent.proposal.ids and len(parent.proposal.ids) == K
        seen = set()
        for step in range(1, 5):  # both go on, each in a copy of that page
            for at, last in ((key(1), parent), (key(2), child)):
                ids = list(last.proposal.ids)
                await peer.send(verify(step, last.new_len, ids, at, then_propose=K))
                verdict = await peer.verdict()
                if at == key(1):
                    parent = verdict
                else:
                    child = verdict
            assert child.tokens == parent.tokens and child.proposal.ids == parent.proposal.ids
            seen.add(tuple(parent.proposal.ids))
        assert len(seen) > 1


async def test_a_block_without_pages_is_no_proposal(pairs: Pairs) -> None:
    """3 pages of 16: the text fits, the block behind it does not for a while."""
    prompt = random_ids(30)
    async with colocated_target(**pairs("dflash"), kv_pages=3, max_length=48) as running:
        plain = await generate(running.peer(), prompt, 18, 0)
        found = await generate(running.peer(), prompt, 18, K)
        assert found.tokens == plain.tokens
        assert "draft_pages" in found.reasons
        await running.idle()


# -- faults --------------------------------------------------------------------------------------


async def test_a_drafter_that_breaks_costs_its_proposals_only(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_ids(30)
    async with colocated_target(**pairs("dflash")) as running:
        plain = await generate(running.peer(), prompt, 24, 0, no_prefix_cache=True)

        def broken(*_: object) -> None:
            raise RuntimeError("a bug of the drafter")

        with monkeypatch.context() as patch:
            patch.setattr(DFlashMethod, "draft", broken)
            found = await generate(running.peer(), prompt, 24, K, no_prefix_cache=True)
        assert found.tokens == plain.tokens
        assert set(found.reasons) == {"draft_failed", "k_limit"} and not any(found.proposals)
        await running.idle()
        found = await generate(running.peer(), prompt, 24, K, no_prefix_cache=True)
        assert found.tokens == plain.tokens and found.proposals[0]


async def test_context_that_could_not_be_written_is_never_read(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a failed write are published without the draft's group."""
    prompt = random_ids(30)
    async with colocated_target(**pairs("dflash"), prefill_chunk_tokens=16) as running:

        def broken(*_: object) -> None:
            raise RuntimeError("a bug of the drafter")

        with monkeypatch.context() as patch:
            patch.setattr(type(running.model), "write_rows", broken)
            found = await generate(running.peer(), prompt, 24, K)
        assert set(found.reasons) == {"rows_missing", "k_limit"} and not any(found.proposals)
        hit = await generate(running.peer(), prompt, 40, K)
        assert hit.cached == 16 and hit.tokens[:24] == found.tokens
        assert hit.reasons[0] == ""  # from the page behind the hit on
        rest = prompt + hit.tokens[:1]
        cold = await generate(running.peer(), rest, 10, K, no_prefix_cache=True)
        assert cold.proposals[0] and cold.reasons[0] == ""


def test_neither_role_writes_the_others_settings(pairs: Pairs) -> None:
    """What the drafter is told is a value of its own; the target's settings are frozen too."""
    settings = TargetSettings(colocate="dflash", draft_kv_dtype="bfloat16")
    told = settings.drafter_settings()
    assert (told.kv_dtype, settings.kv_dtype) == ("bfloat16", "auto")
    for value, name in ((told, "kv_dtype"), (settings, "kv_dtype"), (settings, "draft_kv_dtype")):
        with pytest.raises(Exception, match=r"frozen|cannot assign"):
            setattr(value, name, "float32")
    assert settings.engine_config("m").kv_dtype == "auto"


async def test_settings_that_do_not_fit_stop_the_start(tmp_path: Path) -> None:
    write_llama(tmp_path / "target")
    write_draft(tmp_path / "draft")
    for change, reason, named in (
        ({"draft_attention_backend": "FLASHINFER"}, Reason.BACKEND_UNAVAILABLE, "FLASHINFER"),
        ({"draft_kv_group": "same_cache"}, Reason.BACKEND_UNAVAILABLE, "384 against 256 bytes"),
    ):
        with pytest.raises(SpecwireError, match=named) as caught:
            async with colocated_target(tmp_path / "target", tmp_path / "draft", **change):
                pass
        assert caught.value.reason is reason
    rewrite_config(tmp_path / "draft", {"hidden_size": BASE["hidden_size"] // 2})
    with pytest.raises(SpecwireError, match="hidden_size") as caught:
        async with colocated_target(tmp_path / "target", tmp_path / "draft"):
            pass
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


@pytest.mark.model
@pytest.mark.parametrize("method", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
async def test_the_default_pair_in_one_process(method: str) -> None:
    """The shipped drafts beside their target: the text of plain decoding, in fewer steps. tests/e2e
    has dflash in running services."""
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    options: dict[str, Any] = {"kernels": "auto", "dtype": "auto", "draft_dtype": "auto"}
    async with colocated_target(
        Path("default"), Path("default"), colocate=method, kv_pages=32, **options
    ) as running:
        for temperature in (0.0, 0.8):
            plain = await generate(running.peer(), prompt, 48, 0, temperature=temperature)
            found = await generate(running.peer(), prompt, 48, 7, temperature=temperature)
            assert found.tokens == plain.tokens
            assert len(found.proposals) < 40 and set(found.reasons) <= {"", "k_limit"}
