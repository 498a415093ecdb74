"""How many draft tokens one session's rounds ask for, and how far the target runs ahead without."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.attachment import Attachment
from coordinator.offers import Choice
from coordinator.policy import KPolicy
from coordinator.record import Record
from coordinator.settings import CoordinatorSettings
from coordinator.yields import Yields

# Plain steps at a time while a drafter is expected back, so that it is noticed.
_SHORT_RUN = 8


class Plan:
    """`k` is the number of tokens a round; the most, if `adaptive`."""

    def __init__(
        self,
        attachment: Attachment,
        settings: CoordinatorSettings,
        record: Record,
        k: int,
        adaptive: bool,
    ) -> None:
        self._at, self._settings, self._record = attachment, settings, record
        self._k, self._adaptive = k, adaptive
        self._policy: KPolicy | None = None
        # Why a round is plain though the drafter is attached, and for how many more steps.
        self._why_plain, self._plain_steps = "", 0
        # The same of the steps that the target runs ahead now: the next round may be decided on.
        self._why_ahead = ""
        # Whom the session asked whether it may draft in the round that is on, and the answer.
        self._asked: Yields | None = None
        self._drafts = self._follows = True

    def begin(self) -> None:
        """The session is opened: a verdict that was awaited never comes."""
        self._why_plain, self._plain_steps, self._why_ahead = "", 0, ""
        self._asked, self._follows = None, True
        if self._at.away is not None:
            self._why_ahead = self._without(self._at.away)
        if self._policy is not None:
            self._policy.forget()

    def tokens(self, step: int, length: int, most: int) -> int:
        """Draft tokens for the step after `step`, at most `most`; counts why there are none."""
        self._why_plain, self._plain_steps, self._asked = "", 0, None
        if self._at.away is not None:
            return self._plain(self._without(self._at.away), self._settings.free_run)
        choice, self._follows = self._at.choice, True
        if choice is None or not self._at.attached:
            return 0
        limit = min(most, self._k, choice.drafter.max_draft_tokens)
        if limit <= 0:
            return 0
        longest = choice.drafter.max_length_tokens
        if longest and length + limit > longest:
            return self._plain("draft_length", self._settings.free_run)
        breaker = choice.standing.breaker
        if breaker.open:
            return self._plain("breaker_open", _SHORT_RUN)
        if self._adaptive:
            if why := self._forbidden(choice):
                return self._plain(why, self._settings.free_run)
            policy = self._policy_of()
            limit = policy.choose(step, limit, self._at.target.busy, length, self.most_ahead)
            if not limit:
                why = "does_not_pay" if policy.off else "plain_measured"
                return self._plain(why, policy.plain_steps(step))
        if not breaker.allows():
            return self._plain("breaker_open", _SHORT_RUN)
        return limit

    def cut(self, ids: list[int], said: Sequence[float], length: int) -> list[int]:
        """Leaves out the end of a proposal where the drafter is too unsure of it to pay.

        Where a request names a number of tokens it is not touched, nor in a run.
        """
        if self._policy is None or len(said) != len(ids) or not ids:
            return ids
        kept = self._policy.cut(said, self._at.target.busy, length)
        if not kept:
            self._record.fell_back("low_confidence")
        return ids[:kept]

    def _policy_of(self) -> KPolicy:
        """The session's policy, with what rounds cost at the workers that it is at now."""
        assert self._at.choice is not None
        standing, settings = self._at.choice.standing, self._settings
        shared = (self._at.target.costs, standing.costs, standing.past)
        if self._policy is None:
            start = settings.num_speculative_tokens
            self._policy = KPolicy(*shared, start, settings.free_run)
        self._policy.use(*shared)
        return self._policy

    @property
    def most_ahead(self) -> int:
        """Rounds with draft tokens that can go on by themselves."""
        at = self._at
        possible = at.direct or (at.colocated and at.target.drafts_ahead)
        return self._settings.draft_ahead if possible else 0

    def _forbidden(self, choice: Choice) -> str:
        """Why the session must not draft, for the sake of all at its target; empty: it may."""
        busy = self._at.target.busy
        self._asked = asked = self._at.yields_with(choice)
        self._drafts = asked.allows(busy)
        if self._drafts:
            return ""
        if not asked.follows(busy):
            self._at.leave()
            self._follows = False
        return "plain_measured" if asked.trying else "does_not_pay"

    def _without(self, choice: Choice) -> str:
        """Why a session goes on that this drafter does not follow: for the same reason, or since it
        has not been called back."""
        self._asked = asked = self._at.yields_with(choice)
        self._drafts = self._follows = False
        if asked.allows(self._at.target.busy):
            return "not_followed"
        return "plain_measured" if asked.trying else "does_not_pay"

    def _plain(self, why: str, steps: int) -> int:
        self._why_plain, self._plain_steps = why, steps
        self._record.fell_back(why)
        return 0

    def free_run(self) -> int:
        """Steps that the target may run ahead after the next one."""
        window, self._why_ahead = self._settings.free_run, self._why_plain
        if self._at.attached or self._at.away is not None:
            return min(window, self._plain_steps)
        return window if self._at.given_up else min(window, _SHORT_RUN)

    def ahead(self) -> int:
        """Rounds with as many tokens as were asked for last that go on by themselves."""
        self._why_ahead = ""
        most = self.most_ahead
        return most if self._policy is None else self._policy.stands(most)

    def ran_ahead(self) -> None:
        """One of the steps that `free_run` allowed has come."""
        if self._why_ahead:
            self._record.fell_back(self._why_ahead)

    def came(self, tokens: int, arrived_s: float) -> None:
        """A verdict brought so many tokens; times are those of `time.perf_counter`."""
        self._at.target.note_tokens(arrived_s, tokens, self._asked, self._drafts, self._follows)
        if self._policy is not None:
            self._policy.passed()

    def note(self, asked: int, accepted: int, *, proposed: bool) -> None:
        """How a round with draft tokens went."""
        if self._policy is not None:
            self._policy.note(asked, accepted, proposed=proposed)
