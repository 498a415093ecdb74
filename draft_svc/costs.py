"""What a proposal costs on this machine: measured once at start, told in the handshake."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from draft_svc.methods.base import AnyMethod, Cost, Request

# Committed tokens of a short and of a long session.
SHORT_TOKENS, LONG_TOKENS = 32, 512
_SESSIONS = (1, 4)
_REPEATS = 3
# No new measurement begins after this; a slow drafter says less about itself.
BUDGET_S = 1.2

# Sessions that a method can propose for: (how many, committed tokens each) -> contexts.
Filler = Callable[[int, int], Sequence[object]]


def measure(
    method: AnyMethod,
    fill: Filler,
    *,
    tokens: int,
    max_length: int = 0,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> tuple[Cost, ...]:
    """Best of a few proposals at each point, cheap points first. `fill` opens the contexts; they
    are closed here. A point that the method does not propose at (no pages, no room) is left out.
    """
    end_ns = clock_ns() + int(BUDGET_S * 1e9)
    longest = max_length - tokens - 1 if max_length else LONG_TOKENS
    costs: list[Cost] = []
    fill_ns_per_token = 0.0
    for length in sorted({min(SHORT_TOKENS, longest), min(LONG_TOKENS, longest)}):
        began = clock_ns()
        if length < 2 or began + length * fill_ns_per_token > end_ns:
            break
        contexts = fill(max(_SESSIONS), length)
        fill_ns_per_token = (clock_ns() - began) / length
        for sessions in _SESSIONS:
            for wanted in sorted({1, tokens}):
                requests = [Request(context, wanted) for context in contexts[:sessions]]
                spent = _best_ns(method, requests, end_ns, clock_ns)
                if spent is not None:
                    costs.append(Cost(wanted, sessions, length, spent))
        for context in contexts:
            method.close(context)
    return tuple(costs)


def _best_ns(
    method: AnyMethod,
    requests: Sequence[Request[object]],
    end_ns: int,
    clock_ns: Callable[[], int],
) -> int | None:
    spent: list[int] = []
    while len(spent) < _REPEATS and (not spent or clock_ns() < end_ns):
        began = clock_ns()
        drafts = method.propose(requests)
        if not all(draft.ids for draft in drafts):
            return None
        spent.append(clock_ns() - began)
    return min(spent)
