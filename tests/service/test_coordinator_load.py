"""Many sessions on slow workers: waiting and the breaker follow the load."""

from __future__ import annotations

import asyncio

from tests.service.coordinator_harness import ScriptedDraft, world
from tests.service.toy_engine import continuation

SESSIONS = 12


async def test_many_sessions_on_slow_workers_keep_their_speculation() -> None:
    """Default waiting and breaker: proposals that are slow because all ask are waited for."""
    draft = ScriptedDraft()
    draft.ask_s = 0.015
    engine = {"step_s": 0.02, "item_s": 0.002, "pages": 256}
    defaults = {"proposal_wait_min_ms": 30}
    async with world(draft, engine, **defaults) as made:
        prompts = [[i, i + 1, i + 2] for i in range(SESSIONS)]
        options = {"num_speculative_tokens": 7, "max_tokens": 80}
        results = await asyncio.gather(
            *(made.generate(token_ids=prompt, **options) for prompt in prompts)
        )
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == continuation(prompt, 80)
        accepted = sum(r.acceptance.accepted_tokens for r in results)
        print(accepted, [dict(r.acceptance.fallbacks) for r in results][:4])
        assert accepted > SESSIONS * 40
