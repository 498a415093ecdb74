"""`specwire bench`: statistics against values worked out by hand, prompt files, order of modes."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coordinator import bench_report
from coordinator.bench_modes import (
    Mode,
    check_own,
    colocated_methods,
    pairs,
    parse_modes,
    placed,
    rotated,
)
from coordinator.bench_prompts import Prompt, load_prompts, parse_line
from coordinator.bench_run import BenchOptions, Clients, run_modes
from coordinator.bench_stats import (
    PromptRun,
    acceptance_by_position,
    divergence,
    four_gram_ratio,
    is_loop,
    outside_ms_p50,
    percentile,
    ratios,
    summarize,
    tau,
)
from coordinator.local import OWN_METHODS
from draft_svc.loading import DEFAULT_METHODS
from specwire.client import Acceptance, Delta, Finished, FinishReason, Sampling, Usage
from specwire.errors import Reason, SpecwireError

KEYS = {
    "tokens_per_s",
    "decode_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tau",
    "tau_without_loops",
    "decoded_tokens",
    "draft_tokens",
    "acceptance_by_position",
    "rounds",
    "phase_ms",
    "outside_ms_p50",
    "prompts",
    "identical",
    "divergences",
}


def run_of(index: int = 0, category: str = "chat", tokens: int = 11, **given: Any) -> PromptRun:
    given.setdefault("token_ids", tuple(range(tokens)))
    given.setdefault("ttft_ms", 100.0)
    given.setdefault("total_ms", 600.0)
    return PromptRun(index=index, category=category, **given)


def test_four_grams() -> None:
    assert four_gram_ratio([1, 2, 3]) == 1.0
    # 1212, 2121, 1212, 2121, 1212: two distinct of five
    assert four_gram_ratio([1, 2] * 4) == pytest.approx(2 / 5)
    assert is_loop([1, 2] * 4)
    # 1111, 1112, 1123, 1234: all distinct
    assert not is_loop([1, 1, 1, 1, 2, 3, 4])


def test_a_ratio_of_exactly_half_is_no_loop() -> None:
    # 1111 twice, 1112, 1122: three of four; 11111112: 1111 x4, 1112: two of five
    assert four_gram_ratio([1, 1, 1, 1, 1, 2, 2]) == pytest.approx(3 / 4)
    assert four_gram_ratio([1] * 5) == pytest.approx(1 / 2)
    assert not is_loop([1] * 5)


def test_percentiles_interpolate() -> None:
    assert percentile([10.0, 20.0, 40.0], 0.5) == 20.0
    assert percentile([10.0, 20.0], 0.5) == 15.0
    assert percentile([10.0, 20.0], 0.99) == pytest.approx(19.9)
    assert percentile([], 0.5) is None


def test_tau_sums_inside_a_category_and_averages_over_categories() -> None:
    runs = [
        run_of(0, "chat", 11, rounds=5),
        run_of(1, "chat", 31, rounds=10),
        run_of(2, "code", 13, rounds=3),
    ]
    # chat (10 + 30) / 15, code 12 / 3
    assert tau(runs) == pytest.approx((40 / 15 + 4) / 2)
    assert tau([run_of(tokens=1, rounds=0)]) is None


def test_acceptance_is_marginal() -> None:
    runs = [
        run_of(drafted_by_position=(10, 10, 4), accepted_by_position=(8, 5, 1)),
        run_of(drafted_by_position=(10, 6), accepted_by_position=(6, 3)),
    ]
    assert acceptance_by_position(runs) == pytest.approx([14 / 20, 8 / 16, 1 / 4])
    assert acceptance_by_position([run_of()]) == []


def test_divergence_names_the_first_position_and_the_margin_of_plain() -> None:
    """WC-41: where kernel shapes may flip a token, the report says how near the flip was."""
    plain = run_of(token_ids=(1, 2, 3, 4), margins=(9.0, 8.0, 0.25, 7.0))
    assert divergence(plain, plain) is None
    found = divergence(run_of(3, "code", token_ids=(1, 2, 5, 4)), plain)
    assert found == {"prompt": 3, "category": "code", "position": 2, "top2_margin": 0.25}
    # One that stopped early parts where the other goes on.
    short = divergence(run_of(token_ids=(1, 2)), plain)
    assert short is not None and (short["position"], short["top2_margin"]) == (2, 0.25)


def test_summary_by_hand() -> None:
    runs = [
        run_of(0, "chat", 11, rounds=5, phase_ms={"verify": 300.0, "link": 10.0}),
        run_of(1, "code", 21, rounds=5, ttft_ms=200.0, total_ms=1200.0, phase_ms={"verify": 1.0}),
    ]
    plain = [run_of(0, "chat", 11), run_of(1, "code", token_ids=(7, 8))]
    entry = summarize(runs, plain)
    assert entry["tokens_per_s"] == pytest.approx(32 / 1.8)
    assert entry["decode_tokens_per_s"] == pytest.approx((10 + 20) / (0.5 + 1.0))
    assert (entry["ttft_ms_p50"], entry["ttft_ms_p99"]) == (150.0, pytest.approx(199.0))
    assert entry["tau"] == pytest.approx((2 + 4) / 2)
    assert entry["phase_ms"] == {"link": 10.0, "verify": 301.0}
    assert (entry["prompts"], entry["identical"], entry["rounds"]) == (2, 1, 10)
    assert [item["prompt"] for item in entry["divergences"]] == [1]
    assert entry["by_category"]["chat"]["identical"] == 1
    assert entry["by_category"]["code"]["identical"] == 0


def test_schema() -> None:
    entry = summarize([run_of()], None)
    assert set(entry) == KEYS | {"by_category"}
    assert set(entry["by_category"]["chat"]) == KEYS
    assert entry["identical"] is None and entry["divergences"] == []
    assert json.loads(json.dumps(entry)) == entry


def test_loops_are_left_out_of_the_second_tau() -> None:
    loop = run_of(0, token_ids=(1,) * 21, rounds=4)
    fine = run_of(1, tokens=11, rounds=10)
    entry = summarize([loop, fine], None)
    assert entry["tau"] == pytest.approx(30 / 14)
    assert entry["tau_without_loops"] == pytest.approx(1.0)


def test_outside_is_the_median_over_the_rounds_that_drafted() -> None:
    runs = [
        run_of(drafted=(3, 0, 3), outside_us=(300, 9000, 500)),
        run_of(drafted=(1,), outside_us=(900,)),
    ]
    assert outside_ms_p50(runs) == pytest.approx(0.5)
    assert outside_ms_p50([run_of(drafted=(0, 0), outside_us=(100, 200))]) == pytest.approx(0.15)
    assert outside_ms_p50([run_of()]) is None


def test_the_places_are_compared() -> None:
    separate = summarize([run_of(drafted=(3,), outside_us=(900,))], None)
    colocated = summarize([run_of(total_ms=350.0, drafted=(3,), outside_us=(300,))], None)
    found = ratios({"a": separate, "b": colocated}, [("a", "b")])
    assert found == {
        "b": {
            "decode_tokens_per_s": pytest.approx(2.0),
            "outside_ms_p50": pytest.approx(0.3),
            "separate_outside_ms_p50": pytest.approx(0.9),
        }
    }


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "JSON"),
        ("[]", "JSON"),
        ("{}", "prompt"),
        ('{"prompt": "a", "messages": []}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": "a", "category": 1}', "category"),
        ('{"messages": []}', "messages"),
        ('{"messages": ["a"]}', "messages[0]"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "messages[0].role"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(SpecwireError) as caught:
        load_prompts(path)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.message.startswith(f"line 3: {field} is ")


@pytest.mark.parametrize("content", [None, "", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecwireError, match="--prompts"):
        load_prompts(path)


def test_lines() -> None:
    one = parse_line('{"prompt": "Hello", "category": "chat", "source": "x"}', 1, 4)
    assert one == Prompt(4, "chat", ({"role": "user", "content": "Hello"},))
    many = parse_line('{"messages": [{"role": "system", "content": "Be brief."}]}', 1, 0)
    assert (many.category, len(many.messages)) == ("all", 1)


def test_modes() -> None:
    modes = parse_modes("plain,plain@fast, draft", "exact")
    assert modes == [
        Mode("plain", "plain", "exact"),
        Mode("plain@fast", "plain", "fast"),
        Mode("draft", "", "exact"),
    ]
    assert parse_modes("dflash@colocated@fast", "exact") == [
        Mode("dflash@colocated@fast", "dflash", "fast", "colocated")
    ]
    for bad in ("", "plain,,ngram", "plain@slow", "plain,plain", "plain@colocated", "@colocated"):
        with pytest.raises(SpecwireError, match="--modes"):
            parse_modes(bad, "exact")
    with pytest.raises(SpecwireError, match="--exactness"):
        parse_modes("plain", "sloppy")


def test_a_mode_that_own_services_do_not_have_is_refused_before_they_start() -> None:
    assert OWN_METHODS == DEFAULT_METHODS
    check_own(parse_modes("plain,draft,ngram,dspark@fast,dflash@colocated", "exact"))
    with pytest.raises(SpecwireError, match="--modes is 'eagle'; accepted: plain, ngram, hybrid"):
        check_own(parse_modes("plain,eagle", "exact"))
    with pytest.raises(SpecwireError, match="'ngram@colocated'; accepted: dflash@colocated, "):
        check_own(parse_modes("ngram@colocated", "exact"))


def server(default: str, **methods: tuple[str, ...]) -> Any:
    workers = [SimpleNamespace(placement=place, methods=m) for place, m in methods.items()]
    return SimpleNamespace(default_method=default, workers=workers)


BOTH = server("dflash", colocated=("dflash",), separate=("dflash", "ngram"))


@pytest.mark.parametrize(
    ("given", "both", "requests"),
    [
        ("plain,dflash", False, ["plain", "dflash"]),
        ("dflash,dflash@colocated", False, ["dflash@separate", "dflash@colocated"]),
        ("draft,dflash@colocated", False, ["dflash@separate", "dflash@colocated"]),
        ("draft@colocated,dflash@fast", False, ["dflash@colocated", "dflash"]),
        ("plain,draft,ngram", True, ["plain", "dflash@separate", "dflash@colocated", "ngram"]),
        ("dflash,dflash@colocated", True, ["dflash@separate", "dflash@colocated"]),
    ],
)
def test_modes_and_the_places_of_their_drafters(
    given: str, both: bool, requests: list[str]
) -> None:
    modes = placed(parse_modes(given, "exact"), [BOTH], both=both)
    assert [mode.request for mode in modes] == requests
    assert len(pairs(modes)) == ("dflash@separate" in requests)


def test_a_mode_alone_keeps_its_one_place() -> None:
    """Without a draft service beside it, `dflash` is the co-located one anyway."""
    inside = server("dflash", colocated=("dflash",))
    modes = placed(parse_modes("dflash,dflash@colocated", "exact"), [inside], both=False)
    assert [mode.request for mode in modes] == ["dflash", "dflash@colocated"] and not pairs(modes)
    with pytest.raises(SpecwireError, match="one of: dflash"):
        placed(parse_modes("plain,ngram", "exact"), [BOTH], both=True)


def test_each_drafter_that_is_wanted_inside_has_a_deployment() -> None:
    known = ["dflash", "dspark"]

    def methods(text: str, both: bool = False) -> list[str]:
        return colocated_methods(parse_modes(text, "exact"), "dflash", known, both=both)

    assert methods("plain,draft,dspark") == []
    assert methods("dspark@colocated,draft@colocated,dflash@colocated@fast") == ["dspark", "dflash"]
    assert methods("plain,draft,dspark,ngram", both=True) == known
    assert methods("plain,dflash@separate,ngram", both=True) == []
    first, dflash, dspark = FakeClient(), FakeClient(), FakeClient()
    clients = Clients(first, {"dflash": dflash, "dspark": dspark})
    modes = parse_modes("plain,dflash,dspark@colocated,dflash@colocated,eagle@colocated", "exact")
    assert [clients.of(mode) for mode in modes] == [first, first, dspark, dflash, first]


def test_rotation_gives_each_mode_each_place() -> None:
    modes = parse_modes("plain,ngram,dflash", "exact")
    orders = [[mode.label for mode in rotated(modes, turn)] for turn in range(3)]
    assert orders == [
        ["plain", "ngram", "dflash"],
        ["ngram", "dflash", "plain"],
        ["dflash", "plain", "ngram"],
    ]


class FakeStream:
    def __init__(self, ids: tuple[int, ...], margins: bool) -> None:
        self.ids, self.margins = ids, margins

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        for token in self.ids:
            yield Delta("x", (token,), 0, 0, (0.5,) if self.margins else ())
        usage, sampling = Usage(5, len(self.ids)), Sampling(0.0, 0, 1.0, 1, 0)
        record = Acceptance(rounds=len(self.ids) - 1)
        reason = FinishReason.LENGTH
        yield Finished(reason, "", None, usage, record, sampling, "", "exact")


class FakeClient:
    """Answers at once; `ngram` differs from the rest in its last token."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def stream(self, **options: Any) -> Any:
        self.calls.append(options)
        last = 9 if options["method"] == "ngram" else 3
        return FakeStream((1, 2, last), options["return_margins"])


async def test_modes_alternate_prompt_by_prompt_after_a_warm_up() -> None:
    client = FakeClient()
    prompts = [Prompt(i, "chat", ({"role": "user", "content": str(i)},)) for i in range(3)]
    modes = parse_modes("plain,draft", "exact")
    runs = await run_modes(Clients(client), prompts, modes, BenchOptions(seed=5), lambda line: None)
    order = [(call["messages"][0]["content"], call["method"]) for call in client.calls[2:]]
    expected = [("0", "plain"), ("0", ""), ("1", ""), ("1", "plain"), ("2", "plain"), ("2", "")]
    assert order == expected
    assert [call["method"] for call in client.calls[:2]] == ["plain", ""]
    assert {call["seed"] for call in client.calls} == {5}
    assert not any(call["return_margins"] for call in client.calls)
    assert [run.index for run in runs["draft"]] == [0, 1, 2]
    assert runs["plain"][0].token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("mode", "advised"), [("dflash@colocated", True), ("ngram@colocated", False), ("eagle", False)]
)
async def test_a_mode_that_the_deployment_lacks_is_named_with_what_to_do(
    mode: str, advised: bool
) -> None:
    class Lacking(FakeClient):
        def stream(self, **options: Any) -> Any:
            if options["method"] == "plain":
                return super().stream(**options)
            raise SpecwireError.field(
                "speculation.method", options["method"], "plain, dflash", Reason.METHOD_UNKNOWN
            )

    modes = parse_modes(f"plain,{mode}", "exact")
    with pytest.raises(SpecwireError) as caught:
        await run_modes(Clients(Lacking()), [], modes, BenchOptions(), lambda line: None)
    text = caught.value.message
    assert text.startswith(
        f"--modes is '{mode}'; accepted: what this deployment has: plain, dflash"
    )
    assert "speculation.method" not in text
    assert ("`specwire up --colocate dflash`" in text and "--address" in text) == advised


async def test_margins_are_fetched_only_for_what_differs() -> None:
    client = FakeClient()
    prompts = [Prompt(0, "chat", ({"role": "user", "content": "a"},))]
    modes = parse_modes("plain,ngram", "fast")
    runs = await run_modes(Clients(client), prompts, modes, BenchOptions(), lambda line: None)
    assert client.calls[-1]["return_margins"]
    entry = summarize(runs["ngram"], runs["plain"])
    assert entry["divergences"] == [
        {"prompt": 0, "category": "chat", "position": 2, "top2_margin": 0.5}
    ]


def test_table_plot_and_file(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    settings: dict[str, Any] = {
        "temperature": 0.0,
        "exactness": "exact",
        "default_method": "dflash",
    }
    settings["num_speculative_tokens"] = 5
    environment = bench_report.environment(prompts, settings, "toy")
    assert environment["prompts_file"] == "p.jsonl" and len(environment["prompts_sha256"]) == 64
    plain = [run_of(rounds=10)]
    drafted = run_of(rounds=5, drafted_by_position=(5, 5), accepted_by_position=(4, 1))
    modes = {"plain": summarize(plain, plain), "draft": summarize([drafted], plain)}
    found = {"decode_tokens_per_s": 1.25, "outside_ms_p50": 0.3, "separate_outside_ms_p50": 0.9}
    report = {
        "environment": environment,
        "modes": modes,
        "colocated_over_separate": {"dflash@colocated": found},
    }
    out = Console(width=120, record=True, quiet=False, file=(tmp_path / "table").open("w"))
    bench_report.print_table(report, out)
    text = out.export_text()
    out.file.close()
    assert "1/1" in text and "draft: acceptance by position 0.80 0.20" in text
    assert "draft: 1.00 x plain" in text
    assert "dflash@colocated: 1.25 x separate (decode), outside 0.30 ms against 0.90 ms" in text
    bench_report.write_json(report, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == report
    bench_report.write_plot(report, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_plot_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecwireError, match=r"specwire\[plot\]"):
        bench_report.require_matplotlib()
