"""How a client connects: options of the channel, one retry policy, and the paths of the methods."""

from __future__ import annotations

import json

from jpaged._proto.v1 import control_pb2, inference_pb2

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name

# UNAVAILABLE alone means that nothing was done. gRPC retries a call until its first message, never inside a stream.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": _INFERENCE}, {"service": _CONTROL}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    # A stream is silent while its prompt is computed; a ping every 10 s tells a long prompt from a dead server.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
