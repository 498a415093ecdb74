"""Log probabilities of tokens under the raw logits: log softmax in fp32, before any option."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.api import TokenLogprobs

# Prompt rows whose logits exist at the same time: 64 rows of a vocabulary of 150,000 are 38 MB.
CHUNK_ROWS = 64


def score(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """logits fp32 [vocab] of one row. Row by row, so that mates in the batch change nothing."""
    total, value = logits.logsumexp(0), logits[token]
    higher = (logits > value).count_nonzero()
    ties_before = (logits[:token] == value).count_nonzero()
    return TokenLogprobs(
        token=token,
        logprob=float(value - total),
        rank=1 + int(higher + ties_before),
        top=tuple((i, float(logits[i] - total)) for i in _highest(logits, top)),
    )


def _highest(logits: Tensor, count: int) -> list[int]:
    """Ids of the highest logits, ties to the lowest id: topk alone promises no order of ties."""
    count = min(count, len(logits))
    if count == 0:
        return []
    lowest = logits.topk(count).values[-1]
    ids: list[int] = (logits >= lowest).nonzero().flatten().tolist()
    values: list[float] = logits[ids].tolist()
    ranked = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return [token for _, token in ranked[:count]]


def score_rows(
    rows: Tensor, head: Callable[[Tensor], Tensor], tokens: Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """Scores token i under row i of hidden states [rows, hidden]; `head` turns rows into logits."""
    scored: list[TokenLogprobs] = []
    for start in range(0, len(tokens), CHUNK_ROWS):
        part = tokens[start : start + CHUNK_ROWS]
        logits = head(rows[start : start + len(part)])
        scored += [score(row, token, top) for row, token in zip(logits, part, strict=True)]
    return tuple(scored)
