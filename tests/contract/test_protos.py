"""Rules that the wire format keeps, read from the generated descriptors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from specwire.v1 import common_pb2, draft_pb2, generate_pb2, target_pb2

ROOT = Path(__file__).parents[2]
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (common_pb2, draft_pb2, generate_pb2, target_pb2)
]
# One number per token, a handful per message: lists, not tensors.
FLOAT_WAIVERS = {"Proposal.confidences", "Verdict.margins", "Delta.margins"}


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting.extend(message.nested_types)
        yield message


def every_message() -> list[Descriptor]:
    return [message for file in FILES for message in messages(file)]


def test_no_tensor_travels_as_repeated_float() -> None:
    """WC-32, and WC-18: no draft law travels, so that none can be wrong."""
    kinds = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
    found = {
        f"{message.name}.{field.name}"
        for message in every_message()
        for field in message.fields
        if field.is_repeated and field.type in kinds
    }
    assert found == FLOAT_WAIVERS


def test_proto_is_no_package() -> None:
    """It would shadow proto-plus, which every google-cloud client imports."""
    assert not (ROOT / "proto" / "__init__.py").exists()


def test_sampling_fields_know_whether_they_are_set() -> None:
    for field in common_pb2.Sampling.DESCRIPTOR.fields:
        # An empty list or map is the default, so these need no presence.
        assert field.has_presence or field.name in ("logit_bias", "bad_sequences"), field.name
    for message, name in (
        (generate_pb2.GenerateRequest, "max_tokens"),
        (generate_pb2.Speculation, "num_speculative_tokens"),
        (generate_pb2.Finished, "stop_token_id"),
        (draft_pb2.DrafterInfo, "mask_token_id"),
    ):
        assert message.DESCRIPTOR.fields_by_name[name].has_presence
    greedy = common_pb2.Sampling(temperature=0.0)
    back = common_pb2.Sampling.FromString(greedy.SerializeToString())
    assert back.HasField("temperature") and not back.HasField("top_p")


def test_names_follow_the_style() -> None:
    for file in FILES:
        assert file.package == "specwire.v1" and file.name.startswith("specwire/v1/")
        for message in messages(file):
            assert re.fullmatch(r"([A-Z][a-z0-9]*)+", message.name) or message.nested_types
            for field in message.fields:
                assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name), field.full_name
        enums = [*file.enum_types_by_name.values()]
        enums += [enum for message in messages(file) for enum in message.enum_types]
        for enum in enums:
            prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum.name).upper() + "_"
            assert all(value.name.startswith(prefix) for value in enum.values), enum.name
            assert enum.values[0].name == prefix + "UNSPECIFIED" and enum.values[0].number == 0


def test_each_rpc_has_its_own_request_and_response() -> None:
    used: list[str] = []
    for file in FILES:
        for service in file.services_by_name.values():
            assert service.name.endswith("Service")
            for method in service.methods:
                for message, end in (
                    (method.input_type, "Request"),
                    (method.output_type, "Response"),
                ):
                    accepted = (method.name + end, service.name + method.name + end)
                    assert message.name in accepted
                    used.append(message.full_name)
    assert used and len(used) == len(set(used))


def test_every_field_number_is_in_order_and_unique_in_text() -> None:
    """Nothing was renumbered by hand: numbers run from 1 without gaps before the first release."""
    for message in every_message():
        numbers = sorted(field.number for field in message.fields)
        assert numbers == list(range(1, len(numbers) + 1)), message.full_name


def run(program: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generated_code_loads_under_warnings_as_errors() -> None:
    modules = [f"specwire.v1.{n}_pb2{e}" for n in NAMES for e in ("", "_grpc")]
    run("import " + ", ".join(modules), "-W", "error")


NAMES = ("common", "draft", "generate", "target")


@pytest.mark.parametrize("name", NAMES)
def test_generated_code_fits_the_oldest_runtime(name: str) -> None:
    """Code made by a protobuf 7 tool refuses to load on the protobuf 6 that we still allow."""
    text = (ROOT / "proto" / "specwire" / "v1" / f"{name}_pb2.py").read_text()
    match = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", text)
    assert match and (int(match[1]), int(match[2])) <= (6, 33)


def test_the_sdk_is_light() -> None:
    heavy = ["torch", "numpy", "pydantic", "uvloop", "prometheus_client", "yaml", "transformers"]
    program = f"import sys, specwire.client; print([m for m in {heavy} if m in sys.modules])"
    assert run(program, "-W", "error") == "[]\n"


def test_the_package_is_typed() -> None:
    assert (ROOT / "proto" / "specwire" / "py.typed").exists()
