"""Mutual proof of knowledge of the cluster's secret, which never travels: each end answers the other's challenge.

    process i                                          process 0
    JOIN       a nonce ───────────────────────────────>
    <─────────────────────── CHALLENGE  another nonce, HMAC-SHA256(secret, "process 0", both)
    PROOF      HMAC-SHA256(secret, "another process", both) ──>
    HELLO ...

Later messages are neither encrypted nor signed: this does not protect against an attacker who can change the traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from jpaged.device.multihost.channel import Channel, Kind
from jpaged.errors import Unavailable

_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_OPTION = "cluster_secret_file"


def prove(channel: Channel, secret: bytes) -> None:
    """Require process 0 to prove that it knows the secret, and prove that this process does.

    Raises:
        Unavailable: process 0 does not know it, or has none.
        EOFError, OSError: the other end is gone.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(Kind.JOIN, mine)
    kind, payload = channel.receive()
    if kind is Kind.FAILED:
        raise Unavailable(payload.decode(errors="replace"))
    theirs, proof = bytes(payload[:_NONCE_BYTES]), bytes(payload[_NONCE_BYTES:])
    if kind is not Kind.CHALLENGE or not hmac.compare_digest(proof, _proof(secret, b"process 0", mine, theirs)):
        raise Unavailable(f"{channel.peer} is not process 0: it does not have the secret ({_OPTION})")
    channel.send(Kind.PROOF, _proof(secret, b"another process", mine, theirs))


def require_proof(channel: Channel, secret: bytes | None, max_hello_bytes: int) -> bytearray:
    """Wait for another process's HELLO, after its proof if there is a secret, and return the HELLO.

    Raises:
        Unavailable: it does not know the secret, or only one of the two has a secret; it receives the error.
        EOFError, OSError: the other end is gone, or too slow.
    """
    kind, payload = channel.receive()
    if kind is Kind.JOIN and secret is not None:
        if len(payload) != _NONCE_BYTES:
            raise EOFError(f"received a nonce of {len(payload)} bytes")
        mine, theirs = secrets.token_bytes(_NONCE_BYTES), bytes(payload)
        channel.send(Kind.CHALLENGE, mine, _proof(secret, b"process 0", theirs, mine))
        kind, payload = channel.receive()
        expected = _proof(secret, b"another process", theirs, mine)
        if kind is not Kind.PROOF or not hmac.compare_digest(bytes(payload), expected):
            raise _told(channel, f"it does not have the secret ({_OPTION})")
        channel.expect(max_hello_bytes)
        kind, payload = channel.receive()
    elif kind is Kind.JOIN:
        raise _told(channel, f"it has a secret ({_OPTION}), but process 0 has none")
    elif secret is not None:
        raise _told(channel, f"it has no secret, but process 0 requires one ({_OPTION})")
    if kind is not Kind.HELLO:
        raise EOFError(f"HELLO was expected, {kind.name} came")
    return payload


def _proof(secret: bytes, who: bytes, nonce: bytes, other: bytes) -> bytes:
    return hmac.digest(secret, b"jpaged " + who + b"\0" + nonce + other, "sha256")


def _told(channel: Channel, problem: str) -> Unavailable:
    channel.send(Kind.FAILED, problem.encode())
    return Unavailable(problem)
