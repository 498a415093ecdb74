"""The command line without a model: help, errors, exit codes, the children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from coordinator import chat, local, talk, up
from coordinator.cli import main
from coordinator.local import LocalDeployment, LocalOptions, child_environment, parse_extra
from coordinator.signals import STOPS
from coordinator.talk import shower
from specwire.client import Acceptance, Client, Delta, Finished, FinishReason, Sampling, Usage
from specwire.errors import Reason, SpecwireError
from specwire.generation import collect
from specwire.request import build_request
from specwire.v1 import common_pb2, generate_pb2
from target_svc.settings import TargetSettings

COMMANDS = ("up", "generate", "chat", "bench", "info", "plan", "backends", "train-draft")


@pytest.fixture(autouse=True)
def _private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test meets a deployment that happens to run, or leaves one behind."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SPECWIRE_ADDRESS", raising=False)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["specwire", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, command, "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text and text.count(f"specwire {command}") >= 2
    # An example that a line break tears apart cannot be copied.
    examples = re.split("Arguments:|Options:", text.split("Examples:")[1])[0].strip().splitlines()
    assert all("specwire" in line for line in examples)


def test_the_overview_lists_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.count(".") >= 2


@pytest.mark.parametrize("command", [["info"], ["generate", "a"], ["chat"]])
def test_a_bad_address_is_one_error_line(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *command, "--address", f"unix:{tmp_path}/none.sock") == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["up", "--exactness", "sloppy"], "--exactness"),
        (["up", "--set", "kv=3"], "--set"),
        (["up", "--colocate", "ngram"], "--colocate is 'ngram'; accepted: dflash, dspark"),
        (["chat", "--mark", "bold"], "--mark"),
        (["generate", ""], "PROMPT"),
        (["bench", "--prompts", "none.jsonl"], "--prompts"),
        (["bench", "--prompts", "none.jsonl", "--modes", "a@b"], "--modes"),
        (["generate"], "PROMPT"),
        (["generate", "a", "--logprobs", "2"], "--json"),
        (["generate", "a", "--prompt-logprobs", "0"], "--json"),
        (["generate", "a", "--logit-bias", "4"], "--logit-bias"),
        (["generate", "a", "--logit-bias", "x=1"], "--logit-bias"),
        (["generate", "a", "-n", "0"], "-n"),
        (["fly"], "fly"),
    ],
)
def test_a_wrong_call_exits_with_2(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *arguments) == 2
    assert text.lower() in capsys.readouterr().err.lower()


class _Sent(Exception):
    """Stands for the request: the tests below look at what would be sent."""


def _sent(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> generate_pb2.GenerateRequest:
    class Recorder(Client):
        def generate(self, **options: Any) -> Any:
            raise _Sent(build_request(options))  # type: ignore[arg-type]

        stream = generate

    for room in (talk, chat):
        monkeypatch.setattr(room, "Client", Recorder)
    monkeypatch.setattr(sys, "argv", ["specwire", *arguments, "--address", "unix:/none"])
    with pytest.raises(_Sent) as caught:
        main()
    request: generate_pb2.GenerateRequest = caught.value.args[0]
    return request


def test_every_flag_of_generate_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "--json -n 2 --top-k 5 --min-p 0.25 --repetition-penalty 1.5 --presence-penalty -0.5 "
        "--frequency-penalty 0.5 --logit-bias 4=-2.5 --logit-bias 5=1 --bad-word x --bad-word y "
        "--min-tokens 3 --stop-token-id 7 --include-stop --ignore-eos --logprobs 2 "
        "--prompt-logprobs 0 --priority -4"
    )
    request = _sent(monkeypatch, "generate", "text", *flags.split())
    s = request.sampling
    assert (s.top_k, s.min_p, s.repetition_penalty) == (5, 0.25, 1.5)
    assert (s.presence_penalty, s.frequency_penalty, s.min_tokens) == (-0.5, 0.5, 3)
    assert dict(s.logit_bias) == {4: -2.5, 5: 1.0} and list(request.bad_words) == ["x", "y"]
    assert (request.n, request.logprobs, request.prompt_logprobs) == (2, 2, 0)
    assert list(request.stop_token_ids) == [7] and request.priority == -4
    assert request.include_stop and request.ignore_eos and request.HasField("prompt_logprobs")
    bare = _sent(monkeypatch, "generate", "text")
    assert bare.sampling == common_pb2.Sampling() and not bare.HasField("n")


def test_chat_takes_the_options_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "info", lambda self: None)
    monkeypatch.setattr("builtins.input", lambda *_: "hello")
    flags = "--top-k 5 --min-p 0.25 --repetition-penalty 1.5 --presence-penalty 0.5 --stop x"
    request = _sent(monkeypatch, "chat", *flags.split())
    s = request.sampling
    assert (s.top_k, s.min_p, s.repetition_penalty, s.presence_penalty) == (5, 0.25, 1.5, 0.5)
    assert list(request.stop) == ["x"] and request.chat.messages[0].content == "hello"


class _Talker:
    """Stands for a client: answers with the number of the turn, `n` times."""

    def __init__(self, address: str) -> None: ...
    def __enter__(self) -> _Talker:
        return self

    def __exit__(self, *_: object) -> None: ...
    def info(self) -> None: ...

    def generate(self, **options: Any) -> Any:
        messages, sampling = options["messages"], Sampling(0.7, 0, 1.0, 3, 0)
        events: list[Any] = []
        for choice in range(options["n"] or 1):
            text = f"turn {len(messages) // 2} choice {choice}; heard: {messages[-1]['content']}"
            end = FinishReason.LENGTH, "", None, Usage(1, 2), Acceptance(), sampling, "", ""
            events += [Delta(text, (), 0, 0, (), choice=choice), Finished(*end, choice)]
        return collect(events)


def test_chat_shows_several_answers_and_goes_on_with_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = ["one", "/etc/hosts says?", "/etc/hosts"]
    lines = iter([turns[0], "/help", *turns[1:], "/rest", "/reset", "x", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    monkeypatch.setattr(chat, "Client", _Talker)
    code = call(monkeypatch, "chat", "-n", "2", "--address", "unix:/none")
    out, err = capsys.readouterr()
    assert code == 0
    said = [line for line in out.splitlines() if "heard" in line]
    assert said == [
        f"turn {turn} choice {choice}; heard: {line}"
        for turn, line in enumerate(turns)
        for choice in (0, 1)
    ] + [f"turn 0 choice {choice}; heard: x" for choice in (0, 1)]
    assert "/reset  forget the conversation" in err
    assert "there is no /rest; /help lists the commands" in err


class _Busy(_Talker):
    """Is interrupted in its first answer, busy in the second, and talks then."""

    asked: ClassVar[list[list[str]]] = []

    def generate(self, **options: Any) -> Any:
        self.asked.append([message["content"] for message in options["messages"]])
        if len(self.asked) == 1:
            raise KeyboardInterrupt
        if len(self.asked) == 2:
            raise SpecwireError(Reason.QUEUE_FULL, "8 of 8 sessions run already")
        if len(self.asked) == 4:
            raise SpecwireError.field("sampling.top_p", 7, "(0, 1]")
        return super().generate(**options)


def test_chat_goes_on_after_an_answer_that_did_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["cut off", "busy", "/etc", " /etc", "  ", "last"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    monkeypatch.setattr(chat, "Client", _Busy)
    code = call(monkeypatch, "chat", "-n", "2", "--top-p", "7", "--address", "unix:/none")
    err = capsys.readouterr().err
    assert _Busy.asked[:3] == [["cut off"], ["busy"], ["/etc"]]
    assert [len(said) for said in _Busy.asked] == [1, 1, 1, 3]
    assert "error: 8 of 8 sessions run already\n" in err
    assert "there is no /etc; /help lists the commands, a space before it sends it\n" in err
    assert code == 2 and err.endswith("error: --top-p is 7; accepted: (0, 1]\n")
    lines, asked = iter(["cut off", "busy", "/quit"]), _Busy.asked
    asked.clear()
    code = call(monkeypatch, "chat", "-n", "2", "--address", "unix:/none")
    assert (len(asked), code) == (2, 1)  # a script sees that an answer is missing


def test_one_ctrl_c_at_the_prompt_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = KeyboardInterrupt()
    lines: Iterator[Any] = iter(["one", stop, "/reset now", "/hosts", "two", stop, stop, "three"])

    def typed(*_: object) -> Any:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    terminal = True
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setattr(chat, "Client", _Talker)
    code = call(monkeypatch, "chat", "-n", "2", "--address", "unix:/none")
    out, err = capsys.readouterr()
    assert code == 0 and "turn 1 choice 0; heard: two" in out and "now" not in out
    assert err.count("Ctrl-C again, Ctrl-D or /quit leaves\n") == 2
    assert "/reset takes no arguments; /help lists the commands, a space before it" in err
    terminal, lines = False, iter([stop])
    assert call(monkeypatch, "chat", "-n", "2", "--address", "unix:/none") == 130


def test_errors_name_the_option_that_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = SpecwireError.field("speculation.method", "nope", "plain", Reason.METHOD_UNKNOWN)

    def stream(self: Client, **options: Any) -> Any:
        raise refused

    monkeypatch.setattr(Client, "stream", stream)
    for command in (["generate", "x"], ["generate", "--chat", "x"]):
        assert call(monkeypatch, *command, "--method", "nope", "--address", "unix:/none") == 1
        assert capsys.readouterr().err == "error: --method is 'nope'; accepted: plain\n"
    refused = SpecwireError.field("input", "empty", "a text")
    assert call(monkeypatch, "generate", "x", "--address", "unix:/none") == 2
    assert capsys.readouterr().err == "error: input is 'empty'; accepted: a text\n"
    assert call(monkeypatch, "generate", "-n", "17", "x") == 2


def test_several_answers_are_printed_one_after_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampling = Sampling(0.7, 0, 1.0, 3, 0)
    ends = [
        Finished(FinishReason.LENGTH, "", None, Usage(1, 2), Acceptance(), sampling, "", "", choice)
        for choice in (1, 0)
    ]
    texts = [Delta("one", (1,), 0, 0, (), choice=1), Delta("zero", (2,), 0, 0, ())]
    talk.print_choices(collect([*texts, *ends]))
    captured = capsys.readouterr()
    assert captured.out == "--- 0\nzero\n--- 1\none\n"
    assert captured.err.count("2 tokens") == 2


def test_the_command_line_imports_no_torch() -> None:
    code = "import coordinator.commands, coordinator.demo, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_accepted_text_is_set_apart() -> None:
    delta = Delta("guess own", (1, 2), 1, 5, ())
    assert shower("brackets")(delta) == "[guess] own"
    assert shower("none")(delta) == "guess own"
    assert shower("colour")(delta) == "\x1b[32mguess\x1b[0m own"
    assert shower("brackets")(Delta("own", (1,), 0, 0, ())) == "own"


def test_settings_of_services_pass_through() -> None:
    switches = ["target.project-rows=true", "target.reflection=false"]
    extra = parse_extra(["target.kv-memory-mb=64", *switches, "draft.methods=ngram"])
    options = LocalOptions(extra=extra)
    flags = options.flags_of("target_svc")
    assert flags == ["--kv-memory-mb=64", "--project-rows=true", "--reflection=false"]
    settings = TargetSettings.load(flags)
    assert (settings.kv_memory_mb, settings.project_rows, settings.reflection) == (64, True, False)
    assert options.flags_of("draft_svc") == ["--methods=ngram"]
    assert options.flags_of("coordinator") == []


@pytest.mark.parametrize("colocate", ["", "dflash", "dspark"])
def test_each_topology_starts_what_it_needs(colocate: str) -> None:
    options = LocalOptions(draft="d", colocate=colocate)
    deployment = LocalDeployment(options)
    started: list[str] = []
    deployment.spawn = started.append  # type: ignore[assignment,method-assign]
    deployment._wait_workers = lambda deadline: None  # type: ignore[method-assign]
    deployment.start()
    draft = [] if colocate else ["draft_svc"]
    assert started == ["target_svc", *draft, "coordinator"]
    _, target = deployment._command("target_svc")
    _, coordinator = deployment._command("coordinator")
    inside = f"--colocate {colocate} --draft-checkpoint d"
    assert (inside in " ".join(target)) == bool(colocate)
    for flags, name in ((target, "--push-allow"), (coordinator, "--draft")):
        assert (f"{name} {deployment.draft_address}" in " ".join(flags)) != bool(colocate)
    deployment.stop()


def test_up_has_one_place_for_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LocalOptions] = []

    def deployment(options: LocalOptions, progress: object) -> None:
        found.append(options)
        raise SpecwireError(Reason.ENGINE_DOWN, "enough")

    monkeypatch.setattr(up, "LocalDeployment", deployment)
    for flags in (
        [],
        ["--colocate"],
        ["--colocate", "--threads", "1"],
        ["--colocate", "dspark", "--draft", "d"],
        ["--threads", "2", "--colocate=dspark"],
    ):
        monkeypatch.setattr(sys, "argv", ["specwire", "up", *flags])
        with pytest.raises(SystemExit):
            main()
    assert [options.colocate for options in found] == ["", "dflash", "dflash", "dspark", "dspark"]
    assert [options.draft for options in found] == ["default"] * 3 + ["d", "default"]
    assert [options.threads for options in found] == [0, 0, 1, 0, 2]


def test_children_wait_passively() -> None:
    environment = child_environment(0)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert child_environment(3)["OMP_NUM_THREADS"] == "3"


def test_a_child_that_fails_ends_the_start_with_the_end_of_its_log() -> None:
    options = LocalOptions(extra=(("target_svc", ("--no-such-flag", "1")),))
    deployment = LocalDeployment(options)
    folder = Path(deployment.target_address.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SpecwireError) as caught, deployment:
        pass
    assert caught.value.message.startswith("the target ended with exit status 2:\n  error: ")
    assert "no-such-flag" in caught.value.message and "Traceback" not in caught.value.message
    assert not folder.exists() and not deployment.children


@pytest.mark.parametrize("number", STOPS)
def test_a_second_signal_ends_the_children_at_once(number: int) -> None:
    """They are given time to end; the folder goes all the same."""
    deployment = LocalDeployment()
    folder = Path(deployment.target_address.removeprefix("unix:")).parent
    deaf = ["sh", "-c", "trap '' TERM; echo deaf; exec sleep 60"]
    with subprocess.Popen(deaf, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"deaf\n"
        child = local.Child("coordinator", "", [], folder / "log", process)
        deployment.children["coordinator"] = child
        before = signal.getsignal(number)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
        timer.start()
        deployment.stop()
        assert process.poll() == -signal.SIGKILL and not timer.is_alive()
    assert not folder.exists() and signal.getsignal(number) is before


def test_a_draft_that_ends_is_started_again_and_then_left_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs speed only; the others are what is served."""
    said: list[str] = []
    deployment = LocalDeployment(LocalOptions(draft="/no/such/draft"), said.append)
    try:
        draft = deployment.spawn("draft_svc")
        for _ in range(local._RESTARTS):
            draft.process.kill()
            draft.process.wait()
            deployment.mend()
            assert deployment.children["draft_svc"] is not draft
            assert said[-1].startswith("the draft ended with signal 9") and "again" in said[-1]
            draft = deployment.children["draft_svc"]
        monkeypatch.setattr(local, "_STEADY_S", 0.0)  # one that ran for long is counted anew
        draft.process.kill()
        draft.process.wait()
        deployment.mend()
        monkeypatch.undo()
        draft = deployment.children["draft_svc"]
        for _ in range(local._RESTARTS):
            draft.process.kill()
            draft.process.wait()
            deployment.mend()
            draft = deployment.children.get("draft_svc", draft)
        assert "draft_svc" not in deployment.children and "without it" in said[-1]
        deployment.mend()
        target = deployment.spawn("target_svc")
        target.process.kill()
        target.process.wait()
        with pytest.raises(SpecwireError, match="the target ended with signal 9"):
            deployment.mend()
    finally:
        deployment.stop()


def test_a_folder_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(SpecwireError, match="TMPDIR"):
        LocalDeployment()
    assert list(deep.iterdir()) == []


def test_children_die_with_their_parent(tmp_path: Path) -> None:
    """The parent is killed outright; the child it started through `coordinator.child` goes too."""
    (tmp_path / "sleeper.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    parent = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'coordinator.child', str(os.getpid()), 'sleeper']\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = str(Path(local.__file__).parents[1])
    paths = os.pathsep.join([root, os.path.join(root, "proto"), str(tmp_path)])
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    assert gone_within(child, 10.0)


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_bench_refuses_a_report_it_could_not_write_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    for flag, file in (("--json", tmp_path / "none" / "out.json"), ("--plot", tmp_path)):
        arguments = ("bench", "--prompts", str(prompts), flag, str(file), "--address", "unix:/x")
        assert call(monkeypatch, *arguments) == 2
        assert f"{flag} is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "accepted"),
    [({"seed": -1}, "0 to 18446744073709551615"), ({"max_tokens": 2**40}, "0 to 4294967295")],
)
def test_an_integer_that_does_not_fit_is_told_its_range(
    options: dict[str, Any], accepted: str
) -> None:
    with pytest.raises(SpecwireError, match=accepted):
        build_request({"prompt": "x", **options})


def test_an_answer_that_takes_too_long_is_shown_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(_Talker):
        @contextmanager
        def stream(self, **options: Any) -> Iterator[Any]:
            def events() -> Iterator[Any]:
                yield Delta("The harbour", (), 0, 0, ())
                raise SpecwireError(Reason.DEADLINE, f"longer than {options['timeout_s']}")

            yield events()

    monkeypatch.setattr(talk, "Client", Slow)
    assert call(monkeypatch, "generate", "x", "--timeout", "2", "--address", "unix:/none") == 1
    assert capsys.readouterr() == ("The harbour\n", "error: longer than 2.0\n")
