"""The embedded default as child processes on UNIX sockets: target, draft and coordinator, or target
and coordinator with the draft in the target's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.own_folder import OwnFolder
from coordinator.signals import STOPS, at_signals
from specwire.errors import Reason, SpecwireError
from specwire.rpc import SOCKET_PATH_BYTES, channel_options
from specwire.v1 import generate_pb2, generate_pb2_grpc

Progress = Callable[[str], None]
START_TIMEOUT_S = 600.0  # where no kernel was compiled before it takes minutes
STOP_GRACE_S = 8.0
# A draft service that ends is started so many times, counted anew once it ran for so long.
_RESTARTS, _STEADY_S = 3, 60.0
LOG_TAIL_LINES = 5
# What `--colocate` takes where nothing is said: the default of a draft service too.
COLOCATED_METHOD = "dflash"
# What the default draft service hosts.
OWN_METHODS = ("ngram", "hybrid", "dspark", "dflash")
# Packages register the drafters that can live in a target's process here; only names are read.
DRAFTERS = "specwire.drafters"


@dataclass(frozen=True)
class LocalOptions:
    model: str = "default"
    draft: str = "default"
    exactness: str = "exact"
    threads: int = 0
    # Method of the draft where it is in the target's process; empty: it has a service of its own.
    colocate: str = ""
    # Where the coordinator listens; empty: a private UNIX socket.
    listen: str = ""
    # More flags for a service, by module: tests use them.
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def flags_of(self, module: str) -> list[str]:
        return [flag for name, flags in self.extra if name == module for flag in flags]


@dataclass
class Child:
    module: str
    address: str
    flags: list[str]
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return {"target_svc": "target", "draft_svc": "draft"}.get(self.module, self.module)

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if line.strip()][-LOG_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in kept)


class LocalDeployment:
    """Use as a context manager: leaving it always stops the children."""

    def __init__(
        self, options: LocalOptions | None = None, progress: Progress = lambda line: None
    ) -> None:
        self.options = options or LocalOptions()
        self.children: dict[str, Child] = {}
        self._progress = progress
        self._folder = OwnFolder()
        self.address = self.options.listen or self._socket("coordinator")
        self.target_address = self._socket("target")
        self.draft_address = self._socket("draft")
        self._restarts, self._restarted = 0, 0.0

    @property
    def logs(self) -> Path:
        """Folder of the services' logs, which goes with the deployment."""
        return self._folder.path

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all at once, since they load side by side, and waits until they serve."""
        began = time.monotonic()
        draft = () if self.options.colocate else ("draft_svc",)
        for module in ("target_svc", *draft, "coordinator"):
            self.spawn(module)
        for child in list(self.children.values()):
            self._wait_serving(child, began + START_TIMEOUT_S)
            self._progress(f"{child.name} ready after {time.monotonic() - began:.1f} s")
        self._wait_workers(began + START_TIMEOUT_S)

    def spawn(self, module: str) -> Child:
        """Starts one service. Main thread only: a child ends with the thread that started it."""
        address, flags = self._command(module)
        log = self.logs / f"{module}.log"
        command = [sys.executable, "-m", "coordinator.child", str(os.getpid()), module, *flags]
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=child_environment(self.options.threads),
                start_new_session=True,  # a terminal's Ctrl-C reaches us only; we stop in order
            )
        child = Child(module, address, flags, log, process)
        self.children[module] = child
        return child

    def restart(self, module: str) -> Child:
        """Starts a service that has ended at its old address, and waits until it serves."""
        child = self.spawn(module)
        self._wait_serving(child, time.monotonic() + START_TIMEOUT_S)
        return child

    def mend(self) -> None:
        """As `check`, but a draft service that has ended costs speed only: it is started again, and
        left away where it ends again and again. Main thread only."""
        draft = self.children.get("draft_svc")
        if draft is not None and (ended := _ended(draft)):
            now = time.monotonic()
            self._restarts = 1 if now > self._restarted + _STEADY_S else self._restarts + 1
            self._restarted = now
            if self._restarts > _RESTARTS:
                del self.children["draft_svc"]
                self._progress(f"{ended}\nthe draft stays away; all go on without it")
            else:
                self.spawn("draft_svc")
                self._progress(f"{ended}\nthe draft starts again")
        self.check()

    def check(self) -> None:
        """Raises when a child has ended: name, status and the end of its log."""
        for child in self.children.values():
            if ended := _ended(child):
                raise SpecwireError(Reason.ENGINE_DOWN, ended)

    def stop(self) -> None:
        """Coordinator first, so that no session loses a worker under it. A signal meanwhile ends
        the children at once, and does nothing else. Main thread only."""
        with at_signals(self._kill, *STOPS):
            for child in reversed(list(self.children.values())):
                self._end(child)
            self.children.clear()
            self._folder.remove()

    def _kill(self) -> None:
        for child in list(self.children.values()):
            child.process.kill()

    def _end(self, child: Child) -> None:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
        try:
            child.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()

    def _socket(self, name: str) -> str:
        path = self._folder.path / f"{name}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            self._folder.remove()
            raise SpecwireError.field("TMPDIR", str(path.parent), "a path short enough for sockets")
        return f"unix:{path}"

    def _command(self, module: str) -> tuple[str, list[str]]:
        options, threads = self.options, str(self.options.threads)
        if module == "target_svc":
            address = self.target_address
            flags = ["--model", options.model, "--exactness", options.exactness]
            flags += ["--threads", threads]
            if options.colocate:
                flags += ["--colocate", options.colocate, "--draft-checkpoint", options.draft]
            else:
                flags += ["--push-allow", self.draft_address, "--warm-draft", options.draft]
        elif module == "draft_svc":
            address = self.draft_address
            flags = ["--draft", options.draft, "--target", options.model, "--threads", threads]
        else:
            address = self.address
            flags = ["--target", self.target_address]
            if not options.colocate:
                flags += ["--draft", self.draft_address]
        return address, ["--address", address, *flags, *options.flags_of(module)]

    def _wait_serving(self, child: Child, deadline: float) -> None:
        self._progress(f"{child.name} loading")
        with grpc.insecure_channel(child.address, options=channel_options(link=False)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not _serving(stub):
                self._pause(child.name, deadline)

    def _wait_workers(self, deadline: float) -> None:
        """The coordinator serves once it has a target; wait for its draft too."""
        with grpc.insecure_channel(self.address, options=channel_options(link=False)) as channel:
            stub = generate_pb2_grpc.GenerationServiceStub(channel)
            request = generate_pb2.GenerationServiceGetInfoRequest()
            while True:
                info = stub.GetInfo(request, timeout=10)
                states = [worker.state for worker in info.workers]
                if states and "connecting" not in states:
                    break
                self._pause("coordinator's link", deadline)
        for worker in info.workers:
            if worker.state != "ready" or worker.reason:
                self._progress(f"{worker.role} is {worker.state}: {worker.reason}")

    def _pause(self, name: str, deadline: float) -> None:
        self.check()
        if time.monotonic() > deadline:
            text = f"the {name} was not ready after {START_TIMEOUT_S:.0f} s"
            raise SpecwireError(Reason.ENGINE_DOWN, text)
        time.sleep(0.05)


def _ended(child: Child) -> str:
    """How it ended and the end of its log; empty while it runs."""
    status = child.process.poll()
    if status is None:
        return ""
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"the {child.name} ended with {how}:\n{child.tail()}"


def _serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def child_environment(threads: int) -> dict[str, str]:
    """Three processes share the cores: a waiting OpenMP thread must sleep, not spin."""
    cores = str(threads or len(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": cores,
        "PYTHONUNBUFFERED": "1",
    }


def colocatable() -> list[str]:
    """Methods of the drafters that are installed for a target's process."""
    return sorted(point.name for point in metadata.entry_points(group=DRAFTERS))


def parse_extra(values: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """`target.kv-memory-mb=256` as the flag `--kv-memory-mb=256` of the target."""
    rooms = {"target": "target_svc", "draft": "draft_svc", "coordinator": "coordinator"}
    found = []
    for value in values:
        name, equals, given = value.partition("=")
        room, dot, flag = name.partition(".")
        if not (equals and dot and flag and room in rooms):
            raise SpecwireError.field("--set", value, "target|draft|coordinator.FLAG=VALUE")
        found.append((rooms[room], (f"--{flag}={given}",)))
    return tuple(found)
