"""Steps of a target session over gRPC: order, repeats, truncation, limits, stops, drafts, free run."""

from __future__ import annotations

import asyncio

import pytest

from specwire.v1 import common_pb2
from tests.service.target_harness import Target, key, open_target, target, verify
from tests.service.toy_engine import VOCAB, ToyEngine, continuation

PROMPT = [5, 6, 7]


async def test_open_and_verify() -> None:
    """The example of the lengths: n = 10, k = 3, two accepted, three tokens come back."""
    text = continuation(PROMPT, 20)
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, max_new=20, report_margins=True))
        first = await peer.verdict()
        assert (first.step_id, first.base_len, first.new_len, first.accepted) == (0, 3, 4, 0)
        assert list(first.tokens) == text[:1] and len(first.margins) == 1
        wrong = (text[3] + 1) % VOCAB
        await peer.send(verify(1, 4, [text[1], text[2], wrong]))
        second = await peer.verdict()
        assert (second.accepted, second.base_len, second.new_len) == (2, 4, 7)
        assert list(second.tokens) == text[1:4] and second.width == 4
        assert second.timings.compute_ns > 0
