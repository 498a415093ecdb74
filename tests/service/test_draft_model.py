"""The small autoregressive drafter: against transformers, against a target of the same weights, and
with many sessions, few pages and a short limit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaForCausalLM

from draft_svc.host import DraftHost
from draft_svc.loading import load_methods
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_CATCHING_UP,
    REASON_DEADLINE,
    REASON_PAGES,
    REASON_VOCABULARY,
    Draft,
    Request,
)
from draft_svc.methods.draft_model import DraftModelContext, DraftModelMethod
from draft_svc.settings import DraftSettings
from engine.api import Item, ItemResult, Sampling, WarmUp
from engine.default_model import tokenizer_document, tokenizer_hash
from engine.runner import NativeEngine
from specwire.errors import Reason, SpecwireError
from specwire.rpc import channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.engine.tiny import KERNELS, VOCAB, load_tiny, random_ids, write_llama
from tests.service.draft_peer import (
    LIMITS,
    Link,
    advance_item,
    close_item,
    open_item,
    session_key,
)

GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.8, seed=2**63 + 11)
FILTERED = Sampling(temperature=0.8, seed=5, top_k=20, top_p=0.9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("draft-model")
    return path, write_llama(path)


@pytest.fixture(scope="module")
def engine(checkpoint: tuple[Path, LlamaForCausalLM]) -> NativeEngine:
    return load_tiny(checkpoint[0], KERNELS[0], max_length=256)


@pytest.fixture
def method(engine: NativeEngine) -> Iterator[DraftModelMethod]:
    yield make(engine)
    engine.check_integrity()
    assert engine.stats().tables == 0, "a context was not closed"


def make(engine: NativeEngine, **options: Any) -> DraftModelMethod:
    return DraftModelMethod(engine, max_draft_tokens=7, tokenizer_hash="", **options)


def settle(method: DraftModelMethod) -> int:
    """Lets the method catch up; how many pieces that took."""
    pieces = 1
    while method.work():
        pieces += 1
    return pieces


def ask(method: DraftModelMethod, context: DraftModelContext, k: int) -> Draft:
    return method.propose([Request(context, k)])[0]


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, ids: Sequence[int], count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def test_proposals_are_the_models_own_continuation_whatever_was_truncated(
    method: DraftModelMethod, checkpoint: tuple[Path, LlamaForCausalLM]
) -> None:
    """The context always equals the committed ids, however they came: WC-14's K = 0 rounds too."""
    model, chance = checkpoint[1], random.Random(7)
    ids = random_ids(40, seed=1)
    context = method.open(ids, GREEDY)
    settle(method)
    for _ in range(12):
        k = chance.choice([0, 0, 1, 3, 7])
        draft = ask(method, context, k) if k else Draft()
        assert list(draft.ids) == greedy(model, ids, k)
        # Some of the proposal is right, some of the text is taken back, something else follows.
        back = chance.choice([0, 0, 0, 1, 5, 20])
        keep = len(ids) - back
        kept = list(draft.ids)[: chance.randint(0, k)] if not back else []
        tokens = [*kept, chance.randrange(3, VOCAB)]
        ids = ids[:keep] + tokens
        method.update(context, keep, tokens, ())
        settle(method)
    assert context.ids == ids
    method.close(context)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, FILTERED], ids=["greedy", "T=0.8", "top-p"])
def test_a_draft_with_the_targets_weights_is_right_every_round(
    method: DraftModelMethod, checkpoint: tuple[Path, LlamaForCausalLM], sampling: Sampling
) -> None:
    """DF-40: the oracle accepts K at every position; the noise is that of the index drawn."""
    target = load_tiny(checkpoint[0], "torch")
    table, ids = target.allocate(0), random_ids(30, seed=4)
    context = method.open(ids, sampling)
    settle(method)
    (result,) = target.step([Item(table, ids, 0, 1, sampling)])
    for k in (3, 1, 7, 7, 2, 5):
        method.update(context, len(ids), result.tokens, ())
        ids += result.tokens
        drafts = ask(method, context, k).ids
        assert len(drafts) == k
        item = Item(table, [ids[-1], *drafts], len(ids) - 1, k + 1, sampling)
        (result,) = target.step([item])
        assert result.accepted == k
    method.close(context)


def test_another_seed_or_choice_draws_other_tokens(method: DraftModelMethod) -> None:
    seen = set()
    for sampling in (SEEDED, Sampling(temperature=0.8, seed=12), Sampling(0.8, seed=12, choice=1)):
        context = method.open(random_ids(20), sampling)
        seen.add(ask(method, context, 7).ids)
        method.close(context)
    assert len(seen) == 3


def test_sessions_share_forwards_and_do_not_touch_each_other(
    checkpoint: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_tiny(checkpoint[0], KERNELS[0], kv_pages=512)
    method = make(engine, chunk_tokens=4096)
    texts = [random_ids(5 + number % 30, seed=number) for number in range(64)]
    contexts = [method.open(text, GREEDY) for text in texts]
    sizes: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda items: sizes.append(len(items)) or step(items))
    wanted = [1 + number % 4 for number in range(64)]
    requests = [Request(c, k) for c, k in zip(contexts, wanted, strict=True)]
    drafts = method.propose(requests)
    assert sizes == [64, 48, 32, 16]  # one forward a token, for all who want more
    assert [len(draft.ids) for draft in drafts] == wanted
    for text, k, draft in list(zip(texts, wanted, drafts, strict=True))[::5]:
        assert list(draft.ids) == greedy(checkpoint[1], text, k)
    for context in contexts:
        method.close(context)
    engine.check_integrity()
    assert engine.stats().free == engine.stats().total


def test_a_long_prompt_comes_in_chunks_and_stalls_nobody(
    method: DraftModelMethod, checkpoint: tuple[Path, LlamaForCausalLM], engine: NativeEngine
) -> None:
    method = make(engine, chunk_tokens=32, clock=lambda: 0.0)
    long, short = random_ids(150, seed=21), random_ids(12, seed=22)
    late = method.open(long, GREEDY)
    early = method.open(short, GREEDY)
    drafts = method.propose([Request(late, 3), Request(early, 3)])
    assert drafts[0] == Draft(reason=REASON_CATCHING_UP)
    assert list(drafts[1].ids) == greedy(checkpoint[1], short, 3)
    assert settle(method) == 5  # 149 tokens, 32 at a time
    assert list(ask(method, late, 3).ids) == greedy(checkpoint[1], long, 3)
    method.close(late)
    method.close(early)


@pytest.mark.parametrize(("token_s", "pieces"), [(0.0001, 3), (0.0005, 4), (0.01, 6)])
def test_a_slow_model_catches_up_in_smaller_pieces(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, token_s: float, pieces: int
) -> None:
    now, step = [0.0], engine.step

    def timed(items: Sequence[Item]) -> Any:
        now[0] += token_s * sum(len(item.ids) for item in items)
        return step(items)

    monkeypatch.setattr(engine, "step", timed)
    method = make(engine, chunk_tokens=100, clock=lambda: now[0])
    context = method.open(random_ids(230, seed=int(token_s * 10**6)), GREEDY)
    assert settle(method) == pieces  # 229 tokens, the first 100 before anything is known
    method.close(context)


def test_a_few_tokens_behind_wait_for_the_next_proposal(
    method: DraftModelMethod, monkeypatch: pytest.MonkeyPatch, engine: NativeEngine
) -> None:
    context = method.open(random_ids(8), GREEDY)
    ask(method, context, 2)
    steps: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda items: steps.append(len(items)) or step(items))
    for _ in range(10):  # rounds without a proposal
        method.update(context, len(context.ids), [5], ())
        assert not method.work()
    assert not steps
    assert len(ask(method, context, 2).ids) == 2 and len(steps) == 2
    method.close(context)


def test_what_is_spent_once_makes_no_step_look_slow(
    monkeypatch: pytest.MonkeyPatch, engine: NativeEngine
) -> None:
    """A graph captured in the first steps must not make later proposals miss their deadlines."""
    now, once_ns = [0.0], [0]
    step = engine.step

    def captured(items: Sequence[Item]) -> list[ItemResult]:
        now[0] += 0.3 + 0.001
        once_ns[0] += 300_000_000
        return step(items)

    monkeypatch.setattr(type(engine), "once_ns", property(lambda _: once_ns[0]))
    monkeypatch.setattr(engine, "step", captured)
    method = make(engine, clock=lambda: now[0])
    context = method.open(random_ids(8), GREEDY)
    assert len(ask(method, context, 2).ids) == 2 and method.once_ns == 600_000_000
    monkeypatch.setattr(engine, "step", step)
    soon = Request(context, 2, now[0] + 0.01)
    assert len(method.propose([soon])[0].ids) == 2
    method.close(context)


@pytest.mark.parametrize(("device", "sessions"), [("cuda:0", 4), ("cuda:0", 0), ("cpu", 4)])
def test_what_is_compiled_is_met_before_it_is_measured(
    device: str, sessions: int, monkeypatch: pytest.MonkeyPatch, engine: NativeEngine
) -> None:
    met: list[WarmUp | str] = []
    step = engine.step
    monkeypatch.setattr(engine, "_info", replace(engine.info, device=device))
    monkeypatch.setattr(type(engine), "warm_up", lambda _, wanted: met.append(wanted) or 1)
    monkeypatch.setattr(engine, "step", lambda items: met.append("step") or step(items))
    make(engine, warm_sessions=sessions).warm_up()
    expected = WarmUp(sessions=4, widest=1) if device != "cpu" and sessions else "step"
    assert met[0] == expected and set(met[1:]) == {"step"}


def test_pages_that_are_short_cost_proposals_only(
    checkpoint: tuple[Path, LlamaForCausalLM],
) -> None:
    """WC-7: prompts of 0.42 of the pages each; a third waits for a page, and gets it."""
    engine = load_tiny(checkpoint[0], KERNELS[0], kv_pages=20)
    method = make(engine)
    texts = [random_ids(130, seed=seed) for seed in range(3)]
    contexts = [method.open(text, GREEDY) for text in texts]
    settle(method)
    reasons = []
    for context in contexts:
        ask(method, context, 3)
        settle(method)
        reasons.append(ask(method, context, 3).reason)
    assert reasons == ["", "", REASON_PAGES]
    method.close(contexts[0])
    ask(method, contexts[2], 3)
    settle(method)
    assert list(ask(method, contexts[2], 3).ids) == greedy(checkpoint[1], texts[2], 3)
    for _ in range(30):  # one after the other, for good
        context = method.open(texts[0], GREEDY)
        ask(method, context, 1)
        method.close(context)
    for context in contexts[1:]:
        method.close(context)
    engine.check_integrity()
    assert engine.stats().free == engine.stats().total


def test_a_proposal_is_clipped_at_the_models_limit(
    checkpoint: tuple[Path, LlamaForCausalLM],
) -> None:
    """DF-39, DF-41, WC-25: no token beyond the draft's own length; past it, none."""
    engine = load_tiny(checkpoint[0], KERNELS[0], max_length=64)
    method = make(engine)
    context = method.open(random_ids(61), GREEDY)
    settle(method)
    draft = ask(method, context, 5)
    assert len(draft.ids) == 3 and draft.reason == REASON_CAPACITY
    method.update(context, 61, random_ids(40), ())
    assert not method.work()
    assert ask(method, context, 5) == Draft(reason=REASON_CAPACITY)
    method.update(context, 40, [7], ())  # taken back below the limit
    settle(method)
    assert list(ask(method, context, 2).ids) == greedy(checkpoint[1], context.ids, 2)
    method.close(context)


def test_tokens_are_drawn_as_long_as_somebody_waits(
    engine: NativeEngine, checkpoint: tuple[Path, LlamaForCausalLM], monkeypatch: Any
) -> None:
    """WC-31: a slow draft answers with fewer tokens in time, not with all of them too late."""
    now = [0.0]
    method = make(engine, clock=lambda: now[0])
    step = engine.step

    def slow(items: Sequence[Item]) -> Any:
        now[0] += 0.01
        return step(items)

    monkeypatch.setattr(engine, "step", slow)
    texts = [random_ids(12, seed=seed) for seed in (71, 72, 73)]
    contexts = [method.open(text, GREEDY) for text in texts]
    method.propose([Request(contexts[0], 1)])  # tells how long a step takes
    base = now[0]
    deadlines = (base + 0.035, base + 1, base + 0.005)
    drafts = method.propose([Request(c, 5, d) for c, d in zip(contexts, deadlines, strict=True)])
    assert [len(draft.ids) for draft in drafts] == [3, 5, 0]
    assert [draft.reason for draft in drafts] == [REASON_DEADLINE, "", REASON_DEADLINE]
    for draft, text in zip(drafts, texts, strict=True):
        assert list(draft.ids) == greedy(checkpoint[1], text, len(draft.ids))
    tries = [method.propose([Request(contexts[0], 1, now[0] + 0.005)])[0].ids for _ in range(12)]
    assert tries[0] == () and any(tries), "one slow step ended speculation"
    for context in contexts:
        method.close(context)


def test_padding_ids_are_never_proposed(
    engine: NativeEngine, checkpoint: tuple[Path, LlamaForCausalLM]
) -> None:
    """WC-17: ids that the tokenizer does not have end the proposal."""
    text = random_ids(20, seed=9)
    expected = greedy(checkpoint[1], text, 7)
    bound = sorted(set(expected))[-1]
    method = make(engine, known_ids=bound)
    context = method.open(text, GREEDY)
    draft = ask(method, context, 7)
    assert draft == Draft(tuple(expected[: expected.index(bound)]), reason=REASON_VOCABULARY)
    method.close(context)


def test_a_second_turn_begins_where_the_first_one_ended(
    checkpoint: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """WC-16: what another session ran is not run again; what follows is that of a cold start."""
    engine = load_tiny(checkpoint[0], KERNELS[0], kv_pages=24)
    method = make(engine)
    first = method.open(random_ids(70, seed=31), GREEDY)
    settle(method)
    ask(method, first, 7)
    method.update(first, 70, [5, 6, 7], ())
    turn = [*first.ids, *random_ids(20, seed=32)]
    rows: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda i: rows.extend(len(x.ids) for x in i) or step(i))
    second = method.open(turn, GREEDY)  # the first one still lives, and goes on
    settle(method)
    assert rows == [len(turn) - 1 - 64]
    for context in (second, first):
        method.update(context, len(context.ids) - 20, [9, 9], ())  # both back into shared pages
    for context in (second, first):
        assert list(ask(method, context, 5).ids) == greedy(checkpoint[1], context.ids, 5)
    method.close(first)
    method.close(second)
    for seed in range(40, 50):  # other texts take the pages away
        other = method.open(random_ids(120, seed=seed), GREEDY)
        settle(method)
        method.close(other)
    rows.clear()
    third = method.open(turn, GREEDY)
    settle(method)
    assert sum(rows) == len(turn) - 1
    assert list(ask(method, third, 5).ids) == greedy(checkpoint[1], turn, 5)
    method.close(third)
    engine.check_integrity()
    assert engine.stats().free == engine.stats().total


# -- over gRPC -----------------------------------------------------------------------------------


@pytest.fixture
async def service(
    checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> AsyncIterator[tuple[DraftHost, Any]]:
    arguments = ["--methods", "ngram,draft_model", "--draft-model", str(checkpoint[0])]
    settings = DraftSettings.load([*arguments, "--dtype", "float32", "--kv-memory-mb", "4"])
    address = f"unix:{tmp_path}/draft.sock"
    host = DraftHost(
        lambda: load_methods(settings, lambda line: None),
        address=address,
        limits=LIMITS,
        default_method=settings.chosen_default,
    )
    async with (
        host,
        grpc.aio.insecure_channel(address, options=channel_options(link=True)) as channel,
    ):
        yield host, draft_pb2_grpc.DraftServiceStub(channel)


async def test_the_handshake_says_what_the_model_is_and_costs(
    service: tuple[DraftHost, Any], checkpoint: tuple[Path, LlamaForCausalLM]
) -> None:
    info = await service[1].GetInfo(draft_pb2.DraftServiceGetInfoRequest())
    drafter = next(d for d in info.drafters if d.method == "draft_model")
    assert drafter.is_default and not drafter.needs_rows and not drafter.target_fingerprint
    # Vocabularies may differ by padding: the tokenizer is what counts.
    assert drafter.target_vocab_size == 0
    assert drafter.tokenizer_hash == tokenizer_hash(tokenizer_document(str(checkpoint[0])))
    assert drafter.max_length_tokens == 512 and drafter.attention.chosen
    points = {(c.rows, c.sessions, c.context_tokens): c.compute_ns for c in drafter.costs}
    assert {(rows, sessions) for rows, sessions, _ in points} == {(1, 1), (7, 1), (1, 4), (7, 4)}
    assert len({context for *_, context in points}) == 2 and min(points.values()) > 0
    shortest = min(context for *_, context in points)
    assert points[7, 1, shortest] > points[1, 1, shortest]  # seven forwards against one


async def test_rounds_over_the_link(
    service: tuple[DraftHost, Any], checkpoint: tuple[Path, LlamaForCausalLM]
) -> None:
    """Ids only: no rows are waited for, and a session that was closed leaves no page behind."""
    link, key = Link(service[1]), session_key()
    ids = random_ids(25, seed=3)
    zero = common_pb2.Sampling(temperature=0.0)
    opened = await link.ask(open_item(key, ids, "draft_model", sampling=zero))
    assert opened.opened.have_rows == 0
    for step, token in enumerate([9, 20, 31]):
        reply = await link.ask(advance_item(key, step, len(ids), [token], 4, rows_count=0))
        ids.append(token)
        assert list(reply.proposal.ids) == greedy(checkpoint[1], ids, 4)
        assert not reply.proposal.source
    outside = await link.ask(open_item(session_key(2), [1, VOCAB], "draft_model"))
    assert outside.refused.error.reason == Reason.VOCAB_RANGE
    outside = await link.ask(advance_item(key, 3, len(ids), [VOCAB], 4))
    assert outside.refused.error.reason == Reason.VOCAB_RANGE
    again = await link.ask(advance_item(key, 4, len(ids), [8], 4))
    assert list(again.proposal.ids) == greedy(checkpoint[1], [*ids, 8], 4)
    assert service[0].worker.stats.tables == 1
    await link.ask(close_item(key))
    async with asyncio.timeout(5):
        while service[0].worker.stats.tables:  # noqa: ASYNC110 - set by the engine's thread
            await asyncio.sleep(0.005)
    load = (await service[1].GetInfo(draft_pb2.DraftServiceGetInfoRequest())).load
    assert load.sessions == 0 and load.pages_free == load.pages_total > 0


def test_the_method_needs_its_model() -> None:
    with pytest.raises(SpecwireError, match="draft_model"):
        DraftSettings.load(["--methods", "draft_model"])
    with pytest.raises(SpecwireError, match="draft_model"):
        DraftSettings.load(["--methods", "hybrid", "--hybrid-neural", "draft_model"])


def test_a_model_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    settings = DraftSettings.load(["--methods", "draft_model", "--draft-model", "no-such-model"])
    with pytest.raises(SpecwireError, match="no-such-model") as caught:
        load_methods(settings, lambda line: None)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


@pytest.mark.parametrize("same", [True, False])
def test_the_same_tokens_with_another_template_are_the_same_tokenizer(
    tmp_path: Path, same: bool
) -> None:
    """WC-17: what is compared is the token behind every id; a template is none of the draft's."""
    for name, template, token in (("target", "a", "b"), ("draft", "c", "b" if same else "x")):
        write_llama(tmp_path / name)
        tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, token: 1}, "merges": []}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (tmp_path / name / "chat_template.jinja").write_text(template)
    draft, target = str(tmp_path / "draft"), str(tmp_path / "target")
    flags = ["--methods", "draft_model", "--draft-model", draft, "--dtype", "float32"]
    of_pair = {}
    for known in (target, "nowhere"):
        settings = DraftSettings.load([*flags, "--target", known])
        method = load_methods(settings, lambda line: None)["draft_model"]
        of_pair[known] = method.info.tokenizer_hash
    own, targets = (tokenizer_hash(tokenizer_document(path)) for path in (draft, target))
    assert own != targets
    assert of_pair == {target: targets if same else own, "nowhere": own}


def test_known_ids_come_from_the_tokenizer(
    checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    write_llama(tmp_path)
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        "added_tokens": [{"id": 60, "content": "<x>", "special": True}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ["--methods", "draft_model", "--draft-model", str(tmp_path), "--dtype", "float32"]
    method = load_methods(DraftSettings.load(flags), lambda line: None)["draft_model"]
    proposed = set()
    for seed in range(20):
        context = method.open([1 + seed, 2], GREEDY)
        proposed |= set(method.propose([Request(context, 7)])[0].ids)
        method.close(context)
    assert proposed and max(proposed) <= 60
    assert any(max(greedy(checkpoint[1], [1 + seed, 2], 3)) > 60 for seed in range(20))
