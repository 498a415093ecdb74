"""The steps that an engine runs before there are sessions, so that none of them waits for a
compiler or for the capture of a graph.

A kernel is compiled for what it is launched with: the tile of so many rows, the launch of few
rows, spans over one chunk of keys or several. Every shape here is there for one of these, or for a
graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.api import WarmUp
from engine.device_step import DeviceStepper
from engine.ragged_words import Room

# Keys in front of a prompt's chunk: none, one chunk of the attention's, several.
_STARTS = (0, 256, 2048)
# Rows of launched prompts, and rows that draw: up to 64 are launched in another way than more, and
# up to 16, 32 and 64 may have tiles of their own.
_LAUNCHED_ROWS = (24, 96)
_DRAWS = (1, 17, 33, 65)
# What is only compiled for has no more rows: logits of more would take memory that others need.
_MOST_ROWS = 512
# Where rows are asked for there are twice as many steps: those with filters are captured of up to
# so many.
_FEW_SESSIONS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `sessions` items alike, of `rows` rows behind `start` positions. `captured`: by a
    graph, where one can hold it. `launched`: the host chooses from the logits."""

    sessions: int
    rows: int
    draws: int
    start: int = 0
    filtered: bool = False
    exact: bool = True
    taps: tuple[int, ...] = ()
    projected: bool = False
    drafted: bool = True
    captured: bool = True
    launched: bool = False


# Of so many sessions with so many rows: exact, or not, or both where they differ.
Modes = Callable[[int, int], Sequence[bool]]


def shapes(
    stepper: DeviceStepper,
    wanted: WarmUp,
    chunk: int,
    independent: bool,
    longest: int,
    projected: tuple[int, ...] = (),
) -> Iterator[Shape]:
    """Prompts, then blocks, the largest first: the others find the memory that it took. `longest`:
    most tokens of a session. `projected`: layers of the engine's projection."""

    def modes(sessions: int, rows: int) -> Sequence[bool]:
        if independent:
            return (True, False) if stepper.loose(sessions * rows) else (True,)
        return (True, False) if sessions == 1 else (False,)  # exact items run alone

    yield from _launched(chunk, modes)
    if projected:  # its product has tiles of its own
        for rows in prompt_rows(chunk):
            yield replace(Shape(1, rows, 1, launched=True), taps=projected, projected=True)
    yield from _prompts(stepper, wanted, chunk, modes, longest, projected)
    held = stepper.shapes(wanted.sessions, wanted.widest)
    for sessions, rows in reversed(stepper.shapes(_MOST_ROWS, wanted.widest)):
        if (sessions, rows) not in held and sessions * rows <= _MOST_ROWS:
            for exact in modes(sessions, rows):
                yield Shape(sessions, rows, rows, exact=exact, captured=False)
    for sessions, rows in reversed(held):
        for exact in modes(sessions, rows):
            for kind in _kinds(wanted, sessions, projected):
                yield replace(kind, sessions=sessions, rows=rows, draws=rows, exact=exact)


def _prompts(
    stepper: DeviceStepper,
    wanted: WarmUp,
    chunk: int,
    modes: Modes,
    longest: int,
    projected: tuple[int, ...],
) -> Iterator[Shape]:
    """Prompts as graphs hold them, up to a chunk beside the blocks of all sessions."""
    beside = wanted.sessions * wanted.widest
    held = stepper.prompt_shapes(chunk + beside, beside)
    rows, draws = ({room.rows for room in held}, {room.draws for room in held})
    for room in reversed(stepper.prompt_shapes(chunk + _MOST_ROWS, _MOST_ROWS)):
        if room.rows not in rows or room.draws not in draws:
            rows.add(room.rows)
            draws.add(room.draws)
            shape = _prompt(room, longest)
            for exact in modes(shape.sessions, shape.rows):
                yield replace(shape, exact=exact, captured=False)
    # Whether rows have filters is no matter here.
    kinds = [kind for kind in _kinds(wanted, 1, projected) if not kind.filtered]
    for room in reversed(held):
        shape = _prompt(room, longest)
        for exact in modes(shape.sessions, shape.rows):
            for kind in kinds:
                yield replace(
                    kind, sessions=shape.sessions, rows=shape.rows, draws=shape.draws, exact=exact
                )


def _prompt(room: Room, longest: int) -> Shape:
    """A step that takes the room: of one session, or of several where that has more rows."""
    sessions = -(-room.rows // longest)
    rows = room.rows // sessions
    # One row more than draw: with as many it would be a block.
    return Shape(sessions, rows, min(room.draws // sessions, rows - 1))


def _launched(chunk: int, modes: Modes) -> Iterator[Shape]:
    """Prompts as they are launched: the sizes of chunks, then what else such a step draws."""
    for rows in prompt_rows(chunk):
        for start in _STARTS if rows in _LAUNCHED_ROWS else (0,):
            for exact in modes(1, rows):
                yield Shape(1, rows, 1, start, exact=exact, launched=True)
    for filtered in (False, True):
        for draws in _DRAWS:
            yield Shape(1, draws + 1, draws, filtered=filtered, launched=True)
    # The first rows that leave the device.
    yield Shape(1, 5, 1, taps=(0,), launched=True)


def prompt_rows(chunk: int) -> list[int]:
    """Sizes of chunks of up to `chunk` rows, one for each choice of tiles and of launches; last of
    a chunk that stands beside blocks."""
    sizes = {5, 24, 48, chunk}
    power = 64
    while power < chunk:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted({size for size in sizes if size <= chunk} | {chunk + chunk // 4})


def _kinds(wanted: WarmUp, sessions: int, projected: tuple[int, ...]) -> Iterator[Shape]:
    """Which rows are asked for, whether a co-located drafter reads its own, and whether rows have
    filters; sizes are to be set."""
    through = [(projected, True)] if projected else []
    exports = dict.fromkeys((*through, (wanted.exports, False), ((), False)))
    every = len(exports) == 1 or sessions <= _FEW_SESSIONS
    for drafted in (True, False) if wanted.apart else (True,):
        for taps, own in exports:
            for filtered in (False, True):
                if every or not filtered:
                    yield Shape(
                        0, 0, 0, filtered=filtered, taps=taps, projected=own, drafted=drafted
                    )
