"""A whole request through the real GenerationService: n, logprobs, echo, refusals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

import target_svc.intake
from engine import api
from specwire.client import Delta, Finished, Generation
from specwire.errors import Reason, SpecwireError
from specwire.rpc import decode_ids
from specwire.v1 import draft_pb2, target_pb2
from tests.service.coordinator_harness import (
    PROMPT,
    ScriptedDraft,
    World,
    refusal,
    row_drafter,
    world,
)
from tests.service.fleet_harness import until
from tests.service.toy_engine import HIDDEN, VOCAB, continuation, scored, seed_of

_F = Reason.FIELD_INVALID
SEED = 21


class Opens:
    """What the target was asked for, and what it made of it."""

    def __init__(self) -> None:
        self.requests: list[target_pb2.OpenTarget] = []
        self.sampling: list[api.Sampling] = []
        # Choice that the target refuses, with the error.
        self.refuse: tuple[int, SpecwireError] | None = None


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    seen, open_spec = Opens(), target_svc.intake.open_spec

    def spy(request: target_pb2.OpenTarget, limits: Any) -> Any:
        if seen.refuse is not None and request.sampling.choice == seen.refuse[0]:
            raise seen.refuse[1]
        spec = open_spec(request, limits)
        seen.requests.append(request)
        seen.sampling.append(spec.sampling)
        return spec

    monkeypatch.setattr(target_svc.intake, "open_spec", spy)
    yield seen


def expected(choice: int, count: int) -> list[int]:
    return continuation(PROMPT, count, seed_of(api.Sampling(seed=SEED, choice=choice)))


def words(ids: list[int]) -> str:
    return "".join(f"w{i} " for i in ids)


@pytest.mark.parametrize("method", ["plain", "toy"])
async def test_choices_are_what_single_requests_with_their_index_give(
    opens: Opens, method: str
) -> None:
    async with world(ScriptedDraft(), num_speculative_tokens=3) as made:
        options: dict[str, Any] = {"temperature": 0.7, "seed": SEED, "method": method}
        result = await made.generate(n=4, max_tokens=20, **options)
        assert [c.choice for c in result.choices] == [0, 1, 2, 3]
        for index, choice in enumerate(result.choices):
            assert list(choice.token_ids) == expected(index, 20)
            assert choice.text == words(expected(index, 20))
            assert choice.sampling.choice == index and choice.sampling.seed == SEED
            assert choice.usage.completion_tokens == 20 and choice.finish_reason == "length"
        assert result.usage.prompt_tokens == len(PROMPT)
        assert result.total_usage.completion_tokens == 80
        assert result.total_usage.prompt_tokens == len(PROMPT)
        # The first is opened first; the others name it as the one whose pages they share.
        assert opens.requests[0].sampling.choice == 0
        first = opens.requests[0].key
        assert not opens.requests[0].HasField("fork_of")
        assert all(r.fork_of == first for r in opens.requests[1:]) and len(opens.requests) == 4
        single = await made.generate(choice=2, max_tokens=20, **options)
        assert single.token_ids == result.choices[2].token_ids and not single.others
        await made.until_idle()
        assert not made.host.servicer.sessions


class _Caching(ScriptedDraft):
    """Has the rows of what any session was asked about, as the row cache of a draft does."""

    def _handle(self, item: draft_pb2.DraftItem) -> list[draft_pb2.DraftReply]:
        replies = super()._handle(item)
        if item.HasField("open"):
            ids = decode_ids(item.open.ids)
            asked = {(a.key.session_id, a.key.generation) for a in self.advances if a.k}
            for name, known in self.sessions.items():
                if name in asked and known[: len(ids)] == ids:
                    replies[0].opened.have_rows = len(ids) - len(ids) % 16
        return replies


async def test_choices_share_the_rows_of_their_prompt() -> None:
    """Otherwise each would run the prompt again, for rows that the draft has from the first."""
    draft, ids = _Caching(**row_drafter()), [7 * i % 900 for i in range(100)]
    async with world(draft, num_speculative_tokens=3) as made:
        result = await made.generate(token_ids=ids, n=4, max_tokens=20, seed=SEED, temperature=0.7)
        for choice in result.choices:
            seed = seed_of(api.Sampling(seed=SEED, choice=choice.choice))
            assert list(choice.token_ids) == continuation(ids, 20, seed)
            assert choice.acceptance.draft_tokens > 0
        first, *others = (item.key.session_id for item in draft.opens)
        rows = {
            number: draft.row_bytes[number, 0] // (2 * 2 * HIDDEN) for number in (first, *others)
        }
        assert rows[first] == 100 and all(rows[number] == 4 for number in others)
        prompt = sum(len(i[1]) for step in made.engine.log for i in step if i[0] + len(i[1]) <= 100)
        assert prompt <= 100 + 3 * 32
        await made.until_idle()


@pytest.mark.parametrize("how", ["late", "refused", "gone"])
async def test_choices_do_not_wait_for_a_draft_that_fails_the_first(how: str) -> None:
    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Any]:
        return [refusal(item, "QUEUE_FULL")] if how == "refused" else []

    draft = ScriptedDraft(script, **row_drafter())
    async with world(draft, proposal_wait_min_ms=50, num_speculative_tokens=3) as made:
        if how == "gone":
            await draft.stop()
        result = await made.generate(n=3, max_tokens=20, seed=SEED, temperature=0.7)
        for choice in result.choices:
            assert list(choice.token_ids) == expected(choice.choice, 20)


async def test_a_seed_that_nobody_gave_is_drawn_once_for_all_choices() -> None:
    async with world() as made:
        first = await made.generate(n=2, temperature=1.0, seed=None)
        seeds = {choice.sampling.seed for choice in first.choices}
        again = await made.generate(n=2, temperature=1.0, seed=seeds.pop())
        assert not seeds
        assert [c.token_ids for c in again.choices] == [c.token_ids for c in first.choices]
        other = await made.generate(n=2, temperature=1.0, seed=None)
        assert other.sampling.seed != first.sampling.seed


async def test_the_stream_names_the_choice_of_each_event() -> None:
    async with world(engine={"step_s": 0.002}) as made:
        stream = made.client.stream(
            token_ids=PROMPT, n=3, max_tokens=30, temperature=0.7, seed=SEED
        )
        events = [event async for event in stream]
    ends = [event.choice for event in events if isinstance(event, Finished)]
    assert sorted(ends) == [0, 1, 2]
    for choice in range(3):
        ids = [
            i for e in events if isinstance(e, Delta) and e.choice == choice for i in e.token_ids
        ]
        assert ids == expected(choice, 30)


async def test_leaving_ends_all_choices() -> None:
    async with world(ScriptedDraft(), engine={"step_s": 0.005}) as made:
        stream = made.client.stream(token_ids=PROMPT, n=4, max_tokens=400, temperature=0.0)
        await anext(stream)
        assert len(made.host.servicer.sessions) == 4
        stream.cancel()
        await made.until_idle(10)
        await _no_sessions(made)


async def test_a_deadline_ends_all_choices() -> None:
    async with world() as made:
        made.engine.gate.clear()
        with pytest.raises(SpecwireError) as caught:
            await made.generate(n=3, timeout_s=0.4)
        assert caught.value.reason is Reason.DEADLINE
        made.engine.gate.set()
        await made.until_idle(10)
        await _no_sessions(made)


async def _no_sessions(made: World) -> None:
    async with asyncio.timeout(10):
        while made.host.servicer.sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_choice_that_fails_fails_the_call_with_its_error(opens: Opens) -> None:
    async with world(ScriptedDraft(), engine={"step_s": 0.005}) as made:
        opens.refuse = (2, SpecwireError(Reason.KV_PAGES_EXHAUSTED, "no page", {"needed": "9"}))
        with pytest.raises(SpecwireError) as caught:
            await made.generate(n=4, max_tokens=400)
        assert caught.value.reason is Reason.KV_PAGES_EXHAUSTED
        assert caught.value.metadata["needed"] == "9"
        await made.until_idle(10)
        await _no_sessions(made)
        opens.refuse = None
        assert len((await made.generate(n=4)).choices) == 4


async def test_choices_count_as_sessions() -> None:
    async with world(max_sessions=3) as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate(n=4)  # not QUEUE_FULL: it would not fit later either
        assert caught.value.reason is Reason.FIELD_INVALID
        assert caught.value.metadata["field"] == "n" and "1 to 3" in caught.value.message
        assert len((await made.generate(n=3)).choices) == 3
        made.engine.gate.clear()
        task = asyncio.create_task(made.generate(n=2))
        await until(lambda: len(made.host.servicer.sessions) == 2)
        with pytest.raises(SpecwireError) as caught:
            await made.generate(n=2)
        assert caught.value.reason is Reason.QUEUE_FULL and "3" in caught.value.message
        made.engine.gate.set()
        assert len((await task).choices) == 2


def check_logprobs(result: Generation, top: int) -> None:
    """One per token, of the right prefix, with the texts."""
    ids = list(result.token_ids)
    assert len(result.logprobs) == len(ids)
    for at, (token, got) in enumerate(zip(ids, result.logprobs, strict=True)):
        wanted = scored([*PROMPT, *ids[:at]], token, top)
        assert (got.token_id, got.rank, got.text) == (token, wanted.rank, f"w{token} ")
        assert got.logprob == pytest.approx(wanted.logprob)
        assert [(t.token_id, t.text) for t in got.top] == [(i, f"w{i} ") for i, _ in wanted.top]


@pytest.mark.parametrize("method", ["plain", "toy"])
async def test_log_probabilities_stay_with_their_tokens(method: str) -> None:
    plain = words(expected(0, 40))
    stop = plain[len(words(expected(0, 12))) - 3 :][:6]
    async with world(ScriptedDraft(), num_speculative_tokens=5) as made:
        options: dict[str, Any] = {"method": method, "seed": SEED, "logprobs": 3}
        check_logprobs(await made.generate(**options), 3)
        # A stop string cuts tokens of a round, and holds text back before that.
        cut = await made.generate(stop=[stop, "w nowhere"], **options)
        assert cut.finish_reason == "stop_string" and len(cut.token_ids) < 40
        check_logprobs(cut, 3)
        # Without the ids they come all the same.
        silent = await made.generate(return_token_ids=False, **options)
        assert not silent.token_ids and len(silent.logprobs) == 40
        none = await made.generate(method=method, seed=SEED)
        assert none.logprobs == () and none.prompt_logprobs == ()


async def test_prompt_log_probabilities_come_once_with_choice_0() -> None:
    prompt = [(7 * i) % 900 for i in range(100)]  # several chunks
    async with world() as made:
        result = await made.generate(token_ids=prompt, prompt_logprobs=2, n=2, max_tokens=4)
        assert [got.token_id for got in result.prompt_logprobs] == prompt[1:]
        for at, got in enumerate(result.prompt_logprobs, start=1):
            wanted = scored(prompt[:at], prompt[at], 2)
            assert got.logprob == pytest.approx(wanted.logprob)
            assert (got.rank, got.text, len(got.top)) == (wanted.rank, f"w{prompt[at]} ", 2)
        assert result.others[0].prompt_logprobs == ()
        assert result.logprobs == ()


async def test_cached_tokens_are_said_and_prompt_log_probabilities_are_whole_all_the_same() -> None:
    prompt = [(11 * i) % 900 for i in range(70)]
    async with world() as made:
        options: dict[str, Any] = {"token_ids": prompt, "max_tokens": 3, "seed": SEED}
        first = await made.generate(n=3, **options)
        assert first.usage.cached_prompt_tokens == 0
        assert [c.usage.cached_prompt_tokens for c in first.others] == [69, 69]
        again = await made.generate(**options)
        assert 0 < again.usage.cached_prompt_tokens < 70
        scores = await made.generate(prompt_logprobs=0, **options)
        assert [got.token_id for got in scores.prompt_logprobs] == prompt[1:]
        assert scores.usage.cached_prompt_tokens == 0
        assert scores.token_ids == again.token_ids == first.token_ids


async def test_stop_strings_included_and_not_too_early() -> None:
    plain = words(expected(0, 40))
    stop = words(expected(0, 6)[4:])  # complete with the sixth token
    async with world(ScriptedDraft(), num_speculative_tokens=4) as made:
        for method in ("plain", "toy"):
            options: dict[str, Any] = {"seed": SEED, "stop": [stop], "method": method}
            cut = await made.generate(**options)
            assert cut.text == plain[: plain.index(stop)] and cut.stop_string == stop
            kept = await made.generate(include_stop=True, **options)
            assert kept.text == plain[: plain.index(stop)] + stop
            assert kept.token_ids == cut.token_ids
            late = await made.generate(min_tokens=6, **options)
            assert late.text == plain and late.finish_reason == "length"


async def test_the_text_of_a_stop_token_is_left_out_unless_asked_for() -> None:
    ids = expected(0, 9)
    async with world(ScriptedDraft(), num_speculative_tokens=4) as made:
        options: dict[str, Any] = {"seed": SEED, "stop_token_ids": [ids[-1]]}
        result = await made.generate(**options)
        assert list(result.token_ids) == ids and result.text == words(ids[:-1])
        kept = await made.generate(include_stop=True, **options)
        assert list(kept.token_ids) == ids and kept.text == words(ids)


async def test_everything_that_was_applied_is_said_again_and_reaches_the_engine(
    opens: Opens,
) -> None:
    draft = ScriptedDraft()
    async with world(draft) as made:
        result = await made.generate(
            max_tokens=9,
            temperature=0.5,
            seed=None,
            top_k=7,
            top_p=0.75,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={9: -100.0, 4: 1.5},
            bad_words=["w7 "],
            bad_sequences=[[1, 2, 3]],
            min_tokens=3,
            stop=["zz"],
            stop_token_ids=[998],
            ignore_eos=True,
            priority=-2,
            request_id="r",
        )
        s = result.sampling
        assert (s.temperature, s.top_k, s.top_p, s.min_p) == (0.5, 7, 0.75, 0.125)
        penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        assert penalties == (1.5, -0.5, 0.25)
        assert s.logit_bias == {4: 1.5, 9: -100.0} and s.min_tokens == 3
        # The word as it is, and behind a space: unknown to this tokenizer, hence its token 0.
        assert set(s.bad_sequences) == {(1, 2, 3), (7,), (0,)}
        assert result.max_tokens == 9 and result.stop == ("zz",)
        assert result.stop_token_ids == (998,) and result.ignore_eos
        assert result.bad_words == ("w7 ",) and result.priority == -2
        assert result.request_id == "r" and result.exactness == "exact"
        [request], [got] = opens.requests, opens.sampling
        assert request.priority == -2 and request.max_new_tokens == 9
        assert got == api.Sampling(
            temperature=0.5,
            top_k=7,
            top_p=0.75,
            seed=s.seed,
            choice=0,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias=((4, 1.5), (9, -100.0)),
            bad_sequences=((1, 2, 3), (7,), (0,)),
            min_tokens=3,
            stop_ids=(998, 999),
        )
        assert draft.opens[0].sampling == request.sampling
        # Defaults are said too.
        bare = await made.generate(max_tokens=2, temperature=None, seed=None)
        assert (bare.sampling.temperature, bare.sampling.repetition_penalty) == (1.0, 1.0)
        assert bare.sampling.seed != s.seed
        # Nearer to greedy than fp32 can tell.
        tiny = await made.generate(max_tokens=2, temperature=1e-30)
        assert tiny.sampling.temperature == pytest.approx(1e-4)


BAD: list[tuple[dict[str, Any], Reason, str, str]] = [
    ({"n": 0}, _F, "n", "0"),
    ({"n": 17}, _F, "n", "17"),
    ({"n": 2, "choice": 1}, _F, "sampling.choice", "1"),
    ({"logprobs": 21}, _F, "logprobs", "21"),
    ({"prompt_logprobs": 21}, _F, "prompt_logprobs", "21"),
    ({"min_p": -0.5}, _F, "sampling.min_p", "-0.5"),
    ({"min_p": math.nan}, _F, "sampling.min_p", "nan"),
    ({"repetition_penalty": 0.0}, _F, "sampling.repetition_penalty", "0.0"),
    ({"repetition_penalty": math.nan}, _F, "sampling.repetition_penalty", "nan"),
    ({"repetition_penalty": 11.0}, _F, "sampling.repetition_penalty", "11.0"),
    ({"presence_penalty": 3.0}, _F, "sampling.presence_penalty", "3.0"),
    ({"frequency_penalty": -math.inf}, _F, "sampling.frequency_penalty", "-inf"),
    ({"logit_bias": {1: math.nan}}, _F, "sampling.logit_bias[1]", "nan"),
    ({"logit_bias": {1: 100.5}}, _F, "sampling.logit_bias[1]", "100.5"),
    ({"logit_bias": {VOCAB: 1.0}}, Reason.VOCAB_RANGE, "sampling.logit_bias[0]", str(VOCAB)),
    ({"logit_bias": dict.fromkeys(range(301), 1.0)}, _F, "sampling.logit_bias", "301 entries"),
    ({"bad_words": ["x"] * 65}, _F, "bad_words", "65 words"),
    ({"bad_words": ["x", ""]}, _F, "bad_words[1]", "0 characters"),
    ({"bad_words": ["  "]}, _F, "bad_words[0]", "2 characters"),
    ({"bad_sequences": [[]]}, _F, "sampling.bad_sequences[0]", "0 ids"),
    ({"bad_sequences": [[1]] * 129}, _F, "sampling.bad_sequences", "129 sequences"),
    (
        {"bad_sequences": [[VOCAB + 5]]},
        Reason.VOCAB_RANGE,
        "sampling.bad_sequences[0].ids[0]",
        str(VOCAB + 5),
    ),
    ({"min_tokens": 41}, _F, "sampling.min_tokens", "41"),
    ({"stop_token_ids": [1] * 257}, _F, "stop_token_ids", "257 ids"),
    ({"priority": 1001}, _F, "priority", "1001"),
    ({"priority": -1001}, _F, "priority", "-1001"),
    ({"structured_output": {"regex": "a+"}}, Reason.UNSUPPORTED, "structured_output", "regex"),
    (
        {"structured_output": {"choice": ["a"]}},
        Reason.UNSUPPORTED,
        "structured_output",
        "choice",
    ),
    ({"structured_output": {}}, Reason.UNSUPPORTED, "structured_output", "of no kind"),
]


async def test_what_is_refused_names_field_value_and_what_is_accepted() -> None:
    """WC-21, WC-43: structured output is refused by name, not begun and broken."""
    async with world(ScriptedDraft()) as made:
        for options, reason, field, value in BAD:
            with pytest.raises(SpecwireError) as caught:
                await made.generate(**options)
            error = caught.value
            assert error.reason is reason, options
            assert error.metadata["field"] == field, options
            assert error.metadata["value"].strip("'") == value, options
            assert error.metadata["accepted"]
        assert not made.host.servicer.sessions
        assert len((await made.generate()).token_ids) == 40


async def test_prompt_log_probabilities_must_fit_into_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specwire.sampling.MAX_PROMPT_SCORES", 12)
    async with world() as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate(prompt_logprobs=3)
        assert caught.value.metadata["field"] == "prompt_logprobs"
        assert caught.value.metadata["accepted"] == "0 to 2 for a prompt of 4 tokens"
        assert len((await made.generate(prompt_logprobs=2)).prompt_logprobs) == 3


async def test_a_request_larger_than_a_message_is_refused_with_both_sizes() -> None:
    async with world() as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate(prompt="a" * 5_000_000)
        assert caught.value.reason is Reason.MESSAGE_TOO_LARGE
        assert str(4 * 2**20) in caught.value.message and "50000" in caught.value.message
        assert len((await made.generate()).token_ids) == 40
