"""The file of keys: what it says, what is refused of it, and what a token finds."""

import asyncio
import hashlib
import hmac
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from jpaged.access import tls
from jpaged.access.authenticator import Authenticator, CallContext
from jpaged.access.keys import ApiKey, Role, TenantLimits, make_keys, read_keys
from jpaged.access.tls import BackgroundLook, CertificateFiles
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, PermissionDenied, Unauthenticated

TOKEN, OTHER, HASHED = "a-token-of-acme-1234", "a-token-of-acme-5678", "a-token-of-bolt-1234"
FILE = f"""
[limits]
requests_per_minute = 600
max_n = 4

[tenants.acme]
requests_per_minute = 60
max_streams = 2

[[keys]]
id = "acme-1"
tenant = "acme"
token = "{TOKEN}"

[[keys]]
id = "acme-2"
tenant = "acme"
token = "{OTHER}"
role = "control"

[[keys]]
id = "bolt-1"
tenant = "bolt"
token = "sha256:{hashlib.sha256(HASHED.encode()).hexdigest()}"
role = "observe"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def test_tokens_and_their_digests_find_keys(path: Path) -> None:
    keys = read_keys(str(path))
    assert keys.find(TOKEN) == ApiKey("acme-1", "acme", Role.INFERENCE)
    assert keys.find(OTHER) == ApiKey("acme-2", "acme", Role.CONTROL)
    assert keys.find(HASHED) == ApiKey("bolt-1", "bolt", Role.OBSERVE)
    assert keys.find(TOKEN[:-1]) is keys.find("") is keys.find(hashlib.sha256(HASHED.encode()).hexdigest()) is None
    assert TOKEN not in repr(keys)


def test_a_token_is_compared_with_every_key_whichever_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared, compare = read_keys(str(path)), [], hmac.compare_digest

    def spied(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spied)
    for token in (TOKEN, HASHED, "x"):
        compared.clear()
        keys.find(token)
        assert compared == [(32, 32)] * 3


def test_a_tenants_limits_are_its_own_and_else_those_of_all(path: Path) -> None:
    keys = read_keys(str(path))
    assert keys.get_limits("acme") == TenantLimits(requests_per_minute=60, max_streams=2, max_n=4)
    assert keys.get_limits("bolt") == TenantLimits(requests_per_minute=600, max_n=4)


KEY = '[[keys]]\nid = "a"\ntenant = "a"\ntoken = "0123456789abcdef"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "keys: is missing or empty"),
        ("keys = 3", "keys: is missing or empty"),
        ("[[keys", "is not TOML"),
        ("[limit]\n" + KEY, "file.limit: is unknown: must be one of keys, limits, tenants"),
        ("[limits]\nmax_n = 0\n" + KEY, "limits.max_n: 0 is not an integer of 1 or more"),
        ("[limits]\nmax_n = true\n" + KEY, "limits.max_n: True is not an integer"),
        ("[tenants.b]\nrpm = 1\n" + KEY, "tenants.b.rpm: is unknown"),
        ('[tenants]\n"b\\n" = {}\n' + KEY, "tenants: 'b.n' is not 1 to 128 printable ASCII"),
        (KEY + 'role = "admin"', "role: 'admin' is not one of observe, inference, control"),
        (KEY + "expires = 3", r"keys\[0\].expires: is unknown"),
        (KEY.replace('id = "a"\n', ""), r"keys\[0\].id: is missing"),
        (KEY.replace("0123456789abcdef", "two words"), r"keys\[0\].token: must be 1 to 512"),
        (KEY.replace("0123456789abcdef", ""), r"keys\[0\].token: must be 1 to 512"),
        (KEY.replace("0123456789abcdef", "sha256:12"), r"keys\[0\].token: sha256: is not followed by 64"),
        (KEY + KEY, r"keys\[1\].id: is also that of another key"),
        (KEY + KEY.replace('id = "a"', 'id = "b"'), r"keys\[1\].token: is also that of another key"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_no_token_told(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=f"api_keys: .*{problem}") as refusal:
        read_keys(str(path))
    assert "0123456789abcdef" not in str(refusal.value)
    with pytest.raises(InvalidArgument, match=r"api_keys: .*missing.toml cannot be read: No such file"):
        read_keys(str(tmp_path / "missing.toml"))


@pytest.mark.parametrize(
    ("make", "last", "out", "problem"),
    [
        (lambda n: KEY.replace("0123456789abcdef", "x" * n), 512, 513, r"keys\[0\].token: must be 1 to 512"),
        (lambda n: KEY.replace('id = "a"', f'id = "{"x" * n}"'), 128, 129, r"keys\[0\].id: .* 1 to 128"),
        (lambda n: KEY.replace('tenant = "a"', f'tenant = "{"x" * n}"'), 128, 129, r"keys\[0\].tenant: .* 1 to 128"),
        (lambda n: f"[limits]\nmax_n = {n}\n{KEY}", 1, 0, "limits.max_n: 0 is not"),
        (lambda n: f"[limits]\nmax_n = {n}\n{KEY}", 2**62, 2**62 + 1, r"limits.max_n: \d+ is not"),
    ],
)
def test_a_file_passes_up_to_its_limits_and_no_further(
    tmp_path: Path, make: Any, last: int, out: int, problem: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(make(last))
    keys = read_keys(str(path))
    assert len(keys.digests) == 1
    path.write_text(make(out))
    with pytest.raises(InvalidArgument, match=problem):
        read_keys(str(path))


def test_a_key_of_the_greatest_length_opens() -> None:
    token = "x" * 512
    keys = make_keys([token])
    assert keys.get_key([f"Bearer {token}"]).id == "api-key-0"


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ([], "is missing"),
        ([f"Bearer {TOKEN}", f"Bearer {TOKEN}"], "is given 2 times"),
        ([TOKEN], "is not `Bearer <key>`"),
        ([f"Basic {TOKEN}"], "is not `Bearer <key>`"),
        (["Bearer "], "is not `Bearer <key>`"),
        ([f"Bearer {TOKEN}x"], "is not one of this server's"),
        (["Bearer " + "x" * 100_000], "is not one of this server's"),
        (["Bearer \udcff"], "is not one of this server's"),
    ],
)
def test_a_header_without_a_known_key_is_refused(path: Path, headers: list[str], problem: str) -> None:
    with pytest.raises(Unauthenticated, match=f"authorization: .*{problem}"):
        read_keys(str(path)).get_key(headers)


def gate_of(path: Path) -> Authenticator:
    gate = Authenticator(EngineConfig.load({"api_keys": str(path)}).access)
    gate.read()
    return gate


def entered(gate: Authenticator, token: str, *tenants: str) -> CallContext:
    entry = CallContext(face="grpc", method="/x/Y", peer="")
    gate.open(entry, [f"bearer {token}"], tenants)
    return entry


def test_a_key_says_whose_a_call_is_and_no_other_may_be_named(path: Path) -> None:
    gate = gate_of(path)
    assert entered(gate, TOKEN).tenant == entered(gate, TOKEN, "acme").tenant == "acme"
    with pytest.raises(PermissionDenied, match="'bolt' is not the tenant of this key"):
        entered(gate, TOKEN, "bolt")
    with pytest.raises(PermissionDenied, match="'bolt' is not the tenant"):
        entered(gate, TOKEN, "acme", "bolt")


def test_a_role_may_do_what_those_before_it_may(path: Path) -> None:
    gate = gate_of(path)
    entered(gate, OTHER).require(Role.CONTROL, "PinPrefix")
    entered(gate, TOKEN).require(Role.INFERENCE, "Generate")
    with pytest.raises(
        PermissionDenied, match="PinPrefix needs a key of the role control; the role of this key is inference"
    ):
        entered(gate, TOKEN).require(Role.CONTROL, "PinPrefix")
    with pytest.raises(
        PermissionDenied, match="Generate needs a key of the role inference; the role of this key is observe"
    ):
        entered(gate, HASHED).require(Role.INFERENCE, "Generate")


def test_a_file_that_changes_is_read_again_and_a_bad_one_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_of(path)
    replaced = path.with_suffix(".new")
    replaced.write_text(FILE.replace(TOKEN, "a-token-that-is-new"))
    os.replace(replaced, path)
    gate.reload_files()
    assert f"api_keys: reloaded {path}: " in caplog.text
    assert entered(gate, "a-token-that-is-new").tenant == "acme"
    with pytest.raises(Unauthenticated):
        entered(gate, TOKEN)
    path.write_text("[[keys]]\nid = 3")
    gate.reload_files()
    assert "the API keys were not reloaded: api_keys: " in caplog.text
    path.unlink()
    gate.reload_files()
    assert entered(gate, "a-token-that-is-new").tenant == "acme"
    path.write_text(FILE)
    gate.reload_files()
    assert entered(gate, TOKEN).tenant == "acme"


def test_certificates_are_looked_at_with_the_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(path)
    monkeypatch.setattr(gate, "certificates", certificates := Mock(spec=CertificateFiles))
    gate.reload_files()
    certificates.look_again.assert_called_once_with()


async def test_a_look_that_is_slow_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_SLOW_S", 0.0)
    goes_on, looks = threading.Event(), list[bool]()
    look = BackgroundLook("tls_cert", lambda: looks.append(goes_on.wait(60)))
    try:
        for _ in range(2):
            await look.run(0.01)
    finally:
        goes_on.set()
    assert caplog.text.count("tls_cert: reading takes more than 0 s: the previous contents stay in use") == 1
    await look.run(60)
    assert set(looks) == {True}


def test_a_link_that_points_elsewhere_has_changed(path: Path, tmp_path: Path) -> None:
    """As Kubernetes brings new secrets: the folder is another, each file's path and time may stay."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "keys.toml").write_text(FILE.replace(TOKEN, "a-token-of-acme-9999"))
    link = tmp_path / "data"
    link.symlink_to(tmp_path)
    gate = gate_of(link / "keys.toml")
    link.unlink()
    link.symlink_to(tmp_path / "other")
    gate.reload_files()
    assert entered(gate, "a-token-of-acme-9999").tenant == "acme"


async def test_a_file_that_blocks_stops_no_reload_of_others_and_not_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jpaged.access.authenticator.RELOAD_INTERVAL_S", 0.01)
    gate = Authenticator(EngineConfig.load({"api_keys": str(path)}).access)
    gate.read()
    is_blocked, blocks = threading.Event(), threading.Event()
    looks = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look_at_keys() -> None:
        is_blocked.set()
        blocks.wait()

    monkeypatch.setattr(gate, "_look_at_keys", look_at_keys)
    monkeypatch.setattr(
        gate, "_look_at_certificates", lambda: is_blocked.is_set() and loop.call_soon_threadsafe(looks.set)
    )
    watching = asyncio.create_task(gate.watch())
    for _ in range(3):
        looks.clear()
        await looks.wait()
    watching.cancel()
    await asyncio.wait((watching,))
    await loop.shutdown_default_executor()  # as the end of a loop does
    assert any(thread.name == "jpaged-look" and thread.daemon for thread in threading.enumerate())
    blocks.set()


def test_a_pipe_in_the_place_of_the_file_is_not_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Authenticator(EngineConfig.load({"api_keys": str(path)}).access)
    gate.read()
    path.unlink()
    os.mkfifo(path)
    gate.reload_files()
    assert "is a pipe" in caplog.text
    gate.open(entry := CallContext(face="grpc", method="", peer=""), [f"Bearer {TOKEN}"], [])
    assert entry.tenant == "acme"


async def test_a_reload_reads_a_file_that_looks_the_same(path: Path) -> None:
    gate = Authenticator(EngineConfig.load({"api_keys": str(path)}).access)
    gate.read()
    before = gate._keys
    gate.reload_files()
    assert gate._keys is before
    gate.reload()
    gate.reload_files()
    assert gate._keys is not before
    assert gate._keys == before


def test_keys_may_be_options_instead_of_a_file():
    config = EngineConfig.load({"api_key": [TOKEN, OTHER]})
    gate = Authenticator(config.access)
    gate.read()
    entry = CallContext(face="grpc", method="/x/Y", peer="")
    gate.open(entry, [f"Bearer {OTHER}"], [])
    assert entry.key == ApiKey("api-key-1", "default", Role.INFERENCE)
    with pytest.raises(Unauthenticated, match="the key is not one of this server's"):
        gate.open(CallContext(face="grpc", method="", peer=""), ["Bearer another-token-1234"], [])
    assert ("api_key", "(set)", "set or resolved") in config.explain()
    assert ("api_key", "None", "default") in EngineConfig.load({}).explain()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"api_key": ["two words"]}, r"api_key: keys\[0\].token: must be 1 to 512 of the characters"),
        ({"api_key": [TOKEN, TOKEN]}, r"api_key: keys\[1\].token: is also that of another key"),
        ({"api_key": [TOKEN], "api_keys": "keys.toml"}, "api_key: is given together with api_keys"),
    ],
)
def test_keys_of_options_are_checked_and_never_shown(options, problem):
    with pytest.raises(InvalidArgument, match=problem) as refusal:
        Authenticator(EngineConfig.load(options).access).read()
    assert TOKEN not in str(refusal.value)
    assert "two words" not in str(refusal.value)


def test_a_key_that_can_be_guessed_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert make_keys(["token-abc123"]).find("token-abc123") is not None
    assert "token has 12 characters" in caplog.text and "abc123" not in caplog.text
