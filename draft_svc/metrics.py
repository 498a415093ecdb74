"""Counters of a draft service, in their own registry unless one is given: two services may share a
process.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from specwire.observe import counter, histogram


class Metrics:
    """What happened, by cause where causes differ."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._events = counter(
            "draft_events", "Items dropped or refused, by cause", ["cause"], self.registry
        )
        self._proposed = counter("draft_tokens", "Tokens proposed", ["method"], self.registry)
        self._cached = counter(
            "draft_cached_rows", "Rows that the cache had", ["method"], self.registry
        )
        self._seconds = histogram(
            "draft_propose_seconds", "Time of one batched proposal", ["method"], self.registry
        )

        # By method; looked up once, since with many sessions a round counts hundreds of times.
        self._of_method: dict[str, tuple[Counter, Histogram]] = {}

    def event(self, cause: str) -> None:
        self._events.labels(cause).inc()

    def proposed(self, method: str, tokens: int, seconds: float) -> None:
        found = self._of_method.get(method)
        if found is None:
            found = self._proposed.labels(method), self._seconds.labels(method)
            self._of_method[method] = found
        found[0].inc(tokens)
        found[1].observe(seconds)

    def cached(self, method: str, rows: int) -> None:
        self._cached.labels(method).inc(rows)

    def value(self, name: str, **labels: str) -> float:
        """The current value of a counter: `value("events", cause="stale_step")`."""
        return self.registry.get_sample_value(f"specwire_draft_{name}_total", labels) or 0.0
