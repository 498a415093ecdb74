"""One choice's answer: from verdicts to deltas and the final message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.text import TextModel, TextStream
from specwire.v1 import common_pb2, generate_pb2, target_pb2

_STOPPED = common_pb2.FINISH_REASON_STOP_TOKEN
# Tokens of a delta after which it takes in no further verdict. Each may have 20 alternatives with
# their text, and a message of the public API has 4 MiB.
_DELTA_TOKENS = 256


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What of a checked request shapes its answer, or is only said again at its end."""

    sampling: common_pb2.Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    bad_words: tuple[str, ...] = ()
    exactness: common_pb2.Exactness = common_pb2.EXACTNESS_UNSPECIFIED
    margins: bool = False
    return_ids: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    request_id: str = ""


class Answer:
    def __init__(self, spec: AnswerSpec, model: TextModel) -> None:
        self._spec, self._model = spec, model
        self._text = TextStream(
            model, spec.stops, min_tokens=spec.sampling.min_tokens, include_stop=spec.include_stop
        )
        self._cached_tokens = 0
        self._prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        # Tokens that belong to the answer, and the stop string that ended it.
        self.tokens, self.stop = 0, ""
        # The delta that is being made: its text so far, its tokens, those of them that have no text
        # yet; and the tokens at its beginning that the draft proposed.
        self._delta = generate_pb2.Delta()
        self._pieces: list[str] = []
        self._chars = self._count = 0
        self._unsaid: list[int] = []

    def add(self, verdict: target_pb2.Verdict, done: bool) -> None:
        """Takes in a verdict. Behind a stop string nothing of it belongs to the answer."""
        if verdict.step_id == 0 and not self.tokens:
            self._cached_tokens = verdict.cached_tokens
            self._prompt_logprobs = self._spelled(verdict.prompt_logprobs)
        tokens, accepted = list(verdict.tokens), verdict.accepted
        count = len(tokens)
        if accepted or done or self._spec.stops:
            count = self._say(tokens, accepted, done, verdict.finish)
        else:
            self._unsaid += tokens  # decoded at once with those that follow
        self.tokens += count
        self._count += count
        # Only what there is: most verdicts have neither margins nor log probabilities.
        if self._spec.return_ids:
            self._delta.token_ids.extend(tokens[:count])
        if margins := verdict.margins:
            self._delta.margins.extend(margins[:count])
        if logprobs := verdict.logprobs:
            self._delta.logprobs.extend(self._spelled(logprobs[:count]))

    @property
    def full(self) -> bool:
        """Whether the delta is to have no further verdict: with log probabilities it is large."""
        return self._count >= _DELTA_TOKENS

    def take(self) -> generate_pb2.Delta | None:
        """What the verdicts since the last call brought; None: nothing that is to be sent."""
        self._say_rest()
        delta = self._delta
        delta.text = "".join(self._pieces)
        self._delta, self._pieces = generate_pb2.Delta(), []
        self._chars = self._count = 0
        has = delta.text or delta.token_ids or delta.margins or delta.logprobs
        return delta if has else None

    def _say(self, tokens: list[int], accepted: int, done: bool, finish: int) -> int:
        """Makes the text of one verdict; how many of its tokens belong to the answer."""
        self._say_rest()
        silent = int(done and finish == _STOPPED and not self._spec.include_stop)
        piece = self._text.push(tokens, accepted, last=done, silent=silent)
        self.stop = piece.stop
        if accepted:
            accepted = min(accepted, piece.tokens)
            if self._count:
                self._delta.later_accepted.add(
                    start=self._count,
                    count=accepted,
                    start_char=self._chars,
                    chars=piece.accepted_chars,
                )
            else:
                self._delta.accepted_count = accepted
                self._delta.accepted_chars = piece.accepted_chars
        self._keep(piece.text)
        return piece.tokens

    def _say_rest(self) -> None:
        if self._unsaid:
            self._keep(self._text.push(self._unsaid, 0, last=False).text)
            self._unsaid = []

    def _keep(self, text: str) -> None:
        self._pieces.append(text)
        self._chars += len(text)

    def _spelled(
        self, scored: Iterable[common_pb2.TokenLogprobs]
    ) -> list[common_pb2.TokenLogprobs]:
        """With the text of each token."""
        made = list(scored)
        for token in made:
            token.text = self._model.token_text(token.token_id)
            for other in token.top:
                other.text = self._model.token_text(other.token_id)
        return made

    def finished(
        self,
        verdict: target_pb2.Verdict,
        prompt_tokens: int,
        acceptance: generate_pb2.AcceptanceRecord,
    ) -> generate_pb2.Finished:
        """The final message after the last verdict; it repeats all that was applied."""
        spec = self._spec
        reason = common_pb2.FINISH_REASON_STOP_STRING if self.stop else verdict.finish
        return generate_pb2.Finished(
            reason=reason,
            stop_string=self.stop,
            stop_token_id=verdict.tokens[-1] if reason == _STOPPED else None,
            usage=generate_pb2.Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=self.tokens,
                cached_prompt_tokens=self._cached_tokens,
            ),
            acceptance=acceptance,
            sampling=spec.sampling,
            request_id=spec.request_id,
            exactness=spec.exactness,
            max_tokens=spec.max_tokens,
            stop=spec.stops,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
            bad_words=spec.bad_words,
            priority=spec.priority,
            prompt_logprobs=self._prompt_logprobs,
        )
