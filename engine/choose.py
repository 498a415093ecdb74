"""From the logits of a step to the tokens of its items: options, draw, match, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from engine import penalties
from engine.api import Item, TokenLogprobs
from engine.logprobs import score
from engine.sampling import Draw, accept

# (logits fp32 [rows, vocab], how to draw each, whether margins are wanted) -> tokens and margins
Drawer = Callable[[Tensor, Sequence[Draw], bool], tuple[list[int], list[float]]]


class Chosen(NamedTuple):
    """Of one item: the accepted draft tokens and one of the target's own, and how many were
    accepted. Nothing for an item that draws nothing.
    """

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    margins: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


def drafts_of(item: Item) -> Sequence[int]:
    return item.ids[len(item.ids) - item.draws + 1 :] if item.draws else ()


def choose(logits: Tensor, items: Sequence[Item], draw: Drawer) -> list[Chosen]:
    """What each item gets from logits fp32 [sum of draws, vocab], rows in the order of the items.
    The logits are changed in place where options ask for it.
    """
    draws: list[Draw] = []
    raw: list[Tensor] = []
    for item in items:
        rows = logits[len(draws) : len(draws) + item.draws]
        draws += draws_of(item)
        # What the log probabilities are of, kept where the options change it.
        output = len(item.context) - item.prompt_len
        changed = item.draws > 0 and penalties.changes_logits(item.sampling, output)
        raw.append(rows.clone() if changed and item.logprobs is not None else rows)
        if changed:
            penalties.apply(rows, item.sampling, item.context, item.prompt_len, drafts_of(item))
    margins = any(item.margins for item in items)
    tokens, gaps = draw(logits, draws, margins)
    chosen, at = [], 0
    for item, rows in zip(items, raw, strict=True):
        end = at + item.draws
        chosen.append(_chosen(item, tokens[at:end], gaps[at:end], rows))
        at = end
    return chosen


def draws_of(item: Item) -> list[Draw]:
    """How each drawing row of an item draws, in the order of the rows."""
    if not item.draws:
        return []
    # The row at position p draws the token at p + 1.
    first = item.start + len(item.ids) - item.draws + 1
    given = [None, *drafts_of(item)]
    return [Draw(item.sampling, first + i, token) for i, token in enumerate(given)]


def plain(item: Item) -> bool:
    """Whether drawing is all that is to be done with the item's logits: nothing changes them, and
    nobody asks for numbers about them."""
    if item.logprobs is not None or item.margins:
        return False
    sampling = item.sampling
    return not sampling.alters or not penalties.changes_logits(
        sampling, len(item.context) - item.prompt_len
    )


def matched(item: Item, drawn: Sequence[int]) -> Chosen:
    """What a `plain` item gets where its rows drew these tokens."""
    draws, ids = item.draws, item.ids
    if draws == 1:
        return Chosen((drawn[0],))
    first, accepted = len(ids) - draws + 1, 0
    while accepted < draws - 1 and ids[first + accepted] == drawn[accepted]:
        accepted += 1
    return Chosen(tuple(drawn[: accepted + 1]), accepted) if draws else Chosen()


def _chosen(item: Item, drawn: list[int], gaps: list[float], raw: Tensor) -> Chosen:
    if not item.draws:
        return Chosen()
    accepted = accept(drafts_of(item), drawn)
    tokens = tuple(drawn[: accepted + 1])
    logprobs: tuple[TokenLogprobs, ...] = ()
    if item.logprobs is not None:
        top = item.logprobs
        logprobs = tuple(score(raw[i], token, top) for i, token in enumerate(tokens))
    margins = tuple(gaps[: accepted + 1]) if item.margins else ()
    return Chosen(tokens, accepted, margins, logprobs)
