"""The SDK: `AsyncClient` and `Client`. Needs the base install only (no torch, no numpy).

    with Client("127.0.0.1:7070") as client:
        print(client.generate(prompt="The capital of France is", max_tokens=16).text)
        for answer in client.generate(prompt="Once", n=3, logprobs=2).choices:
            print(answer.text, answer.logprobs[0].top)
        for event in client.stream(messages=[{"role": "user", "content": "Hello"}]):
            if isinstance(event, Delta):
                print(event.text, end="")

Leaving a stream early (close, or dropping the last reference) cancels the work on the server. A
server that is not available is tried again only while nothing has been received. One that is there
and slow to accept is waited for as long as `timeout_s` allows, for 20 s at most.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self, Unpack

import grpc

from specwire.errors import Reason, SpecwireError, from_rpc_error
from specwire.generation import (
    Acceptance,
    AcceptedSpan,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    Sampling,
    TokenLogprobs,
    TopLogprob,
    Usage,
    collect,
)
from specwire.info import ServerInfo, info_from
from specwire.request import GenerateOptions, build_request, with_prompt
from specwire.rpc import ADDRESSES, channel_options, is_address
from specwire.streams import AsyncStream, Budget, Start, Stream, task_is_cancelled
from specwire.v1 import generate_pb2, generate_pb2_grpc

__all__ = [
    "Acceptance",
    "AcceptedSpan",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Sampling",
    "ServerInfo",
    "Stream",
    "TokenLogprobs",
    "TopLogprob",
    "Usage",
]

_INFO_TIMEOUT_S = 10.0


def _options(address: str) -> list[tuple[str, int]]:
    if not isinstance(address, str) or not is_address(address):
        raise SpecwireError.field("address", address, ADDRESSES)
    options = channel_options(link=False)
    if address.startswith(("unix:", "localhost:", "127.", "[::1]")):
        options.append(("grpc.enable_http_proxy", 0))
    return options


class _Calls:
    """The calls to one server, until `closed`."""

    def __init__(self, address: str, channel: Any) -> None:
        self._address, self._channel = address, channel
        self._stub: Any = generate_pb2_grpc.GenerationServiceStub(channel)
        self._closed = False

    def _start(self, request: generate_pb2.GenerateRequest) -> Start:
        self._check_open()

        def start(timeout_s: float | None) -> Any:
            # A stream begins when it is read: the client may have been closed since.
            return self._call(self._stub.Generate, request, timeout_s)

        return start

    def _ask_info(self, timeout_s: float | None) -> Any:
        request = generate_pb2.GenerationServiceGetInfoRequest()
        return self._call(self._stub.GetInfo, request, timeout_s)

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        self._check_open()
        try:
            return method(request, timeout=timeout_s)
        except ValueError:  # what gRPC raises where another thread has closed the channel meanwhile
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise SpecwireError(Reason.CANCELLED, "the client is closed; make a new one")

    def _failed(self, error: grpc.RpcError | asyncio.CancelledError) -> SpecwireError:
        self._check_open()
        if isinstance(error, asyncio.CancelledError):
            return SpecwireError(Reason.CANCELLED, "the call was cancelled")
        return from_rpc_error(error, self._address, "coordinator")


class AsyncClient(_Calls):
    """A client for asyncio. Create it inside the running loop; raises UNSUPPORTED elsewhere."""

    def __init__(self, address: str) -> None:
        options = _options(address)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            text = "an AsyncClient is made inside a running event loop; a Client needs none"
            raise SpecwireError(Reason.UNSUPPORTED, text) from None
        super().__init__(address, grpc.aio.insecure_channel(address, options=options))

    def stream(
        self, prompt: str | None = None, /, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Starts a generation; iterate for `Delta`s and one `Finished` for each choice. Arguments
        as of `Client.generate`."""
        options = with_prompt(prompt, options)
        request, budget = build_request(options), Budget(options.get("timeout_s"))
        return AsyncStream(self._start(request), self._failed, budget, max(1, request.n))

    async def generate(
        self, prompt: str | None = None, /, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer. Arguments as of `Client.generate`."""
        async with self.stream(prompt, **options) as stream:
            return collect([event async for event in stream])

    async def info(self, timeout_s: float = _INFO_TIMEOUT_S) -> ServerInfo:
        budget = Budget(timeout_s)
        while True:
            try:
                return info_from(await self._ask_info(budget.timeout_s()))
            except grpc.RpcError as error:
                await asyncio.sleep(budget.pause_s(self._failed(error)))
            except asyncio.CancelledError as error:
                if task_is_cancelled():
                    raise
                raise self._failed(error) from None

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_Calls):
    """A blocking client; may be used from several threads."""

    def __init__(self, address: str) -> None:
        super().__init__(address, grpc.insecure_channel(address, options=_options(address)))

    def stream(self, prompt: str | None = None, /, **options: Unpack[GenerateOptions]) -> Stream:
        """Starts a generation; iterate for `Delta`s and one `Finished` for each choice. Arguments
        as of `Client.generate`."""
        options = with_prompt(prompt, options)
        request, budget = build_request(options), Budget(options.get("timeout_s"))
        return Stream(self._start(request), self._failed, budget, max(1, request.n))

    def generate(
        self, prompt: str | None = None, /, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer. One of `prompt` (its name may be left out), `messages` and `token_ids`
        is needed; what else is left out, or None, takes the default said here.

        prompt       text that is continued as it is
        messages     mappings with `role` and `content`, put through the model's chat template
        token_ids    the prompt as ids
        max_tokens   most tokens of the answer; unset: as many as the model's context still holds
        temperature, top_k, top_p, min_p  1.0, 0, 1.0 and 0: nothing removed; temperature 0: greedy
        seed         unset: drawn by the server, which returns it; `choice` (0) is part of it
        repetition_penalty, presence_penalty, frequency_penalty  1.0, 0 and 0: off
        logit_bias   what is added to logits, by token id
        bad_words, bad_sequences  text and token ids that the answer must not have
        min_tokens   no end before so many tokens (0)
        stop, stop_token_ids  text (one or several) and token ids that end the answer
        ignore_eos, include_stop  go on behind the end-of-text token; keep the text that ended it
        n            answers to the prompt, at most 16 (1): `choices` of what is returned
        logprobs, prompt_logprobs  log probabilities with so many alternatives; unset: none
        priority     lower comes first (0)
        method, num_speculative_tokens  "plain", or a drafter by name, and its tokens a round;
                     unset: the server's. They change the speed only
        exactness    "exact" or "fast"; unset: the server's
        timeout_s    longest time in seconds, attempts together; unset: no limit
        return_token_ids (True), return_margins (False)  whether they are in what is returned
        model, request_id  name of the model, where several are served; a word for the logs
        structured_output  not built: refused by name

        Raises SpecwireError.
        """
        with self.stream(prompt, **options) as stream:
            return collect(list(stream))

    def info(self, timeout_s: float = _INFO_TIMEOUT_S) -> ServerInfo:
        budget = Budget(timeout_s)
        while True:
            try:
                return info_from(self._ask_info(budget.timeout_s()))
            except grpc.RpcError as error:
                time.sleep(budget.pause_s(self._failed(error)))

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
