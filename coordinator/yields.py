"""Whether drafting pays for all sessions of a target together: it is tried, both ways.

Each session that drafts slows down the others, through the device, the draft and the event loops;
a plain step in their company is as slow as theirs, so each finds that drafting pays, even where all
of them would be faster plain. So what all yield together is measured in windows of time: drafting
as their policies like, and now and then all plain; where plain is better, the other way round.
Trials, and what it costs that drafters follow sessions: `trials.py`. Pure: times are given.
"""

from __future__ import annotations

from coordinator.trials import BACK_S, FEW, STALE_S, Load, slack

# One session alone is in nobody's way: its policy compares the right times.
_FEWEST = 2
# Before the first window after a change what was under way ends, so many rounds and at least so
# long; a window is as many rounds at least.
_SETTLE_S, _ROUNDS = 0.03, 2
# Draft tokens are in use where a verdict brings so many tokens in the mean.
_IDLE = 1.03
# Most sessions are followed: so many of four.
_MOST = 3
# How far their mean may be from the number that they are taken for.
_OFF = 0.75


class Yields:
    """Judges one drafter at one target by the tokens of all the target's sessions.

    Sessions with a K of their own, plain ones too, are counted and never asked.
    """

    def __init__(self, leaves: bool = False) -> None:
        """`leaves`: it costs something that the drafter follows a session, which may do without."""
        self._leaves = leaves
        self._loads: dict[int, Load] = {}
        self._load: Load | None = None
        # Of the load for whose trial sessions are to be followed again, whatever the load is now.
        self._gathers: Load | None = None
        # Since when all sessions are to be followed.
        self._since: float | None = None
        # Sessions that this window is about, its beginning, and what came since.
        self._level, self._start, self._settled = 0, 0.0, False
        self._tokens, self._rounds, self._sessions = 0, 0, 0
        # Verdicts of sessions that ask, and of those with a drafter.
        self._governed, self._followed = 0, 0

    def allows(self, sessions: int) -> bool:
        """Whether a session may draft now, one of so many at the target."""
        return sessions < _FEWEST or self._drafts

    def follows(self, sessions: int) -> bool:
        """Whether the drafter is to follow a session, one of so many at the target, that opens now
        or decides on its next step. Of few each is."""
        if not self._leaves or sessions < FEW or self._gathers is not None:
            return True
        load = self._load
        if load is None or abs(sessions - self._level) > slack(self._level):
            # Loads that are only passed, while many sessions come at once, know nothing.
            bucket = sessions.bit_length()
            load = self._nearest(bucket, tried=True) or self._nearest(bucket)
        return load is None or load.follows

    def recalls(self, sessions: int, now: float) -> bool:
        """Whether the drafter is to follow a session again which is in the middle of its text: once
        that is no passing thought, since its rows have to be computed again."""
        if not (self.allows(sessions) or self._gathers is not None):
            return False  # few are followed, whether they draft or not
        return self.follows(sessions) and self._since is not None and now >= self._since + BACK_S

    @property
    def trying(self) -> bool:
        """Whether what holds now is a trial."""
        return self._load is not None and self._load.trial

    @property
    def _drafts(self) -> bool:
        return self._load is None or self._load.drafts

    def note(
        self, now: float, tokens: int, sessions: int, drafts: bool | None, follows: bool = True
    ) -> None:
        """A verdict at `now` (seconds) brought `tokens` to one of `sessions` sessions.

        `drafts`: what `allows` said when its step was decided on; None: it was not asked.
        `follows`: whether a drafter followed it then.
        """
        if sessions < _FEWEST:
            self._leave(now)
            self._since = now if self._since is None else self._since
            return
        if self._load is None or abs(sessions - self._level) > slack(self._level):
            self._enter(sessions, now)
            self._begin(now)
        elif drafts is not None and follows and (drafts != self._drafts or not self._follows):
            self._begin(now)  # it is still on what was decided before the change
        self._tokens += tokens
        self._rounds += 1
        if drafts is not None:
            self._governed += 1
            self._followed += follows
        self._sessions += sessions
        # Verdicts come in batches: whole rounds are counted, or a window's edge would cut one.
        if self._rounds % self._level == 0 and self._rounds >= _ROUNDS * self._level:
            self._whole(now)

    @property
    def _follows(self) -> bool:
        return self._gathers is not None or self._load is None or self._load.follows

    def _whole(self, now: float) -> None:
        """Whole rounds have passed: ends the window if it is long enough."""
        seconds, load = now - self._start, self._load
        assert load is not None
        over = seconds >= (load.window_s if self._settled else _SETTLE_S)
        if self._settled and not over:
            over = load.clear(self._tokens / max(seconds, 1e-9), seconds, self._rounds)
        if not over:
            return
        mean, changes = self._sessions / self._rounds, False
        if abs(mean - self._level) > _OFF:
            self._enter(round(mean), now)
            changes = True
        elif self._settled:
            changes = self._judge(now, seconds)
        self._begin(now, settled=not changes)

    def _judge(self, now: float, seconds: float) -> bool:
        """Whether the sessions go another way after this window, or are still on their way."""
        load, on_the_way = self._load, False
        assert load is not None
        before = load.drafts, load.follows
        if 2 * self._governed < self._rounds:
            # Most sessions are not asked: what the others do would drown in the noise.
            load.disturbed()
        elif load.drafts and 4 * self._followed < _MOST * self._governed:
            on_the_way = True
            load.gather(now, self._rounds / self._level)
        else:
            idle = self._tokens < _IDLE * self._rounds
            load.window(self._tokens / seconds, now, seconds, idle)
        if load.leaves and load.plain and load.trial:
            self._gathers = load
        return on_the_way or before != (load.drafts, load.follows)

    def _enter(self, sessions: int, now: float) -> None:
        """A load begins as the nearest that is known."""
        bucket = sessions.bit_length()
        self._leave(now)
        found = self._loads.get(bucket)
        if found is None:
            near = self._nearest(bucket)
            leaves = self._leaves and bucket >= FEW.bit_length()
            found = self._loads[bucket] = Load(near is not None and near.plain, leaves)
        found.enter(sessions, now)
        self._load, self._level = found, sessions

    def _nearest(self, bucket: int, tried: bool = False) -> Load | None:
        """The known load that is nearest; `tried`: of those where the other way was tried."""
        known = [at for at, load in self._loads.items() if load.tried or not tried]
        near = min(known, key=lambda at: abs(at - bucket), default=None)
        return None if near is None else self._loads[near]

    def _leave(self, now: float) -> None:
        if self._load is not None:
            self._load.leave(now)
        self._load, self._level = None, 0

    def _begin(self, now: float, *, settled: bool = False) -> None:
        self._start, self._settled = now, settled
        self._tokens, self._rounds, self._sessions = 0, 0, 0
        self._governed, self._followed = 0, 0
        gathers = self._gathers
        if gathers is not None and gathers is not self._load and now > gathers.left + STALE_S:
            self._gathers = None  # that load has not come back
            if gathers.trial:
                gathers.cut_off()
        elif gathers is not None and not gathers.trial:
            self._gathers = None
        if not self._follows:
            self._since = None
        elif self._since is None:
            self._since = now
