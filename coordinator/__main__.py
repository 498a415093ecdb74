"""`python -m coordinator`: the coordinator alone. `--help` lists every setting."""

from __future__ import annotations

from specwire.environment import leave, loaded, prepare

prepare()  # before grpc loads

import asyncio
import sys

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from specwire.observe import metrics_server, setup_logging
from specwire.process import run_service


async def serve(stop: asyncio.Event) -> None:
    settings = CoordinatorSettings.load()
    setup_logging("coordinator", settings.log_level)
    host, port = CoordinatorHost(settings), settings.metrics_port
    metrics = metrics_server(port, registry=host.metrics.registry) if port else None
    try:
        async with host:
            loaded()
            print(f"coordinator: listening at {host.address}", file=sys.stderr, flush=True)
            await stop.wait()
    finally:
        if metrics is not None:
            metrics.close()


if __name__ == "__main__":
    run_service(serve)
    leave()
