from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from specwire.errors import Reason, SpecwireError
from specwire.observe import counter, gauge, histogram, metrics_server, setup_logging, timed


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


def test_logs_are_json_lines(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("target", "info")
    log = logging.getLogger("a.b")
    log.debug("hidden")
    log.info("opened %d\nsessions", 2, extra={"session": 7, "odd": object})
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    first, second = lines
    assert first["message"] == "opened 2\nsessions" and first["session"] == 7
    assert (first["service"], first["level"], first["logger"]) == ("target", "info", "a.b")
    assert first["time"].endswith("Z")
    assert "ValueError: boom" in second["exception"]


def test_unknown_level_is_a_typed_error() -> None:
    with pytest.raises(SpecwireError, match="'loud'") as caught:
        setup_logging("x", "loud")
    assert caught.value.reason is Reason.SETTINGS_INVALID


async def test_metrics_are_served() -> None:
    registry = CollectorRegistry()
    counter("steps", "Steps.", ["kind"], registry=registry).labels("verify").inc(3)
    gauge("pages_free", "Free pages.", registry=registry).set(5)
    spent = histogram("step_seconds", "Time of a step.", registry=registry)
    with timed(spent.observe):
        pass
    server = metrics_server(0, registry=registry)
    url = f"http://127.0.0.1:{server.port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = (await asyncio.to_thread(lambda: opener.open(url).read())).decode()
    assert 'specwire_steps_total{kind="verify"} 3.0' in text
    assert "specwire_pages_free 5.0" in text and "specwire_step_seconds_count 1.0" in text
    with pytest.raises(SpecwireError) as caught:
        metrics_server(server.port, registry=registry)
    assert caught.value.reason is Reason.PORT_IN_USE
    await asyncio.to_thread(server.close)
