"""Open-loop load on a draft service: synthetic sessions with rows of the format it asks for.

    python -m tests.load.draft --rate 4 --method dflash --acceptance 0.7 --json draft.json

The generator stands for coordinator and target: it opens, pushes random rows, says what was
committed and asks for the next proposal. Of a proposal it commits as much as `--acceptance` says.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence
from typing import Any, Self

import grpc

from specwire.errors import Reason, SpecwireError, from_item, from_rpc_error
from specwire.rpc import CHUNK_BYTES, channel_options, encode_ids, new_incarnation
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.load.cli import fits, main, parser
from tests.load.link import LEASE_MS, Link
from tests.load.openloop import Plan, Run, Sample, run

_GET_INFO_S = 10
_WINDOW_BYTES = 32 * 1024 * 1024
_ITEM_BYTES = {common_pb2.D_TYPE_FLOAT32: 4}


class Rows:
    """A target's push stream: chunks out while the draft gives credit."""

    def __init__(self, stub: Any, form: common_pb2.RowFormat) -> None:
        self.target = new_incarnation()
        self.row_bytes = form.width * _ITEM_BYTES.get(form.dtype, 2)
        self._call = stub.PushFeatures()
        self._in_flight = 0
        self._credit = asyncio.Condition()
        self._writing = asyncio.Lock()
        # Small bf16 or fp32 values whatever the bytes are: the high byte of each stays below 0x40.
        self._noise = bytes(b & 0x3F for b in os.urandom(max(self.row_bytes, 4)))
        self.refused: SpecwireError | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def push(self, key: common_pb2.SessionKey, step_id: int, start: int, count: int) -> None:
        most = max(1, CHUNK_BYTES // self.row_bytes)
        for first in range(start, start + count, most):
            rows = min(most, start + count - first)
            await self._wait(rows * self.row_bytes)
            chunk = draft_pb2.FeatureChunk(
                key=key, step_id=step_id, start=first, count=rows, rows=self._noise * rows
            )
            request = draft_pb2.PushFeaturesRequest(target_incarnation=self.target, chunks=[chunk])
            try:
                async with self._writing:  # a call takes one write at a time
                    await self._call.write(request)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error

    async def _wait(self, size: int) -> None:
        async with self._credit:
            await self._credit.wait_for(lambda: self._in_flight < _WINDOW_BYTES)
            self._in_flight += size

    async def _read(self) -> None:
        async for frame in self._call:
            async with self._credit:
                self._in_flight -= sum(ack.credit_bytes for ack in frame.acks)
                self._credit.notify_all()
            for ack in frame.acks:
                # Rows of a session that has just ended are rightly refused.
                if ack.HasField("error") and ack.error.reason != Reason.SESSION_UNKNOWN:
                    self.refused = self.refused or from_item(ack.error)


class DraftLoad:
    def __init__(self, link: Link, rows: Rows, drafter: Any, options: argparse.Namespace) -> None:
        self._link, self._rows, self._drafter, self._options = link, rows, drafter, options
        self._vocab = drafter.target_vocab_size or options.vocab
        self.asked = self.proposed = 0

    async def session(self, number: int, sample: Sample) -> None:
        rng = random.Random(f"{self._options.seed},{number}")
        key = self._link.open(number)
        ids = [rng.randrange(self._vocab) for _ in range(self._options.prompt_tokens)]
        try:
            self._link.send(open=self._open(key, ids, number))
            await self._link.reply(key)
            sample.span("open")
            await self._rounds(key, ids, rng, sample)
        finally:
            self._link.close(key)

    async def _rounds(
        self, key: common_pb2.SessionKey, ids: list[int], rng: random.Random, sample: Sample
    ) -> None:
        loop, prompt = asyncio.get_running_loop(), len(ids)
        tokens, covered, step = [rng.randrange(self._vocab)], 0, 0
        while len(ids) - prompt < self._options.new_tokens:
            base = len(ids)
            ids += tokens
            sample.tokens += len(tokens)
            sent = loop.time()
            rows = len(ids) - 1 - covered if self._drafter.needs_rows else 0
            if rows:
                await self._rows.push(key, step, covered, rows)
                if self._rows.refused is not None:
                    raise self._rows.refused
            self._link.send(
                advance=draft_pb2.Advance(
                    key=key,
                    step_id=step,
                    base_len=base,
                    tokens=tokens,
                    k=self._options.k,
                    rows_start=covered,
                    rows_count=rows,
                )
            )
            proposal = await self._link.reply(key)
            sample.span("proposal", sent)
            self.asked += self._options.k
            self.proposed += len(proposal.ids)
            covered, step = len(ids) - 1, step + 1
            tokens = self._committed(proposal.ids, rng)

    def _committed(self, proposed: Sequence[int], rng: random.Random) -> list[int]:
        """As much of a proposal as a target might accept, and one token of its own."""
        kept = 0
        for token in proposed:
            if token >= self._vocab or rng.random() >= self._options.acceptance:
                break
            kept += 1
        return [*proposed[:kept], rng.randrange(self._vocab)]

    def _open(self, key: common_pb2.SessionKey, ids: list[int], number: int) -> draft_pb2.OpenDraft:
        return draft_pb2.OpenDraft(
            key=key,
            method=self._drafter.method,
            ids=encode_ids(ids),
            sampling=common_pb2.Sampling(temperature=self._options.temperature, seed=number),
            max_draft_tokens=self._options.k,
            lease_ms=LEASE_MS,
            target_incarnation=self._rows.target,
            target_fingerprint=self._drafter.target_fingerprint,
        )


def _choose(info: Any, method: str) -> Any:
    """The drafter asked for, or the service's default one."""
    for drafter in info.drafters:
        if drafter.method == method or (not method and drafter.is_default):
            return drafter
    accepted = ", ".join(drafter.method for drafter in info.drafters)
    raise SpecwireError.field("--method", method, accepted, Reason.METHOD_UNKNOWN)


async def load(address: str, plan: Plan, options: argparse.Namespace) -> Run:
    channel_settings = channel_options(link=True)
    async with grpc.aio.insecure_channel(address, options=channel_settings) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        try:
            info = await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=_GET_INFO_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        drafter = _choose(info, options.method)
        total = options.prompt_tokens + options.new_tokens + options.k + 1
        fits("--k", options.k, drafter.max_draft_tokens, "drafter")
        fits("--prompt-tokens + --new-tokens + k + 1", total, drafter.max_length_tokens, "drafter")
        link = Link(stub, draft_pb2.DraftServiceLinkRequest, draft_pb2.DraftItem)
        async with link, Rows(stub, drafter.row_format) as rows:
            made = DraftLoad(link, rows, drafter, options)
            done = await run(plan, made.session)
    if made.asked:
        share = made.proposed / made.asked
        print(f"{made.asked} tokens asked for, {share:.0%} proposed", file=sys.stderr)
    return done


def command(argv: Sequence[str] | None = None) -> int:
    made = parser("draft", "Open-loop load on a draft service, with synthetic sessions and rows.")
    made.add_argument("--method", default="", help="drafter; unset: the service's default")
    made.add_argument("--k", type=int, default=3, help="draft tokens asked for")
    made.add_argument(
        "--acceptance", type=float, default=0.7, help="how often the next draft token is kept"
    )
    made.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    made.add_argument(
        "--vocab", type=int, default=1000, help="ids of prompts, where the drafter names no target"
    )
    return main("draft", made, load, argv)


if __name__ == "__main__":
    sys.exit(command())
