"""The SDK with several choices, log probabilities, and every sampling option."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest

from specwire.client import AsyncClient, Client, Generation
from specwire.errors import Reason, SpecwireError
from specwire.request import GenerateOptions, build_request
from specwire.serve import GrpcHost
from specwire.v1 import common_pb2, generate_pb2, generate_pb2_grpc

Response = generate_pb2.GenerateResponse


def scored(token: int) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TopLogprob(token_id=token + i, logprob=-0.5 - i, text="t") for i in range(2)]
    return common_pb2.TokenLogprobs(
        token_id=token, logprob=-0.5, rank=1, top=top, text=f"<{token}>"
    )


def delta(choice: int, text: str, ids: list[int]) -> Response:
    part = generate_pb2.Delta(text=text, token_ids=ids, logprobs=map(scored, ids))
    return Response(delta=part, choice=choice)


def end(choice: int, tokens: int) -> Response:
    sampling = common_pb2.Sampling(
        temperature=0.0,
        seed=4,
        choice=choice,
        min_p=0.25,
        repetition_penalty=1.5,
        logit_bias={3: 1.5},
        bad_sequences=[common_pb2.TokenSequence(ids=[1, 2])],
        min_tokens=2,
    )
    usage = generate_pb2.Usage(prompt_tokens=5, completion_tokens=tokens, cached_prompt_tokens=4)
    finished = generate_pb2.Finished(
        usage=usage,
        sampling=sampling,
        max_tokens=7,
        stop=["x"],
        stop_token_ids=[9],
        ignore_eos=True,
        bad_words=["b"],
        priority=-3,
        prompt_logprobs=[scored(8)] if choice == 0 else (),
        acceptance=generate_pb2.AcceptanceRecord(accepted_by_source={"ngram": 3}, target_moves=1),
    )
    return Response(finished=finished, choice=choice)


class Server(generate_pb2_grpc.GenerationServiceServicer):
    """Two interleaved answers, the second of which ends first."""

    def __init__(self) -> None:
        self.events = [
            delta(0, "a", [1]),
            delta(1, "x", [11]),
            delta(1, "y", [12]),
            end(1, 2),
            delta(0, "bc", [2, 3]),
            end(0, 3),
        ]

    async def Generate(self, request: Any, context: Any) -> Any:
        for event in self.events:
            yield event


@pytest.fixture
async def server(tmp_path: Any) -> AsyncIterator[tuple[Server, str]]:
    host = GrpcHost(
        address=f"unix:{tmp_path}/c", services=["specwire.v1.GenerationService"], link=False
    )
    servicer = Server()
    generate_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, host.server)
    await host.start()
    try:
        yield servicer, host.addresses[0]
    finally:
        await host.drain(0)


async def both(address: str) -> list[Generation]:
    def blocking() -> Generation:
        with Client(address) as client:
            return client.generate(prompt="p", n=2)

    async with AsyncClient(address) as client:
        return [await client.generate(prompt="p", n=2), await asyncio.to_thread(blocking)]


async def test_choices_are_put_together(server: tuple[Server, str]) -> None:
    for result in await both(server[1]):
        assert [(c.choice, c.text, c.token_ids) for c in result.choices] == [
            (0, "abc", (1, 2, 3)),
            (1, "xy", (11, 12)),
        ]
        assert [[s.text for s in c.logprobs] for c in result.choices] == [
            ["<1>", "<2>", "<3>"],
            ["<11>", "<12>"],
        ]
        first = result.logprobs[1]
        assert (first.token_id, first.rank, first.logprob) == (2, 1, -0.5)
        assert [(t.token_id, t.logprob, t.text) for t in first.top] == [
            (2, -0.5, "t"),
            (3, -1.5, "t"),
        ]
        assert [s.token_id for s in result.prompt_logprobs] == [8]
        assert result.others[0].prompt_logprobs == ()
        total = result.total_usage
        assert (total.prompt_tokens, total.completion_tokens) == (5, 5)
        assert total.cached_prompt_tokens == 4
        s = result.others[0].sampling
        assert (s.choice, s.min_p, s.repetition_penalty, s.top_p) == (1, 0.25, 1.5, 1.0)
        assert (s.logit_bias, s.bad_sequences, s.min_tokens) == ({3: 1.5}, ((1, 2),), 2)
        assert (result.max_tokens, result.stop, result.stop_token_ids) == (7, ("x",), (9,))
        assert (result.ignore_eos, result.bad_words, result.priority) == (True, ("b",), -3)
        assert result.acceptance.accepted_by_source == {"ngram": 3}
        assert result.acceptance.target_moves == 1
        assert asdict(result)["others"][0]["text"] == "xy"


async def test_a_choice_without_its_end_is_an_error(server: tuple[Server, str]) -> None:
    del server[0].events[3]
    async with AsyncClient(server[1]) as client:
        with pytest.raises(SpecwireError) as caught:
            await client.generate(prompt="p", n=2)
    assert caught.value.reason is Reason.INTERNAL


def test_every_option_travels() -> None:
    request = build_request(
        {
            "prompt": "p",
            "n": 3,
            "logprobs": 0,
            "prompt_logprobs": 2,
            "priority": -1,
            "include_stop": True,
            "bad_words": ["b", "c"],
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {7: -2.5},
            "bad_sequences": [[1, 2], [3]],
            "min_tokens": 4,
            "structured_output": {"choice": ["yes", "no"]},
        }
    )
    assert (request.n, request.logprobs, request.prompt_logprobs) == (3, 0, 2)
    assert request.HasField("logprobs") and request.priority == -1 and request.include_stop
    assert list(request.bad_words) == ["b", "c"]
    s = request.sampling
    assert (s.min_p, s.repetition_penalty, s.presence_penalty) == (0.25, 1.5, -0.5)
    assert (s.frequency_penalty, s.min_tokens, dict(s.logit_bias)) == (0.5, 4, {7: -2.5})
    assert [list(q.ids) for q in s.bad_sequences] == [[1, 2], [3]]
    assert list(request.structured_output.choice.values) == ["yes", "no"]
    bare = build_request({"prompt": "p"})
    assert not bare.HasField("n") and not bare.HasField("logprobs")
    assert not bare.HasField("structured_output") and not bare.sampling.HasField("min_p")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": -1}, "n"),
        ({"logprobs": "many"}, "logprobs"),
        ({"logit_bias": 7}, "logit_bias"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"logit_bias": "x"}, "logit_bias"),
        ({"bad_words": [3]}, "bad_words"),
        ({"bad_sequences": [[-1]]}, "bad_sequences"),
        ({"bad_sequences": [4]}, "bad_sequences"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"structured_output": {"yaml": "x"}}, "structured_output"),
    ],
)
def test_what_cannot_travel_is_named(options: GenerateOptions, field: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        build_request({"prompt": "secret", **options})
    assert caught.value.metadata["field"] == field and caught.value.metadata["accepted"]
    assert "secret" not in caught.value.message
