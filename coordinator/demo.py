"""`make demo`: the embedded default, speculative against plain decoding on our own prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from coordinator import options as opt
from coordinator.bench import compare
from coordinator.bench_modes import parse_modes
from coordinator.bench_prompts import load_prompts
from coordinator.bench_report import console, print_table
from coordinator.bench_run import BenchOptions
from coordinator.local import LocalDeployment
from coordinator.signals import terminated_cleanly
from specwire.errors import SpecwireError

PROMPTS = Path(__file__).parent / "prompts" / "demo.jsonl"
MAX_TOKENS = 96


def demo() -> bool:
    """Whether speculation changed nothing."""
    prompts = load_prompts(PROMPTS)
    options = BenchOptions(max_tokens=MAX_TOKENS)
    with terminated_cleanly(), LocalDeployment(progress=opt.say) as deployment:
        modes = parse_modes("plain,draft", options.exactness)
        report = uvloop.run(compare(deployment.address, PROMPTS, prompts, modes, options))
    print_table(report, console())
    plain, draft = report["modes"]["plain"], report["modes"]["draft"]
    if plain["decode_tokens_per_s"] and draft["decode_tokens_per_s"]:
        print(f"plain        {plain['decode_tokens_per_s']:6.1f} tokens/s")
        print(f"speculative  {draft['decode_tokens_per_s']:6.1f} tokens/s, tau {draft['tau']:.2f}")
    print(f"identical {draft['identical']}/{draft['prompts']}")
    return bool(draft["identical"] == draft["prompts"])


def main() -> None:
    try:
        same = demo()
    except SpecwireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
