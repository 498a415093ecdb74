"""`specwire info`: what serves, with which models, methods and attention backends."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from coordinator import options as opt
from coordinator.bench_report import console
from coordinator.drafters import COLOCATED
from specwire.client import Client, ServerInfo
from specwire.info import WorkerState


def info(
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as one JSON object.")] = False,
    address: opt.Address = "",
) -> None:
    """Show what a coordinator serves: model, workers, drafters, attention backends and why.

    Examples:

    \b
      specwire info
      specwire info --address 127.0.0.1:7070 --json
    """
    with opt.coordinator_address(address) as found, Client(found) as client:
        server = client.info()
    if as_json:
        print(json.dumps(asdict(server)))
        return
    out = console()
    out.print(model_table(server))
    out.print(worker_table(server))
    for line in notes(server):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def notes(server: ServerInfo) -> list[str]:
    """What does not fit into a table: addresses, and why something is not in use."""
    lines = []
    for worker in server.workers:
        role = _role(worker)
        lines.append(f"{role}: {worker.address}")
        if worker.reason:
            lines.append(f"{role}: {worker.reason}")
        for name, reasons in worker.attention.candidates.items():
            if reasons:
                lines.append(f"{role}: {name} not in use: {'; '.join(reasons)}")
        lines += [f"{role}: {note}" for note in worker.attention.notes]
    return lines


def _role(worker: WorkerState) -> str:
    """A draft in the target's process says so: it has that target's address, and its sessions."""
    return f"{worker.role}, co-located" if worker.placement == COLOCATED else worker.role


def model_table(server: ServerInfo) -> Table:
    model = server.model
    table = Table(title=f"specwire {server.version}", title_justify="left", show_header=False)
    rows = {
        "model": model.name,
        "fingerprint": model.fingerprint[:16],
        "size": f"{model.layer_count} layers x {model.hidden_size}, {model.vocab_size} tokens",
        "longest session": f"{model.max_length_tokens} tokens",
        "methods": ", ".join(server.methods),
        "default": f"{server.default_method}, "
        f"K={server.default_num_speculative_tokens or 'adaptive'}, "
        f"{server.default_exactness}",
        "contract levels": ", ".join(server.contract_levels),
        "protocol": ".".join(map(str, server.protocol)),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def worker_table(server: ServerInfo) -> Table:
    table = Table(title="workers", title_justify="left")
    for header in ("role", "state", "load", "device", "methods", "attention", "KV"):
        table.add_column(header, overflow="fold")
    for worker in server.workers:
        report = worker.attention
        kv = f"{report.kv_dtype}, {report.kv_bytes_per_token} B/token" if report.kv_dtype else "-"
        methods = ", ".join(worker.methods) or "-"
        chosen = "-"
        if report.chosen:
            chosen = f"{report.chosen} ({report.policy}), CUDA graphs {report.graph_mode}"
        load = f"{worker.sessions} sessions, {worker.waiting} waiting"
        if worker.pages_total:
            load += f", {worker.pages_free}/{worker.pages_total} pages free"
        table.add_row(_role(worker), worker.state, load, worker.device, methods, chosen, kv)
    return table
