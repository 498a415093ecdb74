"""Counters of the target service, in a registry of their own: a process may hold two services."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from specwire.observe import counter, gauge, histogram

_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """What happened, by cause where causes differ."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._dropped = self._counter("dropped", "Items and draft ids not used", ["cause"])
        self._refused = self._counter("refused", "Items answered with an error", ["reason"])
        self._tokens = self._counter("tokens", "Tokens committed", ["source"])
        self._rows = self._counter("row_bytes", "Bytes of hidden-state rows", ["outcome"])
        self._verdicts = self._counter("verdicts", "Steps answered", ["kind"])
        # Looked up once: with many sessions a step counts hundreds of times.
        self._drafted, self._own = self._tokens.labels("draft"), self._tokens.labels("target")
        self._kinds = {kind: self._verdicts.labels(kind) for kind in ("open", "verify")}
        self._failures = self._counter("engine_failures", "Engine steps that raised", [])
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, by where from", ["source"])
        self._preempted = self._counter("preemptions", "Sessions that gave their pages away", [])
        self._state = gauge(
            "target_state", "Pages and sessions now", ["state"], registry=self.registry
        )
        self._items = Histogram(
            "specwire_target_step_items",
            "Sessions in one engine step",
            buckets=_ITEMS,
            registry=self.registry,
        )
        self._step = histogram(
            "target_step_seconds", "Time of one engine step", registry=self.registry
        )

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return counter(f"target_{name}", text, labels, registry=self.registry)

    def dropped(self, cause: str, count: int = 1) -> None:
        self._dropped.labels(cause).inc(count)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def step(self, items: int, seconds: float) -> None:
        self._items.observe(items)
        self._step.observe(seconds)

    def verdicts(self, opens: int, verifies: int, drafted: int, own: int) -> None:
        """Steps answered, and their tokens by who chose them."""
        for counted, count in (
            (self._kinds["open"], opens),
            (self._kinds["verify"], verifies),
            (self._drafted, drafted),
            (self._own, own),
        ):
            if count:
                counted.inc(count)

    def prompt(self, cached: int, run: int) -> None:
        self._prompt.labels("cache").inc(cached)
        self._prompt.labels("run").inc(run)

    def preempted(self) -> None:
        self._preempted.inc()

    def state(self, **values: int) -> None:
        for name, value in values.items():
            self._state.labels(name).set(value)

    def rows(self, outcome: str, size: int) -> None:
        """`outcome` is sent, overflow, lost (the stream broke) or refused (by the draft)."""
        self._rows.labels(outcome).inc(size)

    def engine_failure(self) -> None:
        self._failures.inc()

    def value(self, name: str, **labels: str) -> float:
        """The current value of a counter: `value("dropped", cause="stale_step")`."""
        return self.registry.get_sample_value(f"specwire_target_{name}_total", labels) or 0.0
