"""What a step costs on this machine: measured once at start, told in the handshake."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.api import Engine, Item, Sampling, WarmUp, never
from engine.errors import OutOfPages
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2
from target_svc.draft_layers import draft_layers
from target_svc.settings import TargetSettings

log = logging.getLogger(__name__)

# Rows of a session: plain decoding, a short block, a full one.
_ROWS = (1, 4, 8)
_SESSIONS = (1, 4)
SHORT_TOKENS, LONG_TOKENS = 64, 1024
_REPEATS = 2
# No new point begins after this; a slow engine says less about itself.
BUDGET_S = 0.8


def prepared(
    engine: Engine,
    settings: TargetSettings,
    colocated: bool,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    stopped: Callable[[], bool] = never,
) -> tuple[common_pb2.StepCost, ...]:
    """Warms the engine up where kernels are compiled, then measures it: a step that is met for the
    first time says nothing. What is left once it is `stopped` is left out. Raises SETTINGS_INVALID,
    CheckpointError, BackendUnavailable."""
    taps, layers = settings.warm_taps, engine.info.layer_count
    if taps and taps[-1] >= layers:  # here, where a CPU looks too, though it would not use them
        accepted = f"layers of the model, 0 to {layers - 1}, rising"
        raise SpecwireError.field("warm_taps", list(taps), accepted, Reason.SETTINGS_INVALID)
    if settings.warm_sessions and engine.info.device != "cpu":
        engine.warm_up(
            WarmUp(
                sessions=max(settings.warm_sessions, *_SESSIONS),
                widest=max(settings.max_draft_tokens + 1, *_ROWS),
                exports=draft_layers(settings),
                apart=colocated and settings.draft_context == "own",
                stopped=stopped,
            )
        )
    if stopped():
        return ()
    log.info("measuring steps")
    return tuple(measure(engine, settings.exactness == "exact", clock_ns))


def measure(
    engine: Engine, exact: bool, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> list[common_pb2.StepCost]:
    """Best of a few steps at each point, those that say most first. Runs on the engine's thread,
    before there are sessions; leaves no pages behind. A point that has no pages is left out."""
    end_ns = clock_ns() + int(BUDGET_S * 1e9)
    longest = engine.info.max_length - max(_ROWS) - 1
    lengths = sorted({min(SHORT_TOKENS, longest), min(LONG_TOKENS, longest)})
    points = [(s, n, r) for s in _SESSIONS for n in lengths for r in (1, 8, 4) if n > 0]
    costs: list[common_pb2.StepCost] = []
    for sessions, length, rows in points:
        if clock_ns() > end_ns:
            log.info("step costs: %d of %d points measured in time", len(costs), len(points))
            break
        try:
            spent = _best_ns(engine, exact, sessions, length, rows, clock_ns)
        except OutOfPages:
            continue
        costs.append(
            common_pb2.StepCost(
                rows=rows, sessions=sessions, context_tokens=length, compute_ns=spent
            )
        )
    return costs


def _best_ns(
    engine: Engine,
    exact: bool,
    sessions: int,
    length: int,
    rows: int,
    clock_ns: Callable[[], int],
) -> int:
    """Nanoseconds of a step with `rows` rows for each of `sessions` sessions of `length` tokens."""
    tables = []
    try:
        for _ in range(sessions):
            tables.append(engine.allocate(length + rows))
        item = Item(tables[0], [1] * rows, length, rows, Sampling(temperature=0.0), exact=exact)
        spent = []
        for _ in range(_REPEATS):
            for table in tables:
                # What the pages hold does not matter to the time; nobody else sees them.
                table.length = length
            items = [item._replace(table=table, context=[1] * (length + 1)) for table in tables]
            began = clock_ns()
            engine.step(items)
            spent.append(clock_ns() - began)
        return min(spent)
    finally:
        for table in tables:
            table.free()
