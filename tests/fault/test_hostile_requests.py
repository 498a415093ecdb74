"""Requests and items that are well formed, yet cost far more or reach further than their sender's
own session.

Family: one sender against all others.
"""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Any

import pytest
from prometheus_client import generate_latest
from tokenizers import Tokenizer, models, pre_tokenizers

from coordinator.text import TextModel
from coordinator.validation import LONG_TEXT_CHARS
from specwire.errors import Reason, SpecwireError
from specwire.request import build_request
from specwire.v1 import common_pb2
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, proposal, refusal, world
from tests.service.target_harness import key, open_target, target, verify
from tests.service.toy_engine import continuation
from tests.unit.test_text import document_of

LAST_STEP = 2**32 - 1


async def test_a_free_run_behind_the_last_step_id() -> None:
    """Steps of a free run are numbered on: past the last number the target must not fall over."""
    async with target() as made:
        peer = made.peer()
        await peer.send(open_target([5, 6, 7, 8]), open_target([5, 6, 7, 8], at=key(2)))
        await peer.verdict()
        await peer.verdict()
        await peer.send(verify(LAST_STEP - 1, 5, free_run=5))
        steps = [(await peer.verdict()).step_id for _ in range(2)]
        assert steps == [LAST_STEP - 1, LAST_STEP]
        assert await peer.heartbeat(key(), key(2)) == []
        await peer.send(verify(1, 5, at=key(2)))
        assert list((await peer.verdict()).tokens) == [continuation([5, 6, 7, 8], 2)[1]]


@pytest.mark.parametrize("kind", ["prompt", "messages"])
async def test_a_long_text_keeps_nobody_waiting(kind: str, monkeypatch: Any) -> None:
    """Seconds of tokenising must not stop the streams and heartbeats of others."""
    begun, go_on, encode = threading.Event(), threading.Event(), TextModel.encode

    def slow(self: TextModel, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_TEXT_CHARS:
            begun.set()
            assert go_on.wait(10), "nobody else was served meanwhile"
        return encode(self, text, add_special_tokens=add_special_tokens)

    def render(self: TextModel, messages: Any) -> str:
        return "".join(message["content"] for message in messages)

    monkeypatch.setattr(TextModel, "encode", slow)
    monkeypatch.setattr(TextModel, "render_chat", render)
    text = "w5 " * LONG_TEXT_CHARS
    given = (
        {"prompt": text} if kind == "prompt" else {"messages": [{"role": "user", "content": text}]}
    )
    async with world() as made:
        long = asyncio.create_task(made.generate(**given, max_tokens=2))
        await asyncio.to_thread(begun.wait, 10)
        beside = await made.generate()
        assert list(beside.token_ids) == continuation(PROMPT, 40)
        assert not long.done()
        go_on.set()
        # One word that the toy's vocabulary does not have.
        assert list((await long).token_ids) == continuation([0], 2)
        await made.until_idle()


async def test_long_texts_wait_for_each_other_and_may_be_given_up(monkeypatch: Any) -> None:
    begun, go_on, encode, running = threading.Event(), threading.Event(), TextModel.encode, [0, 0]

    def slow(self: TextModel, text: str, *, add_special_tokens: bool) -> list[int]:
        running[0] += 1
        running[1] = max(running)
        begun.set()
        go_on.wait(10)
        running[0] -= 1
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextModel, "encode", slow)
    async with world() as made:
        text = "w5 " * LONG_TEXT_CHARS
        tasks = [asyncio.create_task(made.generate(prompt=text, max_tokens=2)) for _ in range(3)]
        await asyncio.to_thread(begun.wait, 10)
        tasks[0].cancel()
        with pytest.raises(SpecwireError) as caught:
            await made.generate(prompt=text, max_tokens=2, timeout_s=0.2)
        assert caught.value.reason is Reason.DEADLINE
        go_on.set()
        results = await asyncio.gather(*tasks[1:])
        assert [list(r.token_ids) for r in results] == [continuation([0], 2)] * 2
        assert running == [0, 1]
        await made.until_idle()


def names_reason(draft: ScriptedDraft, item: Any, ids: list[int], name: str) -> list[Any]:
    return [proposal(item, len(ids), [], reason=name)]


def names_source(draft: ScriptedDraft, item: Any, ids: list[int], name: str) -> list[Any]:
    return [proposal(item, len(ids), continuation(ids, item.k), source=name)]


def names_refusal(draft: ScriptedDraft, item: Any, ids: list[int], name: str) -> list[Any]:
    return [refusal(item, name)]


@pytest.mark.parametrize("lie", [names_reason, names_source, names_refusal])
@pytest.mark.parametrize("size", [12, 5_000_000])
async def test_a_draft_makes_up_names(lie: Any, size: int) -> None:
    """They are keys of the client's answer and labels of the metrics: few, short, no text."""
    names = (f"/etc/{i} \n".ljust(size, "x") if i % 2 else f"made_up_{i}" for i in count())
    draft = ScriptedDraft(lambda *given: lie(*given, next(names)))
    async with world(draft, num_speculative_tokens=1) as made:
        for _ in range(2):
            result = await made.generate(max_tokens=120)
            assert list(result.token_ids) == continuation(PROMPT, 120)
            record = result.acceptance
            used = {*record.fallbacks, *record.accepted_by_source}
            assert "other" in used and len(used) <= 40
            assert all(len(name) <= 40 and name.isidentifier() for name in used), used
        page = generate_latest(made.host.metrics.registry).decode()
        assert 'fallbacks_total{cause="other"}' in page or lie is names_source
        assert page.count("fallbacks_total{") <= 40 and "/etc" not in page
        await made.until_idle()


STRANGE_COSTS = {
    "repeated": [(1, 1, 0, 5_000), (1, 1, 0, 9_000), (1, 1, 0, 2_000)],
    "zero": [(0, 0, 0, 0)],
    "huge": [(LAST_STEP, LAST_STEP, LAST_STEP, 2**64 - 1), (0, 0, 0, 2**64 - 1)],
}


@pytest.mark.parametrize("name", STRANGE_COSTS)
async def test_a_draft_says_strange_things_of_its_costs(name: str) -> None:
    """K is chosen by them; whatever they are, the text is the target's."""
    fields = ("rows", "sessions", "context_tokens", "compute_ns")
    costs = [common_pb2.StepCost(**dict(zip(fields, c, strict=True))) for c in STRANGE_COSTS[name]]
    async with world(ScriptedDraft(costs=costs)) as made:
        for _ in range(2):
            assert list((await made.generate()).token_ids) == continuation(PROMPT, 40)
        await made.until_idle()


def test_other_threads_run_while_a_text_is_tokenised() -> None:
    """The tokenizer library holds the interpreter in some of its calls."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = TextModel(document_of(tokenizer))
    ended = threading.Event()

    def work() -> None:
        model.encode("some words " * 150_000, add_special_tokens=True)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 20


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 100 * 86_400.0])
async def test_a_time_limit_without_end(timeout_s: float) -> None:
    """gRPC takes what it cannot count for a time that has passed."""
    async with world() as made:
        result = await made.generate(timeout_s=timeout_s)
        assert list(result.token_ids) == continuation(PROMPT, 40)


@pytest.mark.parametrize("options", [{"temperature": 10**400}, {"logit_bias": {1: 10**400}}])
def test_a_number_that_is_no_float(options: Any) -> None:
    with pytest.raises(SpecwireError) as caught:
        build_request({"prompt": "x", **options})
    assert caught.value.metadata["field"] == next(iter(options))
