"""Every Markov head in both places: a draft in its target's process proposes what it proposes in a
service of its own, round by round, and the text is that of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specwire.v1 import common_pb2
from tests.engine.test_dialects import CASES
from tests.engine.tiny import random_ids, write_llama
from tests.service.colocated_harness import Colocated, Generated, colocated_target, generate
from tests.service.draft_peer import Link, advance_item, open_item, session_key
from tests.service.target_harness import open_target, verify
from tests.service.test_draft_dialects import load, serving

TOKENS, SEED = 48, 5
PROMPT = random_ids(21, seed=4)
# By what their config says: the kind of head, in both slot modes, one with rows of its own.
HEADS = {
    "vanilla": "deepspec",
    "gated": "deepspec_gated",
    "rnn": "deepspec_rnn",
    "rnn, trimmed": "speculators_rnn",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


async def separate(
    running: Colocated, stub: Any, address: str, info: Any, k: int, temperature: float
) -> Generated:
    """The rounds of `generate`, with rows over the wire to a draft service at `address`."""
    peer, link, key, out = running.peer(), Link(stub), session_key(7), Generated()
    sampling = common_pb2.Sampling(temperature=temperature, seed=SEED)
    here = running.app.incarnation
    opening = open_item(
        key,
        PROMPT,
        info.method,
        sampling=sampling,
        target_incarnation=here,
        target_fingerprint=info.target_fingerprint,
    )
    assert (await link.ask(opening)).HasField("opened")
    opened = open_target(PROMPT, TOKENS, key, sampling=sampling, ignore_eos=True)
    opened.no_prefix_cache = True
    opened.push_to.address, opened.push_to.draft_incarnation = address, link.incarnation
    opened.push_to.format.CopyFrom(info.row_format)
    await peer.send(opened)
    step, length = 0, len(PROMPT)
    while True:
        verdict = await peer.verdict()
        out.tokens += verdict.tokens
        out.accepted += verdict.accepted
        if verdict.finish:
            return out
        # A target asks for no more than may still come, behind the token that it draws itself.
        most = min(k, TOKENS - len(out.tokens) - 1)
        rows = {"rows_start": verdict.rows_start, "rows_count": verdict.rows_count}
        asked = advance_item(key, step, length, verdict.tokens, most, **rows)
        reply = await link.ask(asked)
        assert reply.HasField("proposal"), reply
        out.proposals.append(tuple(reply.proposal.ids) if most else ())
        length, step = verdict.new_len, step + 1
        await peer.send(verify(step, length, out.proposals[-1], key))


QUICK = [("vanilla", 0.9), ("gated", 0.0), ("rnn", 0.9), ("rnn, trimmed", 0.0)]
SLOW = [(head, t) for head in HEADS for t in (0.0, 0.9) if (head, t) not in QUICK]


@pytest.mark.parametrize(
    ("head", "temperature"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)],
)
async def test_both_places_propose_the_same(
    tmp_path: Path, target: Path, head: str, temperature: float
) -> None:
    """Shared pages and pages of its own, hidden states by reference and over the wire."""
    CASES[HEADS[head]].write(tmp_path / "draft", target)
    method = load(tmp_path / "draft", target, "dspark", confidences=False)
    k = method.info.max_draft_tokens
    async with (
        serving(tmp_path, {"dspark": method}) as stub,
        colocated_target(target, tmp_path / "draft", colocate="dspark") as running,
    ):
        options: dict[str, Any] = {"temperature": temperature, "seed": SEED}
        options["no_prefix_cache"] = True
        plain = await generate(running.peer(), PROMPT, TOKENS, 0, **options)
        inside = await generate(running.peer(), PROMPT, TOKENS, k, **options)
        info = await running.drafter()
        address = f"unix:{tmp_path}/draft.sock"
        beside = await separate(running, stub, address, info, k, temperature)
        assert len(plain.tokens) == TOKENS
        assert inside.tokens == beside.tokens == plain.tokens
        assert inside.proposals == beside.proposals
        assert inside.accepted == beside.accepted
        assert max(map(len, inside.proposals)) == k
        assert len({p[0] for p in inside.proposals if p}) > 3
