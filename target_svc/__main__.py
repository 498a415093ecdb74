"""`python -m target_svc`: one target service, from settings to the end of its draining."""

from __future__ import annotations

from specwire.environment import leave, loaded, prepare

prepare()  # before torch and grpc load

import asyncio
from functools import partial

from specwire.observe import metrics_server, setup_logging
from specwire.process import run_service, started
from target_svc.app import TargetApp
from target_svc.drafters import find_drafter
from target_svc.engines.native import load_native
from target_svc.settings import TargetSettings


async def serve(stop: asyncio.Event) -> None:
    settings = TargetSettings.load()
    setup_logging("target", settings.log_level)
    drafter = find_drafter(settings)
    load = partial(load_native, drafter=drafter, stopped=stop.is_set)
    app = TargetApp(settings, load, drafter)
    metrics = None
    if settings.metrics_port:
        metrics = metrics_server(settings.metrics_port, registry=app.metrics.registry)
    try:
        if await started(stop, app.start(stop.is_set)):
            loaded()
            await app.wait(stop)
    finally:
        await app.stop()
        if metrics is not None:
            metrics.close()


if __name__ == "__main__":
    run_service(serve)
    leave()
