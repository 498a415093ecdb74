"""Generates the Python code of the contract, or checks that the committed code is current.

python proto/generate.py [--check] proto
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PLUGINS = Path(sys.executable).parent


def generate(root: Path, out: Path) -> None:
    """Runs protoc over every .proto under `root`; import paths equal file paths, so nothing is
    rewritten."""
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *files]
    path = f"{PLUGINS}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(
        command, cwd=root, check=True, env={**os.environ, "PATH": path}, stderr=subprocess.DEVNULL
    )


def stale(root: Path) -> list[str]:
    """Names of generated files that differ from what the .proto files give now, are missing, or
    are left over."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        generate(root, out)
        fresh = {path.relative_to(out) for path in out.rglob("*_pb2*.py*") if path.is_file()}
        kept = {
            path.relative_to(root) for path in root.rglob("*_pb2*.py*") if path.suffix != ".pyc"
        }
        differ = {
            name for name in fresh & kept if not filecmp.cmp(out / name, root / name, shallow=False)
        }
        return sorted(str(name) for name in (fresh ^ kept) | differ)


def main() -> int:
    check = "--check" in sys.argv
    root = Path(sys.argv[-1]).resolve()
    if not check:
        generate(root, root)
        return 0
    names = stale(root)
    for name in names:
        print(f"stale generated code: {name}; run `make proto`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
