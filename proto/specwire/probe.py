"""Health check command for containers: `python -m specwire.probe ADDRESS [--service NAME]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.errors import from_rpc_error
from specwire.rpc import channel_options


def check(address: str, service: str = "", timeout_s: float = 3.0) -> tuple[bool, str]:
    """Whether the service serves, and one line that says so."""
    name = service or "server"
    options = [*channel_options(link=False), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False, f"{name} at {address}: SERVICE_UNKNOWN"
            reason = from_rpc_error(error)
            return False, f"{name} at {address}: {reason.reason}"
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return reply.status == health_pb2.HealthCheckResponse.SERVING, f"{name} at {address}: {state}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m specwire.probe",
        description="Asks a gRPC server for its health: exit status 0 when it serves, 1 when not.",
    )
    parser.add_argument("address", help="host:port or unix:/path")
    parser.add_argument(
        "--service", default="", metavar="NAME", help="full service name (default: the server)"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, metavar="S", help="seconds to wait (default: 3)"
    )
    options = parser.parse_args(argv)
    serving, line = check(options.address, options.service, options.timeout_s)
    print(line)
    return 0 if serving else 1


if __name__ == "__main__":
    sys.exit(main())
