"""The commands of this room, registered through the entry-point group `specwire.commands`."""

from __future__ import annotations

import typer

from coordinator.bench import bench
from coordinator.chat import chat
from coordinator.info_view import info
from coordinator.talk import generate
from coordinator.topology_command import plan
from coordinator.up import UpCommand, up


def register(app: typer.Typer) -> None:
    app.command(cls=UpCommand)(up)
    for command in (generate, chat, bench, info, plan):
        app.command()(command)
