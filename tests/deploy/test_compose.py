"""The compose file: by the official schema, by our own rules, and by running what it says."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from specwire.client import Client
from tests.deploy.compose_file import FILE, ROOT, LocalServices, load, of_profile
from tests.deploy.json_schema import Validator
from tests.engine.test_dflash import write_draft
from tests.engine.tiny import VOCAB, write_llama

PROFILES = ("cpu", "gpu", "cpu-colocated", "gpu-colocated")


@pytest.fixture(scope="module")
def schema() -> Validator:
    text = (Path(__file__).parent / "compose-spec.json").read_text()
    return Validator(json.loads(text))


def test_the_file_fits_the_compose_schema(schema: Validator) -> None:
    assert list(schema.errors(load())) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("services.target.helthcheck", {}),
        ("services.target.healthcheck.retries", [3]),
        ("services.target.healthcheck.interval_s", "1s"),
        ("services.target.command", 7),
        ("services.target.ports", [7001, 7001]),
        ("services.coordinator.depends_on.target", {"condition": "healthy"}),
        ("services.coordinator.depends_on.draft", {}),
        ("services.draft.deploy.resources.limits.cpu", 1),
        ("services.draft-gpu.deploy.resources.reservations.devices", [{"driver": "nvidia"}]),
        ("services.target.volumes", [{"source": "cache"}]),
        ("networks.links.internal", {"a": 1}),
        ("service", {}),
    ],
)
def test_the_schema_check_sees_mistakes(schema: Validator, path: str, value: object) -> None:
    document: Any = copy.deepcopy(load())
    *above, last = path.split(".")
    place = document
    for part in above:
        place = place[part]
    place[last] = value
    errors = list(schema.errors(document))
    assert errors and all(e.startswith(f".{path.split('.')[0]}") for e in errors)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_is_a_whole_deployment(profile: str) -> None:
    services = of_profile(load(), profile)
    variant, _, colocated = profile.partition("-")
    draft = [] if colocated else ["draft_svc"]
    rooms = sorted(s["command"][2] for s in services.values())
    assert rooms == ["coordinator", *draft, "target_svc"]
    for name, service in services.items():
        assert service["image"].endswith(f":{variant}"), name
        assert service["build"]["args"]["VARIANT"] == variant
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), "not root"
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]
        assert "privileged" not in service and "/var/run/docker.sock" not in str(service)
        assert service["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "specwire.probe"]
        assert service["deploy"]["resources"]["limits"].keys() == {"memory", "pids"}
        assert not [
            key for key in service["environment"] if re.search("TOKEN|SECRET|KEY|PASS", key)
        ]
        devices = service["deploy"]["resources"].get("reservations", {}).get("devices", [])
        wants_gpu = variant == "gpu" and service["command"][2] != "coordinator"
        assert [d["capabilities"] for d in devices] == ([["gpu"]] if wants_gpu else [])
        # Only the coordinator can be reached from outside, and only from this machine.
        published = service.get("ports", [])
        assert published == (["127.0.0.1:7000:7000"] if "coordinator" in name else [])
        assert (set(service["networks"]) - {"links"} == {"public"}) == bool(published)
    assert load()["networks"]["links"]["internal"]


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_the_draft_has_one_place(variant: str) -> None:
    """Pushing rows and the draft's address belong to the draft service; the same draft is the
    target's own where there is none. Everything else of the target stays as it is."""
    separate, colocated = (
        {s["command"][2]: s for s in of_profile(load(), profile).values()}
        for profile in (variant, f"{variant}-colocated")
    )
    apart, inside = (dict(found["target_svc"]["environment"]) for found in (separate, colocated))
    assert apart.pop("SPECWIRE_TARGET_PUSH_ALLOW") == "draft:7002"
    draft = separate["draft_svc"]["environment"]["SPECWIRE_DRAFT_DRAFT"]
    assert inside.pop("SPECWIRE_TARGET_DRAFT_CHECKPOINT") == draft
    # Read on a GPU only.
    assert apart.pop("SPECWIRE_TARGET_WARM_DRAFT", None) == (draft if variant == "gpu" else None)
    assert inside.pop("SPECWIRE_TARGET_COLOCATE") == "dflash"
    assert apart == inside
    commands = [found["coordinator"]["command"] for found in (separate, colocated)]
    assert [word for word in commands[0] if word not in commands[1]] == ["--draft=draft:7002"]
    reserved = [found["target_svc"]["deploy"] for found in (separate, colocated)]
    assert reserved[0] == reserved[1]


def test_variables_of_compose_alone_cannot_be_mistaken_for_settings() -> None:
    """A service refuses unknown variables under its prefix; a shell may hold both kinds."""
    passed = {key for s in load()["services"].values() for key in s["environment"]}
    prefixes = ("SPECWIRE_TARGET_", "SPECWIRE_DRAFT_", "SPECWIRE_COORDINATOR_")
    named = set(re.findall(r"\$\{(\w+)", FILE.read_text()))
    assert {name for name in named if name.startswith(prefixes)} <= passed
    described = (ROOT / "deploy" / "README.md").read_text()
    assert [name for name in sorted(named) if f"`{name}`" not in described] == []


def test_the_image() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    final = text.rpartition("\nFROM ")[2]
    assert re.search(r"ARG PYTHON=3\.\d+\.\d+-slim-\w+\n", text), "the base is pinned by its tag"
    assert "USER 10001:10001" in final and "pip install" not in final
    assert {word for word in ("gcc", "g++", "make", "git", "curl") if f" {word} " in final} == {
        "gcc"
    }
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    rooms = {"proto", "engine", "target_svc", "draft_svc", "coordinator"}
    assert copied == rooms
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} >= rooms


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with a tiny random one whose tokenizer knows 96 words."""
    folder = tmp_path_factory.mktemp("models")
    write_llama(folder / "tiny")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.save(str(folder / "tiny" / "tokenizer.json"))
    write_draft(folder / "draft")
    return folder


@pytest.fixture(params=["cpu", "cpu-colocated"])
def running(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalServices]:
    variables = {
        "SPECWIRE_MODEL": "/models/tiny",
        "SPECWIRE_DRAFT": "/models/draft",
        "SPECWIRE_DRAFT_METHODS": "dflash",
    }
    services = of_profile(load(variables), request.param)
    local = LocalServices(services, {"/models": tiny, "/var/cache/specwire": tmp_path})
    try:
        local.start("coordinator" if request.param == "cpu" else "coordinator-colocated")
        yield local
    finally:
        local.stop()


def test_the_commands_of_the_file_serve(running: LocalServices) -> None:
    """Commands, environment, health checks and order are the file's own."""
    names = list(running.processes)
    colocated = len(names) == 2
    places = ["target-colocated"] if colocated else ["target", "draft"]
    assert names == [*places, names[-1]] and names[-1].startswith("coordinator")
    address = running.here("127.0.0.1:7000")
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    with Client(address) as client:
        info = client.info()
        assert {w.role: w.state for w in info.workers} == {"target": "ready", "draft": "ready"}
        results = [
            client.generate(
                token_ids=prompt,
                max_tokens=400,
                ignore_eos=True,
                temperature=0.0,
                return_token_ids=True,
                method=method,
            )
            for method in ("plain", "dflash")
        ]
    assert results[0].token_ids == results[1].token_ids and len(results[0].token_ids) == 400
    record = results[1].acceptance
    assert record.method == "dflash" and record.draft_tokens > 0
    assert record.placement == ("colocated" if colocated else "separate")
    statuses = running.stop()
    assert statuses == dict.fromkeys(names, 0)
    assert next(iter(statuses)) == names[-1]
    assert not running.healthy(names[-1])
