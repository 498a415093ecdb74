"""Open-loop load on a target service: synthetic sessions that open, verify and close.

    python -m tests.load.target --rate 4 --duration-s 30 --acceptance 0.7 --json target.json

Each prompt is decoded once without drafts before the clock starts. A session of the same prompt and
seed draws the same tokens, so its drafts can be right as often as `--acceptance` says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from specwire.errors import from_rpc_error
from specwire.rpc import channel_options, encode_ids
from specwire.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.load.cli import fits, main, parser
from tests.load.link import LEASE_MS, Link
from tests.load.openloop import Plan, Run, Sample, run

_GET_INFO_S = 10


class TargetLoad:
    """Sessions on one link. `texts` are, for each prompt, the tokens that follow it."""

    def __init__(self, link: Link, info: Any, options: argparse.Namespace) -> None:
        self._link, self._options, self._vocab = link, options, info.model.vocab_size
        rng = random.Random(options.seed)
        self.prompts = [
            [rng.randrange(self._vocab) for _ in range(options.prompt_tokens)]
            for _ in range(options.prompts)
        ]
        self.texts: list[list[int]] = []
        self.drafted = self.accepted = 0

    async def learn(self) -> None:
        """Decodes every prompt without drafts."""
        now = asyncio.get_running_loop().time()
        self.texts = await asyncio.gather(
            *(self._decode(-1 - i, i, Sample(now), False) for i in range(len(self.prompts)))
        )

    async def session(self, number: int, sample: Sample) -> None:
        await self._decode(number, number % len(self.prompts), sample, True)

    async def _decode(self, number: int, which: int, sample: Sample, draft: bool) -> list[int]:
        link, loop = self._link, asyncio.get_running_loop()
        rng = random.Random(f"{self._options.seed},{number}")
        key = link.open(number % 2**63)
        ids = list(self.prompts[which])
        try:
            link.send(open=self._open(key, ids, which))
            verdict = await link.reply(key)
            sample.span("first_token")
            while True:
                ids += verdict.tokens
                sample.tokens += len(verdict.tokens)
                if verdict.finish:
                    return ids[self._options.prompt_tokens :]
                guess = self._guess(which, len(ids), rng) if draft else []
                sent = loop.time()
                step = verdict.step_id + 1
                link.send(
                    verify=target_pb2.Verify(
                        key=key, step_id=step, base_len=len(ids), draft_ids=guess
                    )
                )
                verdict = await link.reply(key)
                sample.span("step", sent)
                self.drafted += len(guess)
                self.accepted += verdict.accepted
        finally:
            link.close(key)

    def _open(
        self, key: common_pb2.SessionKey, ids: list[int], which: int
    ) -> target_pb2.OpenTarget:
        options = self._options
        return target_pb2.OpenTarget(
            key=key,
            ids=encode_ids(ids),
            sampling=common_pb2.Sampling(temperature=options.temperature, seed=which),
            ignore_eos=True,
            max_new_tokens=options.new_tokens,
            lease_ms=LEASE_MS,
            no_prefix_cache=not options.prefix_cache,
        )

    def _guess(self, which: int, length: int, rng: random.Random) -> list[int]:
        """Up to K tokens, each right with the chosen probability as long as those before it are."""
        follows = self.texts[which][length - self._options.prompt_tokens :]
        limit = min(self._options.k, len(follows) - 1)
        right = [rng.random() < self._options.acceptance for _ in range(max(0, limit))]
        return [t if r else (t + 1) % self._vocab for t, r in zip(follows, right, strict=False)]


async def load(address: str, plan: Plan, options: argparse.Namespace) -> Run:
    channel_settings = channel_options(link=True)
    async with grpc.aio.insecure_channel(address, options=channel_settings) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        try:
            info = await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=_GET_INFO_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        total = options.prompt_tokens + options.new_tokens
        fits("--prompt-tokens + --new-tokens", total, info.model.max_length_tokens, "target")
        fits("--k", options.k, info.max_draft_tokens, "target")
        link = Link(stub, target_pb2.TargetServiceLinkRequest, target_pb2.TargetItem)
        async with link:
            made = TargetLoad(link, info, options)
            await made.learn()
            done = await run(plan, made.session)
    if made.drafted:
        share = made.accepted / made.drafted
        print(f"{made.drafted} tokens drafted, {share:.0%} accepted", file=sys.stderr)
    return done


def command(argv: Sequence[str] | None = None) -> int:
    made = parser("target", "Open-loop load on a target service, with synthetic sessions.")
    made.add_argument("--k", type=int, default=3, help="draft tokens of a step")
    made.add_argument(
        "--acceptance", type=float, default=0.7, help="how often the next draft token is right"
    )
    made.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    made.add_argument("--prompts", type=int, default=8, help="different prompts")
    made.add_argument(
        "--prefix-cache", action="store_true", help="let sessions share their prompts' pages"
    )
    return main("target", made, load, argv)


if __name__ == "__main__":
    sys.exit(command())
