"""`python -m target_svc`: one target service, from settings to the end of its draining."""

from __future__ import annotations

import asyncio
from functools import partial

from specwire.environment import loaded, prepare

prepare()  # before torch and grpc load

from specwire.observe import metrics_server, setup_logging
from specwire.serve import run_service
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
        await app.start(stop.is_set)
        loaded()
        await app.wait(stop)
    finally:
        await app.stop()
        if metrics is not None:
            metrics.close()


def main() -> None:
    run_service(serve)


if __name__ == "__main__":
    main()
