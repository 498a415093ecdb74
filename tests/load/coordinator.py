"""Open-loop load on a coordinator, through the SDK: whole generations as a user sees them.

python -m tests.load.coordinator --rate 1 --duration-s 30 --method dflash --json coordinator.json
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from specwire.client import AsyncClient
from specwire.generation import Delta
from tests.load.cli import fits, main, parser
from tests.load.openloop import Plan, Run, Sample, run


async def load(address: str, plan: Plan, options: argparse.Namespace) -> Run:
    async with AsyncClient(address) as client:
        model = (await client.info()).model
        total = options.prompt_tokens + options.new_tokens
        fits("--prompt-tokens + --new-tokens", total, model.max_length_tokens, "target")

        async def session(number: int, sample: Sample) -> None:
            rng = random.Random(f"{options.seed},{number}")
            stream = client.stream(
                token_ids=[rng.randrange(model.vocab_size) for _ in range(options.prompt_tokens)],
                max_tokens=options.new_tokens,
                ignore_eos=True,
                temperature=options.temperature,
                seed=number,
                method=options.method,
                num_speculative_tokens=options.k,
                timeout_s=options.timeout_s,
                return_token_ids=True,
            )
            async with stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        if not sample.tokens:
                            sample.span("first_token")
                        sample.tokens += len(event.token_ids)

        return await run(plan, session)


def command(argv: Sequence[str] | None = None) -> int:
    made = parser("coordinator", "Open-loop load on a coordinator, through the SDK.")
    made.add_argument("--method", default="", help="`plain` or a drafter; unset: the default one")
    made.add_argument("--k", type=int, default=None, help="draft tokens; unset: the server's")
    made.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    made.add_argument("--timeout-s", type=float, default=None, help="deadline of each generation")
    return main("coordinator", made, load, argv)


if __name__ == "__main__":
    sys.exit(command())
