"""Which failures of a call are tried again."""

from collections.abc import Sequence
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from jpaged.client.routing.endpoints import SERVING, Endpoint, Endpoints
from jpaged.client.routing.retry import ResumePolicy, RetryState
from jpaged.errors import DeadlineExceeded


def told(code: grpc.StatusCode, reason: str) -> aio.AioRpcError:
    """What a call fails with where a server of ours has told a status."""
    status = status_pb2.Status(code=code.value[0])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="jpaged"))
    trailing = aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return aio.AioRpcError(code, aio.Metadata(), trailing, details="so it is")


def lost(code: grpc.StatusCode) -> aio.AioRpcError:
    """Return what a call fails with whose connection is lost."""
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details="Socket closed")


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_is_not_tried_again_is_not_tried_again_behind_a_fault_either(has_begun):
    endpoints = Endpoints(
        [Endpoint(name, grpc.insecure_channel(f"{name}:1")) for name in ("a", "b", "c")], lambda *_: None
    )
    tries = RetryState(endpoints, None, None, ResumePolicy())
    tries.enter()
    assert tries.wait_s(told(grpc.StatusCode.INTERNAL, "INTERNAL"), has_begun=has_begun) == 0
    tries.enter()
    tries.answered()
    with pytest.raises(DeadlineExceeded, match="so it is"):
        tries.wait_s(told(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"), has_begun=has_begun)


class FirstPlaced:
    """A placement that prefers the first of its servers, as one does whose prefix cache has the prompt."""

    def place(self, key: object, usable: Sequence[Endpoint]) -> Endpoint:
        return min(usable, key=lambda one: one.name)


@pytest.mark.parametrize("key", [None, b"key"])
@pytest.mark.parametrize(
    ("code", "reason"),
    [(grpc.StatusCode.INTERNAL, "INTERNAL"), (grpc.StatusCode.UNAVAILABLE, ""), (grpc.StatusCode.UNKNOWN, "")],
)
def test_a_call_leaves_a_server_that_fails_though_its_health_is_good(key, code, reason):
    answers = []
    endpoints = Endpoints(
        [Endpoint(name, grpc.insecure_channel(f"{name}:1")) for name in ("a", "b", "c")],
        lambda endpoint, question: answers.append((endpoint, question)),
        placement=FirstPlaced(),
        is_watched=True,
    )
    tries, used = RetryState(endpoints, key, None, ResumePolicy()), []
    for _ in range(2 if reason else 3):
        used.append(tries.enter().name)
        if len(used) < (2 if reason else 3):
            assert tries.wait_s(told(code, reason) if reason else lost(code)) == 0
        for endpoint, question in answers:
            if question == "health":
                endpoints.handle_answer(endpoint, question, SimpleNamespace(status=SERVING), None)
    assert len(set(used)) == len(used)


def test_a_call_leaves_a_server_that_fails_and_is_none_any_more():
    bad, good = (Endpoint(name, grpc.insecure_channel(f"{name}:1")) for name in ("bad", "good"))
    endpoints = Endpoints([bad, good], lambda *_: None, placement=FirstPlaced(), is_watched=True)
    tries = RetryState(endpoints, b"key", None, None)
    assert tries.enter() is bad
    endpoints.remove(bad)  # its health has changed, too
    assert tries.wait_s(told(grpc.StatusCode.INTERNAL, "INTERNAL")) == 0
    assert tries.enter() is good
