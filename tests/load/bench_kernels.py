"""The fused GPU operators: errors against fp64, independence of rows, and times against the floor.

python -m tests.load.bench_kernels --check --time --out FILE; `--sweep` and
`--wide` try tiles. Times are
medians of CUDA-graph replays over weights that together do not fit the L2 cache; the floor is the
bytes of the weights over the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tests.load.kernel_checks import run_checks
from tests.load.kernel_sweep import run_sweep
from tests.load.kernel_times import run_times
from tests.load.kernel_wide import run_wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "time", "sweep", "wide"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", default="", help="of the sweep, such as 'norm 960'")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if asked.check:
        report |= run_checks()
    if asked.time:
        report |= run_times()
    if asked.sweep:
        report["sweep"] = run_sweep(asked.only)
    if asked.wide:
        report["wide"] = run_wide()
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1))
    if report.get("failed"):
        raise SystemExit(f"failed: {', '.join(report['failed'])}")


if __name__ == "__main__":
    main()
