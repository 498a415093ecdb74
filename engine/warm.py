"""The steps that an engine runs before there are sessions, so that none of them waits for a
compiler or for the capture of a graph.

A kernel is compiled for what it is launched with: the tile of so many rows, the launch of few
rows, spans over one chunk of keys or several. Every shape here is there for one of these, or for a
graph of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.api import Engine, Item, ItemResult, Sampling, WarmUp
from engine.compiling import compile_first
from engine.device_step import DeviceStepper
from engine.errors import SettingRefused
from engine.kv.pool import PageTable
from engine.meeting import met

log = logging.getLogger(__name__)

# Keys in front of a prompt's chunk: none, one chunk of the attention's, several.
_STARTS = (0, 256, 2048)
# Rows that draw in one launched step: up to 16 are launched in another way than more.
_DRAWS = (1, 17)
# What is only compiled for has no more rows: logits of more would take memory that others need.
_MOST_ROWS = 512
# Where rows are asked for there are twice as many steps: those with filters are captured of up to
# so many.
_FEW_SESSIONS = 2
_GREEDY = Sampling(temperature=0.0)
_FILTERED = Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `sessions` items alike, of `rows` rows behind `start` positions. `captured`: by a
    graph, where one can hold it."""

    sessions: int
    rows: int
    draws: int
    start: int = 0
    filtered: bool = False
    exact: bool = True
    taps: tuple[int, ...] = ()
    drafted: bool = True
    captured: bool = True


# Of so many sessions with so many rows: exact, or not, or both where they differ.
Modes = Callable[[int, int], Sequence[bool]]


class Step(Protocol):
    """`Engine.step` that may be told to leave captures to later."""

    def __call__(self, items: Sequence[Item], *, capture: bool) -> Sequence[ItemResult]: ...


def run(engine: Engine, stepper: DeviceStepper, wanted: WarmUp, chunk: int, step: Step) -> int:
    """See `Engine.warm_up`. `chunk`: most rows of a prompt in one step."""
    _check_exports(wanted.exports, engine.info.layer_count)
    began = time.perf_counter()
    longest = engine.info.max_length
    every = shapes(stepper, wanted, chunk, engine.rows_independent)
    held = [shape for shape in every if shape.start + shape.rows <= longest]

    def launched(items: Sequence[Item], *, capture: bool) -> Sequence[ItemResult]:
        return step(items, capture=False)

    compile_first(
        engine.info.device, partial(_meet_all, engine, held, launched, wanted), wanted.stopped
    )
    count = _meet_all(engine, held, step, wanted)
    if engine.info.device != "cpu":
        torch.cuda.empty_cache()  # what large steps took is for whoever needs it
    log.info("warmed %d step shapes in %.1f s", count, time.perf_counter() - began)
    return count


def _meet_all(engine: Engine, held: Sequence[Shape], step: Step, wanted: WarmUp) -> int:
    count = 0
    for shape in held:
        if wanted.stopped():
            break
        # What is not captured is of more sessions than were asked for.
        count += met(shape, shape.captured, partial(_meet, engine, shape, step))
    return count


def _check_exports(exports: tuple[int, ...], layers: int) -> None:
    if list(exports) != sorted(set(exports) & set(range(layers))):
        raise SettingRefused("warm_taps", exports, f"layers 0 to {layers - 1}, rising")


def _meet(engine: Engine, shape: Shape, step: Step) -> bool:
    tables: list[PageTable] = []
    try:
        for _ in range(shape.sessions):
            tables.append(engine.allocate(shape.start + shape.rows))
            # What the pages hold does not matter; nobody else sees them.
            tables[-1].length = shape.start
        step([_item(shape, table) for table in tables], capture=shape.captured)
        return True
    finally:
        for table in tables:
            table.free()


def _item(shape: Shape, table: PageTable) -> Item:
    return Item(
        table=table,
        ids=[1] * shape.rows,
        start=shape.start,
        draws=shape.draws,
        sampling=_FILTERED if shape.filtered else _GREEDY,
        taps=shape.taps,
        exact=shape.exact,
        drafted=shape.drafted,
    )


def shapes(
    stepper: DeviceStepper, wanted: WarmUp, chunk: int, independent: bool
) -> Iterator[Shape]:
    """Prompts, then blocks, the largest first: the others find the memory that it took."""

    def modes(sessions: int, rows: int) -> Sequence[bool]:
        if independent:
            return (True, False) if stepper.loose(sessions * rows) else (True,)
        return (True, False) if sessions == 1 else (False,)  # exact items run alone

    yield from _launched(chunk, modes)
    held = stepper.shapes(wanted.sessions, wanted.widest)
    for sessions, rows in reversed(stepper.shapes(_MOST_ROWS, wanted.widest)):
        if (sessions, rows) not in held and sessions * rows <= _MOST_ROWS:
            for exact in modes(sessions, rows):
                yield Shape(sessions, rows, rows, exact=exact, captured=False)
    for sessions, rows in reversed(held):
        for exact in modes(sessions, rows):
            for taps, drafted, filtered in _kinds(wanted, sessions):
                yield Shape(
                    sessions, rows, rows, filtered=filtered, exact=exact, taps=taps, drafted=drafted
                )


def _launched(chunk: int, modes: Modes) -> Iterator[Shape]:
    """Steps with prompts: the sizes of chunks, then what else such a step draws."""
    for rows in prompt_rows(chunk):
        for start in _STARTS:
            for exact in modes(1, rows):
                yield Shape(1, rows, 1, start, exact=exact)
    for filtered in (False, True):
        for draws in _DRAWS:
            # One row more than draw: with as many it would be a block.
            yield Shape(1, draws + 1, draws, filtered=filtered)
    # The first rows that leave the device.
    yield Shape(1, 5, 1, taps=(0,))


def prompt_rows(chunk: int) -> list[int]:
    """Sizes of chunks of up to `chunk` rows, one for each choice of tiles and of launches; last of
    a chunk that stands beside blocks."""
    sizes = {5, 24, 48, chunk}
    power = 64
    while power < chunk:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted({size for size in sizes if size <= chunk} | {chunk + chunk // 4})


def _kinds(wanted: WarmUp, sessions: int) -> Iterator[tuple[tuple[int, ...], bool, bool]]:
    """Layers whose rows are asked for, whether a co-located drafter reads its own, and whether rows
    have filters."""
    every = not wanted.exports or sessions <= _FEW_SESSIONS
    for drafted in (True, False) if wanted.apart else (True,):
        for taps in dict.fromkeys((wanted.exports, ())):
            for filtered in (False, True):
                if every or not filtered:
                    yield taps, drafted, filtered
