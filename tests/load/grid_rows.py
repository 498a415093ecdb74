"""What a grid of pairs is made of, and the lines of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specwire.generation import Generation
from specwire.request import GenerateOptions

Say = Callable[[str], None]
BESIDE = "in its process"
_CLIPPED = 80


@dataclass(frozen=True)
class Side:
    """A service of the grid: what it is called, and its own flags. `beside`: a target whose flags
    put a drafter into its process, which is paired with that one alone."""

    name: str
    flags: tuple[str, ...] = ()
    beside: bool = False


@dataclass(frozen=True)
class Grid:
    """`coordinator`: flags of its own. `prompts` are arguments of `generate` without a method; each
    is run in turn, with `k` draft tokens a round. A service that does not serve within `start_s` is
    wrong. So is, with `captured`, a pair of which either runs without CUDA graphs and, with
    `accepted`, one of whose proposals nothing is accepted."""

    targets: Sequence[Side]
    drafts: Sequence[Side]
    coordinator: tuple[str, ...]
    prompts: Sequence[GenerateOptions]
    method: str
    k: int
    start_s: float = 600.0
    environment: dict[str, str] | None = None
    captured: bool = False
    accepted: bool = False


@dataclass(frozen=True)
class Texts:
    """What one pair gave; the rate is that of decoding, first tokens and a first run left out."""

    generations: tuple[Generation, ...]
    tokens_per_s: float

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [generation.token_ids for generation in self.generations]


@dataclass(frozen=True)
class Row:
    """A line of the table. `wrong`: a text differs from that of the target alone, a service failed,
    or the grid asked for more; `found` says what. `graphs`: captured so far, steps and blocks."""

    target: str
    draft: str
    found: str
    target_runs: str = ""
    draft_runs: str = ""
    tokens_per_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    wrong: bool = False
    graphs: tuple[int, int] = (0, 0)


def line(row: Row) -> str:
    head = f"{row.target:24} {row.draft:24}"
    if not row.target_runs:
        return f"{head} {row.found[:_CLIPPED]}"  # all of a refusal was told when it was met
    acceptance = f", {row.accepted} of {row.drafted} accepted" if row.drafted else ""
    graphs = f"; graphs captured: {row.graphs[0]} of steps" if any(row.graphs) else ""
    graphs += f", {row.graphs[1]} of blocks" if row.graphs[1] else ""
    return (
        f"{head} {row.found or 'the reference':12} {row.tokens_per_s:8.1f} tok/s{acceptance}  "
        f"target {row.target_runs}; draft {row.draft_runs or 'none'}{graphs}"
    )


def left_out(rows: Sequence[Row]) -> Iterator[str]:
    """Every service that could not be had, once, with its whole reason."""
    told = {}
    for row in rows:
        if row.found.startswith("refused: "):
            who = f"target {row.target}" if row.draft == "-" else f"draft {row.draft}"
            told[who] = f"left out: {who}: {row.found.removeprefix('refused: ')}"
    yield from told.values()
