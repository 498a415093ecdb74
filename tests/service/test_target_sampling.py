"""Sampling options through the real target service on a tiny random model: speculative equals
plain with each of them on; refusals; log probabilities over chunks.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_svc.methods.base import MethodInfo
from draft_svc.requests import sampling_of
from engine.runner import NativeEngine
from specwire.v1 import common_pb2, target_pb2
from tests.engine.tiny import KERNELS, VOCAB, load_tiny, random_ids, reference, write_llama
from tests.service.target_harness import Peer, key, open_target, target, verify
from tests.service.toy_engine import ToyEngine, scored

PROMPT, COUNT = random_ids(40, seed=8), 24
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "logit_bias": {"logit_bias": {5: 4.0, 9: -100.0, 30: 3.0}},
    "bad_sequences": {},  # filled in from the plain text
    "min_tokens": {"min_tokens": 14},
    "all": {
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "logit_bias": {7: 2.0},
        "min_tokens": 5,
    },
}
# At T = 0 these change nothing, by definition.
FILTERS = ("top_k", "top_p", "min_p")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeEngine, Any]:
    path: Path = tmp_path_factory.mktemp("sampling")
    model = write_llama(path)
    engine = load_tiny(path, KERNELS[0])
    engine.gate = threading.Event()  # type: ignore[attr-defined]  # the harness opens it at the end
    return engine, model


@pytest.fixture(scope="module")
def engine(made: tuple[NativeEngine, Any]) -> NativeEngine:
    return made[0]


async def generate(
    peer: Peer, number: int, oracle: list[int], right: int, **fields: Any
) -> tuple[list[int], list[common_pb2.TokenLogprobs], int]:
    """Rounds with `right` good draft tokens and a bad one; without an oracle, plain steps."""
    at = key(number)
    await peer.send(open_target(PROMPT, COUNT, at=at, exactness="EXACTNESS_EXACT", **fields))
    verdict = await peer.verdict()
    tokens, step, accepted = list(verdict.tokens), 0, 0
    scores = list(verdict.logprobs)
    while not verdict.finish:
        step += 1
        drafts = oracle[len(tokens) :][:right]
        drafts += (
            [(oracle[len(tokens) + right] + 1) % VOCAB] if len(tokens) + right < len(oracle) else []
        )
        await peer.send(verify(step, len(PROMPT) + len(tokens), drafts, at=at))
        verdict = await peer.verdict()
        assert len(verdict.logprobs) == len(verdict.tokens) * (fields.get("logprobs") is not None)
        tokens += verdict.tokens
        scores += verdict.logprobs
        accepted += verdict.accepted
    await close(peer, at)
    return tokens, scores, accepted


async def close(peer: Peer, at: common_pb2.SessionKey) -> None:
    await peer.send(target_pb2.CloseSession(key=at))
    assert (await peer.reply()).HasField("closed")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", OPTIONS)
async def test_speculative_equals_plain_with_each_option(
    engine: NativeEngine, name: str, temperature: float
) -> None:
    """WC-42, WC-38: one pipeline for verify and plain, with the request's options."""
    fields: dict[str, Any] = {"temperature": temperature, "seed": 5}
    async with target(engine) as service:  # type: ignore[arg-type]
        peer = service.peer()
        bare = common_pb2.Sampling(**fields)
        base, _, _ = await generate(peer, 1, [], 0, sampling=bare, ignore_eos=True)
        fields |= OPTIONS[name]
        stops: list[int] = []
        if name == "bad_sequences":
            fields["bad_sequences"] = [
                common_pb2.TokenSequence(ids=base[6:9]),
                common_pb2.TokenSequence(ids=[PROMPT[-1], base[0]]),
                common_pb2.TokenSequence(ids=[base[3]]),
            ]
        if "min_tokens" in fields:
            stops = [base[4]]
        options: dict[str, Any] = {
            "sampling": common_pb2.Sampling(**fields),
            "stop_token_ids": stops,
            "ignore_eos": True,
        }
        plain, _, _ = await generate(peer, 2, [], 0, **options)
        for number, right in ((3, 0), (4, 2), (5, 6)):
            tokens, _, accepted = await generate(peer, number, plain, right, **options)
            assert tokens == plain
            assert bool(accepted) == bool(right) or len(plain) < 3
        # Opened again in the middle: what is output stays output.
        done = len(plain) // 2
        again = [*PROMPT, *plain[:done]]
        await peer.send(
            open_target(
                again, COUNT - done, at=key(6), prompt_len=len(PROMPT), free_run=COUNT, **options
            )
        )
        rest: list[int] = []
        while done + len(rest) < len(plain):
            rest += (await peer.verdict()).tokens
        assert plain[done:] == rest
        await close(peer, key(6))
        if name != "none" and not (temperature == 0 and name in FILTERS):
            assert plain != base  # the option does something here
        if name == "bad_sequences":
            assert plain[0] == base[0], "what begins in the prompt is no sequence of the output"
            for banned in (base[6:9], [base[3]]):
                ends = range(len(banned), len(plain) + 1)
                assert all(plain[end - len(banned) : end] != banned for end in ends)
        if stops:
            assert stops[0] not in plain[: fields["min_tokens"]]
        await service.until_idle()


async def test_log_probabilities_of_prompt_and_output(
    made: tuple[NativeEngine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = made
    sizes: list[int] = []
    step = engine.step

    def watched(items: Any, *launched: Any) -> Any:
        sizes.extend(len(item.ids) for item in items)
        return step(items, *launched)

    monkeypatch.setattr(engine, "step", watched)
    async with target(engine, prefill_chunk_tokens=16) as service:  # type: ignore[arg-type]
        peer = service.peer()
        fields: dict[str, Any] = {
            "sampling": common_pb2.Sampling(temperature=0.8, seed=2, presence_penalty=1.0),
            "logprobs": 3,
            "prompt_logprobs": 2,
            "exactness": "EXACTNESS_FAST",
        }
        await peer.send(open_target(PROMPT, COUNT, **fields))
        first = await peer.verdict()
        law = reference(model, [*PROMPT, first.tokens[0]]).double().log_softmax(-1)
        assert sizes == [16, 16, 8]
        assert len(first.prompt_logprobs) == len(PROMPT) - 1
        for i, got in enumerate(first.prompt_logprobs):
            assert got.token_id == PROMPT[i + 1]
            assert got.logprob == pytest.approx(float(law[i, PROMPT[i + 1]]), abs=2e-4)
            assert [t.token_id for t in got.top] == law[i].topk(2).indices.tolist()
        [own] = first.logprobs
        assert own.token_id == first.tokens[0] and len(own.top) == 3
        assert own.logprob == pytest.approx(float(law[len(PROMPT) - 1, own.token_id]), abs=2e-4)
        await close(peer, key())
        await service.until_idle()


async def test_logprobs_are_trimmed_like_the_tokens() -> None:
    engine = ToyEngine()
    prompt = [5, 6, 7, 8]
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(prompt, logprobs=2, prompt_logprobs=0))
        first = await peer.verdict()
        assert [s.token_id for s in first.prompt_logprobs] == prompt[1:]
        known = [*prompt, first.tokens[0]]
        engine.forced = {len(known): 41, len(known) + 1: 999, len(known) + 2: 43}
        await peer.send(verify(1, len(known), [41, 999, 43]))
        verdict = await peer.verdict()
        assert list(verdict.tokens) == [41, 999] and not verdict.prompt_logprobs
        expected = [scored(known, 41, 2), scored([*known, 41], 999, 2)]
        assert [(s.token_id, s.rank, len(s.top)) for s in verdict.logprobs] == [
            (e.token, e.rank, 2) for e in expected
        ]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": math.nan}, "sampling.temperature", "nan"),
    ({"temperature": -1.0}, "sampling.temperature", "-1.0"),
    ({"top_p": math.nan}, "sampling.top_p", "nan"),
    ({"top_p": 0.0}, "sampling.top_p", "0.0"),
    ({"min_p": 1.5}, "sampling.min_p", "1.5"),
    ({"min_p": math.nan}, "sampling.min_p", "nan"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty", "0.0"),
    ({"repetition_penalty": math.inf}, "sampling.repetition_penalty", "inf"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty", "2.5"),
    ({"frequency_penalty": math.nan}, "sampling.frequency_penalty", "nan"),
    ({"logit_bias": {1000: 1.0}}, "sampling.logit_bias[0]", "1000"),
    ({"logit_bias": {3: math.nan}}, "sampling.logit_bias[3]", "nan"),
    ({"logit_bias": {3: -101.0}}, "sampling.logit_bias[3]", "-101.0"),
    ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "sampling.logit_bias", "301 entries"),
    ({"bad_sequences": [{"ids": []}]}, "sampling.bad_sequences[0]", "0 ids"),
    ({"bad_sequences": [{"ids": [1, 1000]}]}, "sampling.bad_sequences[0].ids[1]", "1000"),
    ({"bad_sequences": [{"ids": [1]}] * 129}, "sampling.bad_sequences", "129 sequences"),
]


async def test_refusals_name_field_value_and_what_is_accepted() -> None:
    opens: list[tuple[dict[str, Any], str, str]] = [
        ({"sampling": common_pb2.Sampling(seed=1, **fields)}, field, value)
        for fields, field, value in REFUSED
    ]
    opens += [
        ({"stop_token_ids": [5, 1000]}, "stop_token_ids[1]", "1000"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", "257 ids"),
        ({"logprobs": 21}, "logprobs", "21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ]
    async with target() as service:
        peer = service.peer()
        for number, (fields, field, value) in enumerate(opens, start=1):
            await peer.send(open_target([1, 2], at=key(number), **fields))
            error = (await peer.refused()).error
            assert error.metadata["field"] == field, error
            assert error.metadata["value"].strip("'") == value and error.metadata["accepted"]
        # A bad one fails alone.
        await peer.send(open_target([1, 2], at=key(99)))
        assert (await peer.verdict()).tokens


def test_the_tiny_model_is_what_the_reference_says(made: tuple[NativeEngine, Any]) -> None:
    """Without this the equalities above could hold for a constant text."""
    law = reference(made[1], PROMPT).softmax(-1)
    assert torch.isfinite(law).all() and len(set(law.argmax(-1).tolist())) > 10


def test_a_draft_takes_every_option_and_needs_few() -> None:
    """The draft's draw is a hint: it reads temperature, filters and the noise key."""
    message = common_pb2.Sampling(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        seed=2**64 - 1,
        choice=3,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={3: 1.0},
        bad_sequences=[common_pb2.TokenSequence(ids=[1, 2])],
        min_tokens=4,
    )
    info = MethodInfo("dflash", "tiny", max_draft_tokens=7)
    got = sampling_of(message, info)
    assert (got.temperature, got.top_k, got.seed, got.choice) == (0.5, 7, 2**64 - 1, 3)
    assert got.top_p == pytest.approx(0.9)
