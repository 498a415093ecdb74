"""Sampling options as both ends check them: one set of limits, refusals by field, value and what
is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2

MAX_CHOICES = 16
MAX_LOGPROBS = 20
# Prompt tokens times (1 + alternatives) of `prompt_logprobs`: about 3 MB with the tokens' texts.
MAX_PROMPT_SCORES = 100_000
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 300
MAX_BAD_SEQUENCES = 128
MAX_BAD_SEQUENCE_TOKENS = 256
# Below, logits / T would leave the range of fp32. The law is greedy's long before.
MIN_TEMPERATURE = 1e-4


def complete(given: common_pb2.Sampling, vocab_size: int) -> common_pb2.Sampling:
    """The options checked, the documented defaults filled in; only the seed may be absent.

    A temperature between 0 and 1e-4 becomes 1e-4.
    """
    temperature = _number(given, "temperature", 1.0)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SpecwireError.field("sampling.temperature", temperature, "a finite number >= 0")
    made = common_pb2.Sampling(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        top_k=given.top_k,
        top_p=_within(given, "top_p", 1.0, 0, 1, above=True),
        choice=given.choice,
        min_p=_within(given, "min_p", 0.0, 0, 1),
        repetition_penalty=_within(given, "repetition_penalty", 1.0, 0, 10, above=True),
        presence_penalty=_within(given, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=_within(given, "frequency_penalty", 0.0, -2, 2),
        min_tokens=given.min_tokens,
    )
    if given.HasField("seed"):
        made.seed = given.seed
    _check_bias(given, vocab_size)
    made.logit_bias.update(given.logit_bias)
    _check_sequences(given, vocab_size)
    made.bad_sequences.extend(given.bad_sequences)
    return made


def _number(given: common_pb2.Sampling, name: str, default: float) -> float:
    return float(getattr(given, name)) if given.HasField(name) else default


def _within(
    given: common_pb2.Sampling,
    name: str,
    default: float,
    low: float,
    high: float,
    above: bool = False,
) -> float:
    value = _number(given, name, default)
    if not low <= value <= high or (above and value == low):  # NaN too
        accepted = f"more than {low}, at most {high}" if above else f"{low} to {high}"
        raise SpecwireError.field(f"sampling.{name}", value, accepted)
    return value


def _check_bias(given: common_pb2.Sampling, vocab_size: int) -> None:
    if len(given.logit_bias) > MAX_LOGIT_BIAS:
        entries = f"{len(given.logit_bias)} entries"
        raise SpecwireError.field("sampling.logit_bias", entries, f"at most {MAX_LOGIT_BIAS}")
    check_ids(sorted(given.logit_bias), "sampling.logit_bias", vocab_size)
    for token, value in given.logit_bias.items():
        if not -100 <= value <= 100:
            raise SpecwireError.field(f"sampling.logit_bias[{token}]", value, "-100 to 100")


def _check_sequences(given: common_pb2.Sampling, vocab_size: int) -> None:
    field, sequences = "sampling.bad_sequences", given.bad_sequences
    if len(sequences) > MAX_BAD_SEQUENCES:
        accepted = f"at most {MAX_BAD_SEQUENCES}, those of bad_words included"
        raise SpecwireError.field(field, f"{len(sequences)} sequences", accepted)
    for index, sequence in enumerate(sequences):
        if not 1 <= len(sequence.ids) <= MAX_BAD_SEQUENCE_TOKENS:
            accepted = f"1 to {MAX_BAD_SEQUENCE_TOKENS} token ids"
            raise SpecwireError.field(f"{field}[{index}]", f"{len(sequence.ids)} ids", accepted)
        check_ids(sequence.ids, f"{field}[{index}].ids", vocab_size)


def check_ids(ids: Sequence[int], field: str, vocab_size: int) -> None:
    for index, token in enumerate(ids):
        if token >= vocab_size:
            accepted = f"ids below {vocab_size}, the vocabulary size"
            raise SpecwireError.field(f"{field}[{index}]", token, accepted, Reason.VOCAB_RANGE)


def check_stop_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_IDS:
        raise SpecwireError.field("stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_IDS}")
    check_ids(ids, "stop_token_ids", vocab_size)
    return tuple(ids)


def checked_logprobs(field: str, value: int) -> int:
    if value > MAX_LOGPROBS:
        raise SpecwireError.field(field, value, f"0 to {MAX_LOGPROBS} alternatives")
    return value


def checked_prompt_logprobs(value: int | None, prompt_tokens: int) -> int | None:
    """They travel in one message, which has a limit."""
    most = MAX_PROMPT_SCORES // prompt_tokens - 1
    if value is not None and value > most:
        accepted = f"0 to {most}" if most >= 0 else "absent"
        accepted += f" for a prompt of {prompt_tokens} tokens"
        raise SpecwireError.field("prompt_logprobs", value, accepted)
    return value
