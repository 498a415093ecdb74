"""Options that change logits: banned ids, bias and penalties, with the draft prefix counted in.

The definitions are vLLM's. Repetition counts tokens of prompt and output, presence and frequency
those of the output only; a banned sequence is one of the output, whatever the prompt ends with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.api import Sampling


def changes_logits(sampling: Sampling, output_length: int) -> bool:
    """Whether `apply` would do anything for an output of this many tokens or more."""
    s = sampling
    return s.alters and bool(
        s.logit_bias or s.bad_sequences or output_length < s.min_tokens or s.penalises
    )


def apply(
    logits: Tensor,
    sampling: Sampling,
    context: Sequence[int],
    prompt_len: int,
    drafts: Sequence[int],
) -> None:
    """Changes logits fp32 [1 + len(drafts), vocab] in place; row i follows `context` and the first
    i draft tokens.
    """
    ids, device = [*context, *drafts], logits.device
    penalties = None
    if sampling.penalises:
        known = torch.tensor(ids, dtype=torch.int64, device=device)
        penalties = _Penalties(sampling, known, len(context), prompt_len)
    bias = _bias(sampling, device)
    for i, row in enumerate(logits):
        length = len(context) + i
        if banned := _banned(sampling, ids, length, length - prompt_len):
            row[banned] = -math.inf
        if bias is not None:
            row[bias[0]] += bias[1]
        if penalties is not None:
            penalties.apply(row)
            if i < len(drafts):
                penalties.count(i)


def _bias(sampling: Sampling, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not sampling.logit_bias:
        return None
    ids, values = zip(*sampling.logit_bias, strict=True)
    added = torch.tensor(values, dtype=torch.float32, device=device)
    return torch.tensor(ids, device=device), added


def _banned(sampling: Sampling, ids: Sequence[int], length: int, output: int) -> list[int]:
    """Ids that may not follow ids[:length], of which the last `output` are no prompt."""
    banned = list(sampling.stop_ids) if output < sampling.min_tokens else []
    for sequence in sampling.bad_sequences:
        *before, last = sequence
        if len(before) <= max(0, output) and list(ids[length - len(before) : length]) == before:
            banned.append(last)
    return banned


class _Penalties:
    """Counts over the distinct tokens of context and drafts, in front of one row after another."""

    def __init__(self, sampling: Sampling, ids: Tensor, context_len: int, prompt_len: int) -> None:
        """ids int64 [n]: a context of `context_len` tokens, then the drafts."""
        self._sampling = sampling
        self._ids, where = torch.unique(ids, return_inverse=True)
        self._drafts = where[context_len:]
        self._seen = torch.zeros_like(self._ids, dtype=torch.bool)
        self._seen[where[:context_len]] = True
        output = where[prompt_len:context_len]
        self._output = torch.bincount(output, minlength=len(self._ids)).to(torch.float32)

    def count(self, draft: int) -> None:
        """The rows from here on follow this draft token too."""
        place = self._drafts[draft]
        self._seen[place] = True
        self._output[place] += 1

    def apply(self, row: Tensor) -> None:
        s, values = self._sampling, row[self._ids]
        repeated = torch.where(
            values > 0, values / s.repetition_penalty, values * s.repetition_penalty
        )
        values = torch.where(self._seen, repeated, values)
        values -= s.frequency_penalty * self._output
        values -= s.presence_penalty * (self._output > 0)
        row[self._ids] = values
