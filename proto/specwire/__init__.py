"""Specwire: speculative decoding as gRPC services.

`specwire.client` is the SDK; `specwire.v1` holds the wire messages.
"""
