"""What a round costs the host, without a GPU: CPU time of each service's threads, by session.

    python -m tests.load.host_cost --sessions 1,8,32,128 --modes plain,colocated,separate

Forwards cost nothing but a pause (`free_model`), so what is counted is Python and gRPC:
microseconds of CPU for each session and round in the engine's thread, the event loop and the other
threads of the target, the draft service, the coordinator and the clients (--clients processes), and
for each token in each process. CPU time tells the truth on a busy machine too; wall time
(milliseconds between two steps, tokens a second) does not. With --pause-ms 0 or a pause so short
that the target is never waited for, the services are as far behind as they can be. To compare two
trees, --against DIR: its services run in turn with this tree's, both with this tree's clients;
--against-env GRPC_EXPERIMENTS= compares with gRPC's event engine.

What a separate round costs outside the two forwards, at one session (wall time, on a quiet host):

    python -m tests.load.host_cost --modes separate --sessions 1 --bare --k 3 --pause-ms 1 \\
        --repeats 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests.load.stamps import outside

MODES = ("plain", "colocated", "separate")
ROOT = Path(__file__).resolve().parents[2]
SETTLE_S = 0.7
Spent = dict[str, dict[str, Any]]


class Side(NamedTuple):
    """What is compared: services of a tree, in an environment."""

    tree: Path
    env: Mapping[str, str]


class Service:
    """A child process of `host_services`."""

    def __init__(self, side: Side, role: str, address: str, *flags: str) -> None:
        tree = side.tree
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        paths = os.pathsep.join([str(tree / "proto"), str(tree), *inherited])
        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.load.host_services", role, "--address", address, *flags],
            env={**os.environ, **side.env, "PYTHONPATH": paths},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Service:
        assert self._process.stdout is not None and self._process.stdout.readline() == "up\n"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def spent(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


def start(stack: ExitStack, side: Side, mode: str, count: int, o: argparse.Namespace) -> Any:
    """Services of one mode, by name."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="specwire-"))

    def flags(name: str) -> list[str]:
        if not o.profile:
            return []
        where = f"{o.profile}/{mode}-{count}-{name}"
        return ["--profile", f"{where}-loop", "--profile-engine", f"{where}-engine"]

    def service(name: str, role: str, *more: str) -> Service:
        given = ["--sessions", str(count), "--pause-s", str(count * o.pause_ms / 1e3)]
        given += [*flags(name), *more, *(["--bare"] if o.bare else [])]
        made = Service(side, role, f"unix:{folder}/{name}", *given)
        return stack.enter_context(made)

    found = {"target": service("target", "colocated" if mode == "colocated" else "target")}
    workers = ["--target", found["target"].address]
    if mode == "separate":
        found["draft"] = service("draft", "draft")
        workers += ["--draft", found["draft"].address]
    found["coordinator"] = service("coordinator", "coordinator", *workers)
    return found


def clients(stack: ExitStack, mode: str, count: int, address: str, o: argparse.Namespace) -> Any:
    """Client processes by name; `count` sessions in all."""
    found = {}
    for number in range(min(o.clients, count)):
        mine = range(number, count, o.clients)
        asked = {
            "method": "plain" if mode == "plain" else "toy",
            "k": None if mode == "plain" else (o.k or None),
            "temperature": o.temperature,
            "prompt_tokens": o.prompt_tokens,
            "numbers": list(mine),
        }
        name = f"client{number or ''}"
        flags = ["--target", address, "--asked", json.dumps(asked)]
        if o.profile:
            flags += ["--profile", f"{o.profile}/{mode}-{count}-{name}-loop"]
        found[name] = stack.enter_context(Service(Side(ROOT, {}), "client", "", *flags))
    return found


def measure(side: Side, mode: str, count: int, o: argparse.Namespace) -> dict[str, float]:
    """Microseconds of each thread for a session and round, and facts of the steps."""
    with ExitStack() as stack:
        services = start(stack, side, mode, count, o)
        services |= clients(stack, mode, count, services["coordinator"].address, o)
        time.sleep(SETTLE_S)
        before, at = {n: s.spent() for n, s in services.items()}, time.perf_counter()
        time.sleep(o.seconds)
        after, ended = {n: s.spent() for n, s in services.items()}, time.perf_counter()
    return _figures(before, after, ended - at)


def _figures(before: Spent, after: Spent, seconds: float) -> dict[str, float]:
    def grown(name: str, what: str) -> int:
        return int(after[name].get(what, 0)) - int(before[name].get(what, 0))

    steps, items = grown("target", "steps"), max(1, grown("target", "items"))
    told = [name for name in before if name.startswith("client")]
    tokens, deltas = (max(1, sum(grown(n, w) for n in told)) for w in ("tokens", "deltas"))
    found = {"wall ms": seconds * 1e3 / max(1, steps), "items a step": items / max(1, steps)}
    found |= {"tokens/s": tokens / seconds, "tokens a delta": tokens / deltas}
    for name in before:
        spent = {t: grown(name, t) / 1e3 for t in ("engine", "loop", "others")}
        found |= {f"{name} {thread}": us / items for thread, us in spent.items() if us}
        found[f"{name} for a token"] = sum(spent.values()) / tokens
    found["target engine's step"] = grown("target", "step_ns") / 1e3 / items
    found["wall between two steps"] = grown("target", "gap_ns") / 1e3 / items
    if "draft" in after and after["target"]["items"] == after["target"]["steps"]:
        found |= outside(after["target"]["stamps"], after["draft"]["stamps"])
    return found


def print_medians(mode: str, count: int, runs: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{mode}, {count} sessions: us of CPU for a session and round, medians")
    names = list(dict.fromkeys(name for found in runs.values() for name in found[0]))
    width = max(map(len, names))
    print(" " * width + "".join(f"{label:>10}" for label in runs))
    for name in names:
        row = [statistics.median(one[name] for one in found) for found in runs.values()]
        places = 3 if " ms" in name else 1
        print(f"{name:{width}}" + "".join(f"{value:>10.{places}f}" for value in row), flush=True)


def command(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m tests.load.host_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--sessions", default="1,8,32,128", help="numbers, by commas")
    add("--modes", default=",".join(MODES))
    add("--seconds", type=float, default=3.0, help="of a run")
    add("--repeats", type=int, default=1, help="runs of each tree, in turn")
    add("--pause-ms", type=float, default=0.25, help="of a forward, for each session")
    add("--k", type=int, default=7, help="draft tokens a round; 0: adaptive")
    add("--bare", action="store_true", help="no engine's work on the host")
    add("--clients", type=int, default=1, help="client processes")
    add("--temperature", type=float, default=0.0)
    add("--prompt-tokens", type=int, default=128)
    add("--against", type=Path, help="another tree, with this tool in it")
    add("--against-env", default="", help="NAME=VALUE of the other services' environment")
    add("--profile", help="a folder: cProfile of each thread, which costs much itself")
    o = made.parse_args(argv)
    sides = {"this": Side(ROOT, {})}
    if o.against or o.against_env:
        name, _, value = o.against_env.partition("=")
        sides["against"] = Side((o.against or ROOT).resolve(), {name: value} if name else {})
    failed = 0
    for mode in o.modes.split(","):
        for count in map(int, o.sessions.split(",")):
            runs: dict[str, list[dict[str, float]]] = {label: [] for label in sides}
            try:
                for _ in range(o.repeats):
                    for label, side in sides.items():
                        runs[label].append(measure(side, mode, count, o))
            except Exception as error:  # one case must not hide the others
                print(f"{mode}, {count} sessions: {type(error).__name__}: {error}")
                failed += 1
                continue
            print_medians(mode, count, runs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command())
