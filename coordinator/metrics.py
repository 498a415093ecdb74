"""What /metrics says about this coordinator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from coordinator.record import countable
from specwire.observe import counter, gauge, histogram
from specwire.v1 import generate_pb2


class Metrics:
    """One registry per coordinator, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.sessions = gauge("coordinator_sessions", "Requests running", registry=registry)
        self._requests = counter(
            "coordinator_requests",
            "Requests by method and outcome",
            ("method", "outcome"),
            registry,
        )
        self._tokens = counter(
            "coordinator_tokens", "Tokens sent to clients, by who chose them", ("origin",), registry
        )
        self._fallbacks = counter(
            "coordinator_fallbacks", "Rounds without a proposal, by cause", ("cause",), registry
        )
        self._causes: set[str] = set()
        self._ttft = histogram(
            "coordinator_first_token_seconds", "Time to the first token", registry=registry
        )
        # Told of each wait, in seconds; a session that reads at once counts nothing.
        self.waited_for_turn = histogram(
            "coordinator_turn_wait_seconds",
            "Waits of verdicts of runs ahead for their session's turn to be read",
            registry=registry,
        ).observe

    def finished(self, done: generate_pb2.Finished) -> None:
        record, tokens = done.acceptance, done.usage.completion_tokens
        self._requests.labels(record.method, "ok").inc()
        accepted = min(record.accepted_tokens, tokens)
        self._tokens.labels("draft").inc(accepted)
        self._tokens.labels("target").inc(tokens - accepted)
        self._ttft.observe(record.ttft_ms / 1000)

    def failed(self, method: str, outcome: str) -> None:
        self._requests.labels(method, outcome).inc()

    def fell_back(self, cause: str, rounds: int) -> None:
        cause = countable(cause, self._causes)
        self._causes.add(cause)
        self._fallbacks.labels(cause).inc(rounds)
