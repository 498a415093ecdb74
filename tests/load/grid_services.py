"""Services of a grid of pairs, as processes: each has a name, and may be refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from coordinator.local import Child, _serving, child_environment
from coordinator.runtime_file import runtime_base
from specwire.rpc import channel_options

_STOP_S = 10.0


class NotStarted(Exception):
    """A service ended, or was not ready in time; the text is the last line it wrote. `typed`: it
    refused its settings with a typed error, anything else is a failure."""

    def __init__(self, text: str, typed: bool = False) -> None:
        super().__init__(text)
        self.typed = typed

    @property
    def told(self) -> str:
        return f"{'refused' if self.typed else 'failed'}: {self}"


class Services:
    """A context manager: leaving it stops whatever still runs."""

    def __init__(self, start_s: float, environment: dict[str, str] | None = None) -> None:
        self._start_s = start_s
        self._environment = {**child_environment(0), **(environment or {})}
        self._folder = Path(tempfile.mkdtemp(prefix="specwire-", dir=runtime_base()))
        self._running: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(list(self._running)):
            self.stop(child)
        shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self, module: str, name: str, flags: Sequence[str]) -> Child:
        """Starts a service and does not wait for it."""
        address, log = f"unix:{self._folder}/{name}.sock", self._folder / f"{name}.log"
        given = ["--address", address, *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "coordinator.child", str(os.getpid()), module, *given],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment,
                start_new_session=True,
            )
        child = Child(module, address, given, log, process)
        self._running.append(child)
        return child

    def ready(self, child: Child) -> Child:
        """Waits until it serves. Raises NotStarted."""
        deadline = time.monotonic() + self._start_s
        with grpc.insecure_channel(child.address, options=channel_options(link=False)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not _serving(stub):
                ended = child.process.poll() is not None
                if ended or time.monotonic() > deadline:
                    text = child.log.read_text(encoding="utf-8", errors="replace").strip()
                    last = text.rpartition("\n")[2]
                    self.stop(child)
                    if ended:
                        typed = last.startswith("error: ")
                        raise NotStarted(last.removeprefix("error: "), typed)
                    raise NotStarted(f"not ready within {self._start_s:.0f} s: {last}")
                time.sleep(0.05)
        return child

    def stop(self, child: Child) -> None:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
        try:
            child.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        if child in self._running:
            self._running.remove(child)
