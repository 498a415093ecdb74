"""`deploy/compose.yaml` as data, its variables filled in, and its services as processes here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_ADDRESS = re.compile(r"\b(?:0\.0\.0\.0|127\.0\.0\.1|target|draft|coordinator):(\d+)\b")


def load(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file; `${NAME:-default}` is replaced inside values, as Compose does."""
    return _filled(yaml.safe_load(FILE.read_text()), variables or {})


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda m: variables.get(m[1]) or m[2] or "", value)
    return value


def of_profile(document: Mapping[str, Any], profile: str) -> dict[str, Any]:
    return {n: s for n, s in document["services"].items() if profile in s["profiles"]}


class LocalServices:
    """The services of one profile as processes: own ports, and folders for the volumes.

    Environment, commands, health checks and order are the file's; PATH and PYTHONPATH stand for
    what the image installs.
    """

    def __init__(self, services: Mapping[str, Any], folders: Mapping[str, Path]) -> None:
        self.services, self._folders = services, folders
        self._ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def here(self, text: str) -> str:
        """A text of the file with its addresses and paths as they are on this machine."""
        text = _ADDRESS.sub(lambda m: f"127.0.0.1:{self._port(m[1])}", text)
        for inside, outside in self._folders.items():
            text = text.replace(inside, str(outside))
        return text

    def _port(self, inside: str) -> int:
        if inside not in self._ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._ports[inside] = free.getsockname()[1]
        return self._ports[inside]

    def _environment(self, name: str) -> dict[str, str]:
        given = self.services[name]["environment"]
        path = f"{ROOT / 'proto'}:{ROOT}"
        base = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "GRPC_VERBOSITY": "ERROR"}
        return base | {key: self.here(str(value)) for key, value in given.items()}

    def _command(self, words: list[str]) -> list[str]:
        assert words[0] == "python"
        return [sys.executable, *map(self.here, words[1:])]

    def start(self, name: str, timeout_s: float = 90) -> None:
        """Starts a service and what it depends on: it waits for their health, they for nobody."""
        needed = self.services[name].get("depends_on", {})
        assert all(how["condition"] == "service_healthy" for how in needed.values())
        for other in needed:
            self._spawn(other)
        for other in needed:
            self._until_healthy(other, timeout_s)
        self._spawn(name)
        self._until_healthy(name, timeout_s)

    def _spawn(self, name: str) -> None:
        self.processes[name] = subprocess.Popen(
            self._command(self.services[name]["command"]),
            env=self._environment(name),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _until_healthy(self, name: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.healthy(name):
            assert self.processes[name].poll() is None, self.processes[name].communicate()[0]
            assert time.monotonic() < deadline, f"{name} was not healthy after {timeout_s} s"

    def healthy(self, name: str) -> bool:
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        done = subprocess.run(
            self._command(words), env=self._environment(name), capture_output=True, timeout=30
        )
        return done.returncode == 0

    def stop(self) -> dict[str, int]:
        """Ends them as Compose does, dependents first: exit status by name, in that order."""
        statuses = {}
        for name, process in reversed(self.processes.items()):
            process.send_signal(signal.SIGTERM)
            grace_s = int(self.services[name]["stop_grace_period"].removesuffix("s"))
            try:
                process.communicate(timeout=grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            statuses[name] = process.returncode
        self.processes.clear()
        return statuses
