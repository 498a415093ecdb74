"""`python -m draft_svc`: one draft service. `--help` lists every setting."""

from __future__ import annotations

from specwire.environment import leave, loaded, prepare

prepare()  # before torch and grpc load

import asyncio
import sys
from contextlib import AsyncExitStack, closing

from draft_svc.host import DraftHost
from draft_svc.loading import load_methods
from draft_svc.settings import DraftSettings
from specwire.observe import metrics_server, setup_logging
from specwire.process import run_service, started


def _progress(line: str) -> None:
    print(f"draft: {line}", file=sys.stderr, flush=True)


async def serve(stop: asyncio.Event) -> None:
    settings = DraftSettings.load()
    setup_logging("draft", settings.log_level)
    host = DraftHost(
        lambda: load_methods(settings, _progress),
        address=settings.address,
        limits=settings.limits(),
        default_method=settings.chosen_default,
        push_address=settings.push_address,
        reflection=settings.reflection,
        drain_s=settings.drain_ms / 1000,
        stopped=stop.is_set,
        busy_poll_us=settings.busy_poll_us,
    )
    async with AsyncExitStack() as stack:
        if settings.metrics_port:
            registry = host.metrics.registry
            stack.enter_context(closing(metrics_server(settings.metrics_port, registry=registry)))
        if await started(stop, stack.enter_async_context(host)):
            loaded()
            _progress(f"ready at {host.address}")
            await stop.wait()


if __name__ == "__main__":
    run_service(serve)
    leave()
