"""Which failures of a call are tried again."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from jpaged.client.routing.endpoints import Endpoint, Endpoints
from jpaged.client.routing.tries import Resuming, Tries
from jpaged.errors import DeadlineExceeded


def told(code: grpc.StatusCode, reason: str) -> aio.AioRpcError:
    """What a call fails with where a server of ours has told a status."""
    status = status_pb2.Status(code=code.value[0])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="jpaged"))
    trailing = aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return aio.AioRpcError(code, aio.Metadata(), trailing, details="so it is")


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_is_not_tried_again_is_not_tried_again_behind_a_fault_either(has_begun):
    endpoints = Endpoints(
        [Endpoint(name, grpc.insecure_channel(f"{name}:1")) for name in ("a", "b", "c")], lambda *_: None
    )
    tries = Tries(endpoints, None, None, Resuming())
    tries.enter()
    assert tries.wait_s(told(grpc.StatusCode.INTERNAL, "INTERNAL"), has_begun=has_begun) == 0
    tries.enter()
    tries.answered()
    with pytest.raises(DeadlineExceeded, match="so it is"):
        tries.wait_s(told(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"), has_begun=has_begun)
