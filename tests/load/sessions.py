"""Closed-loop load: N sessions at once in each mode, tokens a second while all of them decode.

python -m tests.load.sessions --prompts prompts.jsonl --sessions 1,8,32 --modes plain,dflash
python -m tests.load.sessions --model DIR --draft DIR --tau 4 --modes plain,dflash,dflash@colocated

Few sessions are measured several times, with other prompts, so that a figure is about SESSIONS of
them at least. Only the time between the last session's first token and the first session's end
counts, so every figure is about N sessions at once. `--tau` is for drafts that accept nothing, such
as random ones: the time of a round is measured, and the tokens a second are what it would give with
that many a round. They are marked `synthetic`. A run of its own warms every mode and count up, and
sessions come and go uncounted for --settle seconds, in which an adaptive K is found. Where one
client process is the limit, --clients spreads the sessions over several.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.bench_modes import Mode, parse_modes
from coordinator.bench_prompts import load_prompts
from coordinator.bench_stats import percentile
from coordinator.drafters import COLOCATED, PLAIN
from coordinator.local import LocalDeployment, LocalOptions, parse_extra
from tests.load.cli import _say as say
from tests.load.session_clients import Asked, Clients, Stream

WARM_UP_TOKENS = 24
# Sessions that a figure is about at least.
SESSIONS = 12


@dataclass(frozen=True)
class Cell:
    """One mode at one number of sessions. `k`: draft tokens a round; `drafted`: share of the rounds
    that had some. `round_ms`: of a session, from verdict to verdict;
    `outside_ms`: what a round takes beyond the computing of target and draft, median. The rest are
    means of all rounds: `draft_ms` what a drafter beside the target computes, `verify_ms` what is
    left of a round without it and without what is outside: of a separate drafter both together."""

    mode: str
    sessions: int
    tokens_per_s: float
    synthetic: bool
    tau: float
    k: float
    drafted: float
    round_ms: float
    outside_ms: float | None
    verify_ms: float | None
    draft_ms: float


def shared(streams: Sequence[Stream]) -> tuple[int, float]:
    """Tokens and seconds of the time when all of them decode."""
    begin = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    if end <= begin:
        raise RuntimeError("sessions end before the last one begins: more --max-tokens are needed")
    return sum(n for s in streams for at, n in s.arrivals if begin < at <= end), end - begin


def cell(mode: Mode, turns: Sequence[Sequence[Stream]], tau: float | None) -> Cell:
    """Of turns with as many sessions each."""
    counted = [shared(streams) for streams in turns]
    rate = sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)
    sessions, streams = len(turns[0]), [stream for turn in turns for stream in turn]
    rounds = sum(stream.record.rounds for stream in streams)
    # The first token is of no round; others may have come together with it.
    emitted = sum(n for stream in streams for _, n in stream.arrivals) - len(streams)
    own = emitted / max(rounds, 1)
    round_ms = own * sessions / rate * 1e3
    steps = [
        (outside, drafted)
        for stream in streams
        for outside, drafted in zip(
            stream.record.per_step_outside_us, stream.record.per_step_drafted, strict=True
        )
    ]
    # A mode that switched itself off measures plain rounds: nothing to make a figure of.
    drafting = mode.method != PLAIN and any(drafted for _, drafted in steps)
    outside = percentile([us for us, drafted in steps if bool(drafted) is drafting], 0.5)
    draft_ms = 0.0
    if mode.placement == COLOCATED:
        draft_ms = sum(s.record.phase_ms["draft"] for s in streams) / max(rounds, 1)
    mean_ms = sum(us for us, _ in steps) / 1e3 / max(len(steps), 1)
    verify_ms = round_ms - mean_ms - draft_ms
    synthetic = tau is not None and drafting
    if tau is not None and drafting:
        own, rate = tau, tau * sessions / round_ms * 1e3
    return Cell(
        mode=mode.label,
        sessions=sessions,
        tokens_per_s=round(rate, 1),
        synthetic=synthetic,
        tau=round(own, 3),
        k=round(sum(d for _, d in steps) / max(len(steps), 1), 2),
        drafted=round(sum(bool(d) for _, d in steps) / max(len(steps), 1), 3),
        round_ms=round(round_ms, 3),
        outside_ms=None if outside is None else round(outside / 1e3, 3),
        # Verdicts that come together count as nothing outside, and make the mean too large.
        verify_ms=round(verify_ms, 3) if verify_ms > 0 else None,
        draft_ms=round(draft_ms, 3),
    )


async def measure(
    clients: Clients, mode: Mode, prompts: Sequence[Asked], count: int, o: argparse.Namespace
) -> Cell:
    async def turn(number: int, tokens: int) -> list[Stream]:
        chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
        return await clients.sessions([request(mode, p, tokens, o) for p in chosen])

    until = time.monotonic() + o.settle
    await turn(0, min(WARM_UP_TOKENS, o.max_tokens))
    counted = max(o.turns, -(-SESSIONS // count))
    for number in range(counted, len(prompts) + counted):  # other prompts than those that count
        if time.monotonic() > until:
            break
        await turn(number, o.max_tokens)
    turns = [await turn(number, o.max_tokens) for number in range(counted)]
    return cell(mode, turns, o.tau)


async def run(
    modes: Sequence[Mode], addresses: dict[str, str], options: argparse.Namespace
) -> list[Cell]:
    found = []
    async with AsyncExitStack() as stack:
        clients = {}
        for place, address in addresses.items():
            clients[place] = await stack.enter_async_context(Clients(address, options.clients))
            for worker in (await clients[place].info()).workers:
                seen = worker.attention
                asked = f"{seen.policy} {seen.requested}".strip()
                say(
                    f"{place or 'separate'} {worker.role}: {worker.device}, {seen.chosen} "
                    f"({asked}), graphs {seen.graph_mode}"
                )
        vocab = (await next(iter(clients.values())).info()).model.vocab_size
        prompts = _prompts(options, vocab)
        for count in options.sessions:
            for mode in modes:
                try:
                    one = await measure(clients[_key(mode)], mode, prompts, count, options)
                except Exception as error:  # one cell must not hide the others
                    say(f"{mode.label} x {count}: {type(error).__name__}: {error}")
                    continue
                say(_line(one))
                found.append(one)
    return found


def request(mode: Mode, asked: Asked, tokens: int, options: argparse.Namespace) -> Asked:
    return {
        **asked,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": options.temperature,
        "seed": options.seed,
        "method": mode.request,
        "exactness": mode.exactness,
        "num_speculative_tokens": None if mode.method == PLAIN else options.k,
        "return_token_ids": True,
    }


def _key(mode: Mode) -> str:
    return mode.method if mode.placement == COLOCATED else ""


def _prompts(options: argparse.Namespace, vocab: int) -> list[Asked]:
    if options.prompts:
        return [{"messages": list(prompt.messages)} for prompt in load_prompts(options.prompts)]
    rng = random.Random(options.seed)
    low, high = 10, vocab // 2
    return [
        {"token_ids": [rng.randrange(low, high) for _ in range(options.prompt_tokens)]}
        for _ in range(max(options.sessions))
    ]


def _line(c: Cell) -> str:
    rate = f"{c.tokens_per_s:>9.1f} tokens/s{' synthetic' if c.synthetic else ''}"
    return (
        f"{c.mode:<18} x {c.sessions:<4} {rate}  tau {c.tau:.2f}  k {c.k:.1f}  "
        f"round {c.round_ms:.2f} ms  outside {c.outside_ms} ms"
    )


def table(cells: Sequence[Cell]) -> str:
    """Rows by number of sessions: tokens a second, and against `plain` where that was measured."""
    labels = list(dict.fromkeys(c.mode for c in cells))
    by_place = {(c.mode, c.sessions): c for c in cells}
    lines = ["| sessions | " + " | ".join(labels) + " |", "|---" * (len(labels) + 1) + "|"]
    for count in dict.fromkeys(c.sessions for c in cells):
        plain = by_place.get((PLAIN, count))
        row = [str(count)]
        for label in labels:
            found = by_place.get((label, count))
            text = "" if found is None else f"{found.tokens_per_s:.0f}"
            if found is not None and plain is not None and found is not plain:
                text += f" ({found.tokens_per_s / plain.tokens_per_s:.2f} x)"
            row.append(text)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.load.sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--modes", default="plain,dflash", help="as in `specwire bench`")
    add("--sessions", type=_counts, default=[1, 8, 32, 128], help="numbers, by commas")
    add("--prompts", type=Path, help="JSON lines; unset: random token ids")
    add("--prompt-tokens", type=int, default=128, help="of random prompts")
    add("--max-tokens", type=int, default=128, help="of a session")
    add("--settle", type=float, default=2.0, help="seconds of load before what is counted")
    add("--turns", type=int, default=3, help="of all sessions that are counted, at least")
    add("--clients", type=int, default=1, help="processes that the sessions are spread over")
    add("--k", type=int, default=None, help="draft tokens a round; unset: adaptive")
    add("--tau", type=float, default=None, help="tokens a round to assume: synthetic")
    add("--exactness", default="exact")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--model", default="default")
    add("--draft", default="default")
    add("--set", action="append", default=[], help="flags of services: target.device=cuda")
    add("--json", type=Path)
    return made


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def command(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    modes = parse_modes(options.modes, options.exactness)
    extra = parse_extra(options.set)
    inside = {_key(mode) for mode in modes} - {""}
    with ExitStack() as stack:
        addresses = {}
        for method in sorted({"", *inside} if any(not _key(m) for m in modes) else inside):
            chosen = LocalOptions(options.model, options.draft, colocate=method, extra=extra)
            addresses[method] = stack.enter_context(LocalDeployment(chosen, say)).address
        cells = asyncio.run(run(modes, addresses, options))
    print(table(cells))
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n")
    return 0 if len(cells) == len(modes) * len(options.sessions) else 1


if __name__ == "__main__":
    sys.exit(command())
