"""Logs as JSON lines, metrics for Prometheus. Needs the `serve` extra."""

from __future__ import annotations

import errno
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)

from specwire.errors import Reason, SpecwireError

_PREFIX = "specwire_"
# A link exchange takes tenths of a millisecond, a large prefill seconds.
_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line; what is passed as `extra` becomes fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logging(service: str, level: str = "INFO") -> None:
    """Sends this process's logs to standard error."""
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        accepted = "debug, info, warning, error or critical"
        raise SpecwireError.field("log_level", level, accepted, Reason.SETTINGS_INVALID)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(names[level.upper()])


def counter(
    name: str, text: str, labels: Sequence[str] = (), registry: CollectorRegistry = REGISTRY
) -> Counter:
    return Counter(_PREFIX + name, text, labels, registry=registry)


def gauge(
    name: str, text: str, labels: Sequence[str] = (), registry: CollectorRegistry = REGISTRY
) -> Gauge:
    return Gauge(_PREFIX + name, text, labels, registry=registry)


def histogram(
    name: str, text: str, labels: Sequence[str] = (), registry: CollectorRegistry = REGISTRY
) -> Histogram:
    """A histogram of seconds."""
    return Histogram(_PREFIX + name, text, labels, buckets=_BUCKETS_S, registry=registry)


@contextmanager
def timed(observe: Callable[[float], None]) -> Iterator[None]:
    """Passes the seconds that the block took to `observe`, whether it raised or not."""
    start = time.perf_counter()
    try:
        yield
    finally:
        observe(time.perf_counter() - start)


class MetricsServer:
    """A running /metrics endpoint, in a thread of its own: the loop stays gRPC's."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics_server(
    port: int, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY
) -> MetricsServer:
    """Serves the metrics over HTTP; port 0 takes a free one."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"metrics port {port} is in use by another process"
            raise SpecwireError(Reason.PORT_IN_USE, text, {"port": str(port)}) from error
        accepted = "a port and an address of this machine"
        raise SpecwireError.field(
            "metrics_port", port, accepted, Reason.SETTINGS_INVALID
        ) from error
    return MetricsServer(server, thread)
