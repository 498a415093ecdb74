"""`specwire plan` from the outside: options and workers in, JSON and tables out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.cli import main
from coordinator.topology_inputs import Workers
from specwire.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    generate_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from tests.unit.test_footprint import DRAFT, TARGET

GIVEN = ("--k", "4", "--verify-ms", "12", "--plain-ms", "10", "--draft-ms", "4")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command: exit status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specwire", "plan", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return run


def points(anchor: int, table: dict[tuple[int, int], float]) -> list[common_pb2.StepCost]:
    return [
        common_pb2.StepCost(
            rows=k + anchor, sessions=s, context_tokens=64, compute_ns=int(ms * 1e6)
        )
        for (k, s), ms in table.items()
    ]


class Target(target_pb2_grpc.TargetServiceServicer):
    def GetInfo(self, request: Any, context: Any) -> Any:
        return target_pb2.TargetServiceGetInfoResponse(
            worker=common_pb2.WorkerInfo(device="cpu"),
            model=common_pb2.ModelInfo(name="toy"),
            max_draft_tokens=7,
            costs=points(1, {(0, 1): 10.0, (4, 1): 12.0, (0, 4): 20.0, (4, 4): 24.0}),
        )


class Draft(draft_pb2_grpc.DraftServiceServicer):
    def GetInfo(self, request: Any, context: Any) -> Any:
        rows = common_pb2.RowFormat(width=100, dtype=common_pb2.D_TYPE_BFLOAT16)
        drafters = [
            draft_pb2.DrafterInfo(method="ngram", max_draft_tokens=9),
            draft_pb2.DrafterInfo(
                method="dflash",
                max_draft_tokens=4,
                is_default=True,
                row_format=rows,
                costs=points(0, {(4, 1): 4.0, (4, 4): 6.0}),
            ),
        ]
        return draft_pb2.DraftServiceGetInfoResponse(drafters=drafters)


@contextmanager
def serving(directory: Path, *roles: str) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    if "target" in roles:
        target_pb2_grpc.add_TargetServiceServicer_to_server(Target(), server)
    if "draft" in roles:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(Draft(), server)
    if "other" in roles:
        generate_pb2_grpc.add_GenerationServiceServicer_to_server(
            generate_pb2_grpc.GenerationServiceServicer(), server
        )
    address = f"unix:{directory}/{'-'.join(roles)}"
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


def test_times_given_by_hand(plan: Any) -> None:
    code, out, _ = plan(*GIVEN, "--tau", "2.5", "--rtt-ms", "3", "--json")
    found = json.loads(out)
    assert code == 0 and found["better"] == "co-located"
    rounds = found["rounds"]
    assert rounds["plain"]["cycle_ms"] == pytest.approx(10.2 + 0.3 / 33)
    assert rounds["co-located"]["cycle_ms"] == pytest.approx(16.0 + 0.4 + 0.3 / 9)
    assert rounds["separate"]["cycle_ms"] == pytest.approx(20.0)
    assert rounds["separate"]["tokens_per_s"] == pytest.approx(125.0)
    assert found["break_even_rtt_ms"]["co-located"] is None
    assert found["break_even_rtt_ms"]["plain"] == pytest.approx(8.5 + 2.5 * 0.3 / 33)


REPORT: dict[str, Any] = {
    "environment": {
        "exactness": "exact",
        "methods": {
            "plain": "plain",
            "dflash": "dflash@separate",
            "dflash@colocated": "dflash@colocated",
            "ngram": "ngram",
        }
    },
    "modes": {
        # 100 rounds each; plain steps of 10 ms, and 1 ms for each draft token.
        "plain": {"rounds": 100, "decoded_tokens": 100, "draft_tokens": 0, "outside_ms_p50": 0.4,
                  "phase_ms": {"verify": 1000.0, "draft": 0.0}, "decode_tokens_per_s": 1e3 / 10.4},
        "dflash": {"rounds": 100, "decoded_tokens": 200, "draft_tokens": 200,
                   "outside_ms_p50": 2.0, "phase_ms": {"verify": 1200.0, "draft": 900.0},
                   "decode_tokens_per_s": 2e5 / 1800},
        "dflash@colocated": {"rounds": 100, "decoded_tokens": 250, "draft_tokens": 400,
                             "outside_ms_p50": 0.5, "phase_ms": {"verify": 1400, "draft": 400},
                             "decode_tokens_per_s": 2.5e5 / 1900},
        "ngram": {"rounds": 0, "decoded_tokens": 0, "draft_tokens": 0, "outside_ms_p50": None,
                  "phase_ms": {}, "decode_tokens_per_s": None},
    },
}  # fmt: skip


def test_modes_that_are_less_exact_are_predicted_from_their_like(plan: Any, tmp_path: Path) -> None:
    report = json.loads(json.dumps(REPORT))
    methods, modes = report["environment"]["methods"], report["modes"]
    for label, method in [*methods.items()]:
        fast = dict(modes[label])
        if fast["decode_tokens_per_s"]:  # everything takes half as long
            fast["decode_tokens_per_s"] *= 2
            fast["outside_ms_p50"] /= 2
            fast["phase_ms"] = {name: ms / 2 for name, ms in fast["phase_ms"].items()}
        methods[f"{label}@fast"], modes[f"{label}@fast"] = method, fast
    (tmp_path / "bench.json").write_text(json.dumps(report))
    code, out, _ = plan("--from-bench", f"{tmp_path}/bench.json", "--json")
    found = {one["measured"]["label"]: one for one in json.loads(out)}
    assert code == 0 and found["dflash@fast"]["source"] == "dflash@colocated@fast"
    for label in ("dflash", "dflash@colocated"):
        assert found[f"{label}@fast"]["error"] == pytest.approx(found[label]["error"])


def test_a_bench_run_is_predicted_from_its_other_half(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(REPORT))
    flags = ("--from-bench", f"{tmp_path}/bench.json")
    code, out, _ = plan(*flags, "--json")
    beside, inside = json.loads(out)
    assert code == 0 and (beside["source"], inside["source"]) == ("dflash@colocated", "dflash")
    # Separate: a round of 18 ms, 2 outside; 12 for the target, so 4 for the draft. Two more draft
    # tokens cost the target 2 ms. Exchanges: 1.4 of one with a draft that is asked on the stream of
    # its rows, 0.8 beside it, and in both every ninth round the rest of one with the coordinator.
    apart, within = 1.4 + 0.6 / 9, 0.8 + 0.6 / 9
    assert inside["round_ms"] == pytest.approx(12 + 2 + 4 + 2 * within / apart)
    # Co-located: 19 ms, 0.5 outside, 4 for the draft and 14.5 for the target, 1.125 a token.
    assert beside["round_ms"] == pytest.approx(14.5 - 2 * 1.125 + 4 + 0.5 * apart / within)
    # Without runs ahead: two exchanges and 0.4 of one more, or 0.8 and 0.6.
    driven = json.loads(plan(*flags, "--draft-ahead", "0", "--json")[1])[1]
    assert driven["round_ms"] == pytest.approx(12 + 2 + 4 + 2 * 1.4 / 2)
    assert inside["error"] == pytest.approx(2.5e3 / inside["round_ms"] / (2.5e5 / 1900) - 1)
    code, out, _ = plan(*flags)
    assert code == 0 and "dflash@colocated" in out and f"{inside['error']:+.0%}"[:-1] in out
    lonely = {**REPORT, "modes": {"plain": REPORT["modes"]["plain"]}}
    (tmp_path / "bench.json").write_text(json.dumps(lonely))
    said = plan(*flags)[1]
    assert said.startswith("nothing to predict: ") and "specwire bench --modes" in said
    assert "round ms" not in said, "no table without rows"
    for bad in ("[]", "{}", "none", '{"environment": {"methods": {}}, "modes": {"a": {}}}'):
        (tmp_path / "bench.json").write_text(bad)
        code, _, err = plan(*flags)
        assert code == 2 and "--from-bench" in err and "specwire bench --json" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "a file that can be read (No such file or directory)"),
        ("{", "JSON (Expecting property name"),
        ("{}", "a value for environment"),
        ({"rounds": "many"}, "a valid integer for modes.dflash.rounds (now 'many')"),
        ({"phase_ms": {}}, "modes.dflash.phase_ms with 'verify'"),
        ({"decode_tokens_per_s": -1}, "for modes.dflash.decode_tokens_per_s (now -1)"),
        ({"outside_ms_p50": "x"}, "a valid number for modes.dflash.outside_ms_p50 (now 'x')"),
        ({"phase_ms": {"verify": -5}}, "for modes.dflash.phase_ms.verify (now -5)"),
        ({"phase_ms": {"verify": 5e3}}, "phase_ms.verify with no more than its rounds, 1800 ms"),
        ({"decoded_tokens": 10**400}, "for modes.dflash.decoded_tokens (now 1000"),
        ({"outside_ms_p50": 10**400}, "for modes.dflash.outside_ms_p50 (now 1000"),
        ("[" * 100_000, "JSON that is not nested so deeply"),
        ('"x"', "an object for all of it (now 'x')"),
        ("[3]", "an object for 0 (now 3)"),
        ('{"environment": {"methods": {}, "exactness": "exact"}, "modes": {}}', "modes that were"),
    ],
)
def test_what_is_wrong_in_a_report_is_said(text: Any, said: str, plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    if isinstance(text, dict):
        modes = {**REPORT["modes"], "dflash": {**REPORT["modes"]["dflash"], **text}}
        text = json.dumps({**REPORT, "modes": modes})
    if text is not None:
        path.write_text(text)
    code, _, err = plan("--from-bench", str(path))
    assert code == 2 and f"--from-bench is '{path}'; accepted: " in err and said in err, err
    assert "specwire bench --json" in err and len(err.splitlines()) == 1


def test_nothing_given_says_what_is_needed(plan: Any) -> None:
    code, _, err = plan()
    assert code == 2 and len(err.splitlines()) == 1
    needed = (
        "--from ADDRESS",
        "--verify-ms",
        "--draft-ms",
        "--acceptance",
        "--from-bench",
        "--help",
    )
    assert all(word in err for word in needed)
    code, _, err = plan(*GIVEN)
    assert code == 2 and "--tau is missing; accepted: " in err and "unset" not in err


@pytest.mark.parametrize(
    "given",
    ["--k 0", "--tau 0", "--plain-ms 0", "--colocated-draft-ms x", "--k 65 --tau 2", "--tau nan"],
)
def test_a_value_that_cannot_be_is_said_before_what_is_missing(given: str, plan: Any) -> None:
    code, _, err = plan(*given.split())
    assert code == 2 and err.startswith(f"error: {given.split()[0]} is ") and "missing" not in err


CELLS: list[dict[str, Any]] = [
    {"mode": "plain", "sessions": 1, "tokens_per_s": 90.0, "tau": 1.0, "k": 0.0,
     "outside_ms": 0.3, "verify_ms": 10.5, "draft_ms": 0.0},
    {"mode": "dflash@colocated", "sessions": 8, "tokens_per_s": 900.0, "tau": 2.0, "k": 2.0,
     "outside_ms": 1.0, "verify_ms": 13.0, "draft_ms": 3.0},
    {"mode": "dspark", "sessions": 8, "tokens_per_s": 500.0, "tau": 2.0, "k": 4.0,
     "outside_ms": 1.0, "verify_ms": 20.0, "draft_ms": 0.0},
    {"mode": "dspark@colocated", "sessions": 8, "tokens_per_s": 900.0, "tau": 1.0, "k": 0.0,
     "outside_ms": None, "verify_ms": None, "draft_ms": 0.0},
]  # fmt: skip


def test_a_run_with_many_sessions_is_predicted_from_times_given(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "cells.json").write_text(json.dumps(CELLS))
    flags = ("--from-bench", f"{tmp_path}/cells.json", "--session-ms", "0.1")
    times = ("--plain-ms", "10", "--verify-ms", "12", "--draft-ms", "4")
    code, out, _ = plan(*flags, *times, "--k", "4", "--json")
    assert code == 0
    alone, beside, apart = json.loads(out)  # what switched itself off is no figure
    assert alone["round_ms"] == pytest.approx(10.2 + 0.3 / 33)
    # Two draft tokens of four cost half; two turns of 0.2 and 7 more sessions; one round in nine.
    assert beside["round_ms"] == pytest.approx((11 + 4 + 2 * 0.9) * (1 + 1 / 9))
    assert beside["tokens_per_s"] == pytest.approx(8 * 2e3 / beside["round_ms"])
    assert beside["error"] == pytest.approx(beside["tokens_per_s"] / 900 - 1)
    assert apart["round_ms"] == pytest.approx(12 + 4 + 0.7 + 0.3 / 9 + 4 * 0.7)
    one = json.loads(plan(*flags, *times, "--k", "4", "--method", "dspark", "--json")[1])
    assert [found["measured"]["label"] for found in one] == ["plain", "dspark"]
    code, _, err = plan(*flags, *times)
    assert code == 2 and "error: --k is" in err


def test_a_run_with_many_sessions_tells_its_own_steps(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "cells.json").write_text(json.dumps(CELLS))
    flags = ("--from-bench", f"{tmp_path}/cells.json", "--session-ms", "0.1")
    code, out, _ = plan(*flags, "--json")
    alone, beside, apart = json.loads(out)
    assert code == 0 and {one["source"] for one in (alone, beside, apart)} == {"its own steps"}
    assert alone["round_ms"] == pytest.approx(10.5 + 0.2 + 0.3 / 33)
    assert beside["round_ms"] == pytest.approx((16 + 2 * 0.9) * (1 + 1 / 9))
    assert apart["round_ms"] == pytest.approx(20 + 0.7 + 0.3 / 9 + 4 * 0.7)
    assert "dflash@colocated" in plan(*flags)[1]
    # Where a third of the rounds had draft tokens the rest are plain ones.
    (tmp_path / "cells.json").write_text(json.dumps([{**cell, "drafted": 1 / 3} for cell in CELLS]))
    same, some, few = json.loads(plan(*flags, "--json")[1])
    assert same["round_ms"] == alone["round_ms"]
    turns, steps = 0.2 + 0.7, beside["measured"]["verify_ms"] + 3.0
    assert some["round_ms"] == pytest.approx(
        beside["round_ms"] / 3 + (steps + turns + (steps + turns) / 33) * 2 / 3
    )
    assert few["round_ms"] == pytest.approx(
        apart["round_ms"] / 3 + (20 + turns + (20 + turns) / 33) * 2 / 3
    )
    without = [{**cell, "verify_ms": None} for cell in CELLS]
    for bad, named in ((without, "--verify-ms"), ([], "--from-bench")):
        (tmp_path / "cells.json").write_text(json.dumps(bad))
        code, _, err = plan(*flags)
        assert code == 2 and f"error: {named} is" in err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drafted", 7),
        ("sessions", 0),
        ("tau", 0),
        ("k", "some"),
        ("mode", None),
        ("k", math.nan),
        ("sessions", 10**400),
        ("draft_ms", -1),
        ("verify_ms", 0),
    ],
)
def test_a_report_of_what_cannot_be_is_refused(
    field: str, value: Any, plan: Any, tmp_path: Path
) -> None:
    cells = [*CELLS[:2], {**CELLS[2], field: value}]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    code, _, err = plan("--from-bench", f"{tmp_path}/cells.json")
    assert code == 2 and "error: --from-bench is" in err and f"{field} " in err


def test_the_table_says_it_in_words(plan: Any, tmp_path: Path) -> None:
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    sizes = ("--target", f"{tmp_path}/target.json", "--draft", f"{tmp_path}/draft.json")
    code, out, _ = plan(*GIVEN, "--acceptance", "0.8", *sizes, "--memory-gb", "80")
    assert code == 0
    assert "rows of 40,960 bytes" in out and "better: co-located" in out
    assert "separate speculation pays below a round trip of" in out
    assert "co-located, same_cache" in out and "147,456" in out and "167,936" in out


def test_a_load_beyond_the_times_is_called_a_guess(plan: Any) -> None:
    given = (
        "--k",
        "4",
        "--tau",
        "2",
        "--verify-ms",
        "1:12,8:20",
        "--draft-ms",
        "1:4,4:6",
        "--json",
    )
    assert json.loads(plan(*given, "--batch", "4")[1])["notes"] == []
    notes = json.loads(plan(*given, "--batch", "6")[1])["notes"]
    assert len(notes) == 1 and notes[0].startswith("draft: no times of more than 4 sessions")
    assert len(json.loads(plan(*given, "--batch", "9")[1])["notes"]) == 2


def test_rows_are_as_wide_as_these_workers_would_send_them() -> None:
    offered = common_pb2.RowFormat(
        encoding=2, width=30, dtype=common_pb2.D_TYPE_BFLOAT16, projection="fp"
    )
    found = Workers(target=target_pb2.TargetServiceGetInfoResponse(projections=[offered]))
    rows = common_pb2.RowFormat(width=100, dtype=common_pb2.D_TYPE_BFLOAT16)
    for name, width, row_bytes in (("fp", 30, 60), ("fp", 0, 200), ("other", 30, 200)):
        found.drafter = draft_pb2.DrafterInfo(
            fingerprint=name, projected_width=width, row_format=rows
        )
        assert found.row_bytes == row_bytes


def test_running_workers_tell_times_rows_and_limits(plan: Any, tmp_path: Path) -> None:
    with serving(tmp_path, "target") as target, serving(tmp_path, "draft") as draft:
        workers = ("--from", target, "--from", draft, "--acceptance", "0.9", "--json")
        code, out, _ = plan(*workers, "--batch", "4", "--rtt-ms", "1", "--session-ms", "0")
        assert code == 0
        found = json.loads(out)
        assert found["row_bytes"] == 200
        separate = found["rounds"]["separate"]
        assert (separate["k"], separate["verify_ms"], separate["draft_ms"]) == (4, 24.0, 6.0)
        assert found["rounds"]["plain"]["verify_ms"] == 20.0
        # One that was measured: a wire is there, and none takes a second on one machine.
        measured = json.loads(plan(*workers, "--exchange-ms", "0")[1])["link"]["rtt_ms"]
        assert 0 < measured < 1000
        code, _, err = plan(*workers, "--method", "dspark")
        assert code == 1
        assert "ngram, dflash" in err
        assert plan(*workers, "--k", "5")[0] == 2
    with serving(tmp_path, "target", "draft") as both:
        code, out, _ = plan("--from", both, "--acceptance", "0.9", "--json")
        assert code == 0 and json.loads(out)["rounds"]["co-located"]["verify_ms"] == 12.0


def test_who_is_no_worker_and_who_is_not_there(plan: Any, tmp_path: Path) -> None:
    with serving(tmp_path, "other") as other:
        code, _, err = plan("--from", other, "--acceptance", "0.9")
        assert code == 2 and "addresses of targets and drafts" in err
    nobody = f"unix:{tmp_path}/nobody"
    code, _, err = plan("--from", nobody, "--acceptance", "0.9")
    assert code == 1 and f"no server answers at {nobody}" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((*GIVEN,), "--tau"),
        ((*GIVEN, "--tau", "2", "--acceptance", "0.5"), "--tau"),
        ((*GIVEN, "--tau", "7"), "--tau"),
        ((*GIVEN[2:], "--tau", "2"), "--k"),
        ((*GIVEN[2:], "--acceptance", "0.5"), "--k"),
        ((*GIVEN, "--acceptance", "0.5,high"), "--acceptance"),
        ((*GIVEN, "--acceptance", "1.5"), "--acceptance"),
        ((*GIVEN[:6], "--tau", "2"), "--draft-ms"),
        ((*GIVEN, "--tau", "2", "--verify-ms", "0"), "--verify-ms"),
        ((*GIVEN, "--tau", "2", "--verify-ms", "one:3"), "--verify-ms"),
        ((*GIVEN, "--tau", "2", "--rtt-ms", "-1"), "--rtt-ms"),
        ((*GIVEN, "--tau", "2", "--bandwidth-gbit", "0"), "--bandwidth-gbit"),
        ((*GIVEN, "--tau", "2", "--exchange-ms", "nan"), "--exchange-ms"),
        ((*GIVEN, "--tau", "2", "--kv-dtype", "int3"), "--kv-dtype"),
        ((*GIVEN, "--tau", "2", "--target", "nowhere"), "--draft"),
        ((*GIVEN, "--tau", "2", "--target", "nowhere", "--draft", "nowhere"), "--target"),
        (("--from", "nonsense", "--acceptance", "0.5"), "--from"),
        (("--k", "0", "--tau", "1"), "--k"),
    ],
)
def test_what_is_wrong_is_named(plan: Any, arguments: tuple[str, ...], named: str) -> None:
    code, _, err = plan(*arguments)
    assert code == 2 and f"error: {named} is" in err and len(err.splitlines()) == 1


def test_a_draft_for_another_target_is_refused_by_name(plan: Any, tmp_path: Path) -> None:
    flags = []
    for name, config in (("target", TARGET), ("draft", DRAFT | {"vocab_size": 32000})):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        flags += [f"--{name}", f"{tmp_path}/{name}.json"]
    code, _, err = plan(*GIVEN, "--tau", "2.5", *flags)
    text = "error: --draft config: vocabulary is 32000; accepted: 151936, the target's\n"
    assert (code, err) == (2, text)
