"""The public API's checks, the handshake, and what GetInfo shows."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from coordinator.handshake import check_drafter, check_target, check_worker
from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from specwire.client import AsyncClient
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, draft_pb2, generate_pb2, target_pb2
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, public_stub, row_drafter, world
from tests.service.fleet_harness import until
from tests.service.toy_engine import VOCAB, continuation

_F, _P = Reason.FIELD_INVALID, Reason.PROMPT_TOO_LONG
_LONG = [1] * 512

BAD: list[tuple[dict[str, Any], Reason, str, str]] = [
    ({"token_ids": []}, _F, "tokens", "empty"),
    ({"prompt": ""}, _F, "prompt", "empty"),
    ({"messages": [{"role": "user", "content": "x"}]}, _F, "chat", "messages"),
    ({"token_ids": _LONG}, _P, "tokens", "512 tokens"),
    ({"token_ids": [1, VOCAB]}, Reason.VOCAB_RANGE, "tokens.ids[1]", str(VOCAB)),
    ({"temperature": -0.1}, _F, "sampling.temperature", "-0.1"),
    ({"temperature": math.nan}, _F, "sampling.temperature", "nan"),
    ({"temperature": math.inf}, _F, "sampling.temperature", "inf"),
    ({"top_p": 0.0}, _F, "sampling.top_p", "0.0"),
    ({"top_p": 1.5}, _F, "sampling.top_p", "1.5"),
    ({"top_p": math.nan}, _F, "sampling.top_p", "nan"),
    ({"max_tokens": 0}, _F, "max_tokens", "0"),
    ({"max_tokens": 509}, _F, "max_tokens", "509"),
    ({"stop": ["x"] * 17}, _F, "stop", "17 strings"),
    ({"stop": [""]}, _F, "stop[0]", "0 characters"),
    ({"stop_token_ids": [VOCAB]}, Reason.VOCAB_RANGE, "stop_token_ids[0]", str(VOCAB)),
    ({"model": "other"}, Reason.MODEL_UNKNOWN, "model", "other"),
    ({"method": "eagle"}, Reason.METHOD_UNKNOWN, "speculation.method", "eagle"),
    ({"num_speculative_tokens": 8}, _F, "speculation.num_speculative_tokens", "8"),
]


async def test_what_a_request_may_say() -> None:
    async with world(ScriptedDraft()) as made:
        for options, reason, field, value in BAD:
            with pytest.raises(SpecwireError) as caught:
                await made.generate(**options)
            error = caught.value
            assert error.reason is reason, options
            assert error.metadata["field"] == field
            assert error.metadata["value"].strip("'").startswith(value)
            assert error.metadata["accepted"]
        with pytest.raises(SpecwireError) as caught:
            await made.generate(method="eagle")
        assert "plain, toy" in caught.value.message
        assert not made.host.servicer.sessions
        # The edges of what is accepted.
        result = await made.generate(max_tokens=508, ignore_eos=True)
        assert list(result.token_ids) == continuation(PROMPT, 508)


async def test_metrics_count_requests_tokens_and_fallbacks() -> None:
    async with world(ScriptedDraft(), num_speculative_tokens=4) as made:
        await made.generate()
        value = made.host.metrics.registry.get_sample_value
        done = {"method": "toy", "outcome": "ok"}
        assert value("specwire_coordinator_requests_total", done) == 1
        assert value("specwire_coordinator_tokens_total", {"origin": "draft"}) == 31
        assert value("specwire_coordinator_tokens_total", {"origin": "target"}) == 9
        assert value("specwire_coordinator_sessions") == 0
        await made.draft.stop()  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
        await made.generate()
        down = {"cause": "draft_down"}
        assert value("specwire_coordinator_fallbacks_total", down) == 1
        await made.start_draft()


async def test_waits_for_a_turn_to_be_read_are_counted_where_there_are_many() -> None:
    """Few sessions wait for nobody; of many plain ones, which run ahead, some do."""
    async with world(None, {"pages": 256}) as made:
        value = made.host.metrics.registry.get_sample_value
        name = "specwire_coordinator_turn_wait_seconds"
        alone = await made.generate()
        assert alone.acceptance.phase_ms["turn"] == 0 and value(f"{name}_count") == 0
        calls = [made.generate(token_ids=[*PROMPT, 20 + i], max_tokens=100) for i in range(16)]
        many = await asyncio.gather(*calls)
        waited_ms = sum(one.acceptance.phase_ms["turn"] for one in many)
        count, seconds = value(f"{name}_count"), value(f"{name}_sum")
        assert count and seconds and seconds * 1e3 == pytest.approx(waited_ms)


async def test_info_names_the_workers_and_methods() -> None:
    async with world(ScriptedDraft()) as made:
        info = await made.client.info()
        assert [(w.role, w.state) for w in info.workers] == [
            ("target", "ready"),
            ("draft", "ready"),
        ]
        assert list(info.methods) == ["plain", "toy"] and info.default_method == "toy"
        assert info.workers[1].methods == ("toy",)
        assert info.model.name == "toy" and info.default_exactness == "exact"


async def test_who_is_not_there_and_who_is_somebody_else_is_said_by_role_and_address() -> None:
    """A target's address with a draft service behind it, and nobody where a draft should be."""
    async with world(ScriptedDraft()) as made:
        fields = {"target": (made.draft_address,), "draft": (f"unix:{made.folder}/none",)}
        settings = CoordinatorSettings(address=f"unix:{made.folder}/c2", drain_ms=0, **fields)
        async with CoordinatorHost(settings) as host, AsyncClient(host.address) as client:
            await until(lambda: all(worker.link.reason for worker in host.fleet.workers))
            target, draft = (await client.info()).workers
            assert target.state == "refused"
            assert f"what answers at {made.draft_address} is no Specwire target" in target.reason
            assert f"no draft answers at unix:{made.folder}/none" in draft.reason
            with pytest.raises(SpecwireError) as caught:
                await client.generate(prompt="x", timeout_s=1)
            assert caught.value.reason is Reason.NO_TARGET
            assert caught.value.message.count(made.draft_address) == 1
            assert target.reason in caught.value.message


async def test_a_drafter_that_does_not_fit_is_refused_with_both_values() -> None:
    draft = ScriptedDraft(target_hidden_size=4096)
    async with world(ScriptedDraft()) as made:
        await made.draft.stop()  # type: ignore[union-attr]
        await draft.start(made.draft_address)
        worker = made.host.fleet.drafts[0]
        for _ in range(100):
            if worker.link.state == "refused":
                break
            await asyncio.sleep(0.05)
        info = await made.client.info()
        assert info.workers[1].state == "refused"
        assert "4096" in info.workers[1].reason and "8" in info.workers[1].reason
        assert list((await made.generate()).token_ids) == continuation(PROMPT, 40)
        with pytest.raises(SpecwireError) as caught:
            await made.generate(method="toy")
        assert caught.value.reason is Reason.METHOD_UNKNOWN
        assert "4096" in caught.value.message
        await draft.stop()
        await made.start_draft()


def _target(**fields: Any) -> target_pb2.TargetServiceGetInfoResponse:
    return target_pb2.TargetServiceGetInfoResponse(
        worker=common_pb2.WorkerInfo(protocol_major=1, incarnation=1),
        model=common_pb2.ModelInfo(
            fingerprint="fp",
            tokenizer_hash="th",
            vocab_size=1000,
            hidden_size=8,
            layer_count=4,
            max_length_tokens=512,
        ),
        tap_layer_count=4,
        row_encodings=[common_pb2.ROW_ENCODING_TAPS],
        row_dtype=common_pb2.D_TYPE_BFLOAT16,
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "wanted", "has"),
    [
        ({"target_hidden_size": 9}, "9", "8"),
        ({"target_layer_count": 5}, "5", "4"),
        ({"target_vocab_size": 1001}, "1001", "1000"),
        ({"tokenizer_hash": "other"}, "other", "th"),
        ({"target_fingerprint": "other"}, "other", "fp"),
        ({"mask_token_id": 1000}, "1000", "below 1000"),
        ({"max_draft_tokens": 0}, "0", "1 or more"),
        ({"block_size": 7, "slot_mode": draft_pb2.SLOT_MODE_FILL_IN}, "7", "6"),
        ({"block_size": 6, "slot_mode": draft_pb2.SLOT_MODE_NEXT_TOKEN}, "7", "6"),
        (row_drafter(tap_ids=(1, 4)), "[1, 4]", "below 4"),
        (row_drafter(tap_ids=(3, 1)), "[3, 1]", "rising"),
        (row_drafter(dtype=common_pb2.D_TYPE_FLOAT32), "FLOAT32", "BFLOAT16"),
        (row_drafter(width=24), "24", "16"),
        (row_drafter(convention=0), "UNSPECIFIED", "OUTPUT_OF_LAYER"),
        (row_drafter(encoding=0), "UNSPECIFIED", "TAPS"),
    ],
)
def test_mismatches_name_both_values(fields: dict[str, Any], wanted: str, has: str) -> None:
    drafter = draft_pb2.DrafterInfo(**{"method": "toy", "max_draft_tokens": 7, **fields})
    with pytest.raises(SpecwireError) as caught:
        check_drafter(_target(), drafter)
    assert caught.value.reason is Reason.MODEL_MISMATCH
    assert wanted in caught.value.metadata["draft"]
    assert has in caught.value.metadata["target"]


def test_what_is_unset_fits_any_target() -> None:
    check_drafter(_target(), draft_pb2.DrafterInfo(method="toy", max_draft_tokens=7))
    check_drafter(
        _target(), draft_pb2.DrafterInfo(method="toy", max_draft_tokens=7, **row_drafter())
    )


def test_protocol_and_drive_are_checked() -> None:
    with pytest.raises(SpecwireError, match="major 2"):
        check_worker("draft", common_pb2.WorkerInfo(protocol_major=2, incarnation=1))
    drive = target_pb2.TargetServiceGetInfoResponse.DRIVE_ENGINE
    with pytest.raises(SpecwireError, match="ENGINE"):
        check_target(_target(drive=drive))
    for field in ("vocab_size", "max_length_tokens"):
        target = _target()
        setattr(target.model, field, 0)
        with pytest.raises(SpecwireError, match="the target has 0; accepted: 1 or more"):
            check_target(target)
    with pytest.raises(SpecwireError, match="incarnation"):
        check_worker("draft", common_pb2.WorkerInfo(protocol_major=1))


def test_settings_are_frozen_and_refuse_what_is_unknown() -> None:
    settings = CoordinatorSettings.load(
        ["--address", "unix:/c", "--target", "unix:/t", "--draft", "unix:/a,unix:/b"]
    )
    assert settings.draft == ("unix:/a", "unix:/b")
    assert settings.target == ("unix:/t",)
    assert CoordinatorSettings.load(["--target", "a:1,b:2"]).target == ("a:1", "b:2")
    with pytest.raises(SpecwireError) as caught:
        CoordinatorSettings.load(["--target", ","])
    assert caught.value.metadata["field"] == "target"
    assert caught.value.metadata["accepted"] == "at least one address"
    with pytest.raises(SpecwireError) as caught:
        CoordinatorSettings.load(["--max-sessions", "0"])
    assert caught.value.reason is Reason.SETTINGS_INVALID
    assert caught.value.metadata["field"] == "max_sessions"


@pytest.mark.parametrize("field", ["target", "draft"])
@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("nonsense", "host:port"),
        ("unix:", "unix:/path"),
        ("host:", "host:port"),
        ("host:99999", "65535"),
        ("a b:1", "host:port"),
        ("unix:/a,unix:/a", "once"),
    ],
)
def test_addresses_are_checked_before_the_start(field: str, given: str, accepted: str) -> None:
    """Found wrong only when it connects, a worker would look absent for ever."""
    with pytest.raises(SpecwireError) as caught:
        CoordinatorSettings.load([f"--{field}", given])
    assert caught.value.reason is Reason.SETTINGS_INVALID
    assert caught.value.metadata["field"] == field
    assert accepted in caught.value.metadata["accepted"]
    fine = ("dns:///host:1", "[::1]:65535", "unix:/p")
    assert CoordinatorSettings.load(["--target", ",".join(fine)]).target == fine


async def test_a_request_without_input_is_refused() -> None:
    async with world() as made, public_stub(made) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(generate_pb2.GenerateRequest()):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
