"""The command line. Rooms add their commands through the entry-point group `specwire.commands`."""

from __future__ import annotations

import sys
from importlib import metadata

import typer

from specwire.errors import Reason, SpecwireError

GROUP = "specwire.commands"
USAGE = {Reason.FIELD_INVALID, Reason.SETTINGS_INVALID, Reason.UNSUPPORTED}


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="specwire",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Speculative decoding as gRPC services: the same tokens as plain decoding, sooner.\n\n"
        "Start with `specwire chat`: it needs no set-up, no network and no GPU.",
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Show the version.")) -> None:
        if version:
            print(metadata.version("specwire"))
            raise typer.Exit

    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        point.load()(app)
    return app


def main() -> None:
    """Exit status: 0 done, 1 failed, 2 the call was wrong."""
    try:
        build_app()()
    except SpecwireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(2 if error.reason in USAGE else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
