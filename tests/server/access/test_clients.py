"""Our own clients and commands at a server with keys and TLS."""

import argparse
import asyncio
import json
from pathlib import Path

import pytest
import trustme

from jpaged.cli.main import main
from jpaged.cli.options import add_credential_flags, credentials_from
from jpaged.client import AsyncClient, Client, Tls
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, TOKEN
from tests.server.access.certificates import Files, client_files
from tests.server.harness import running

CA, OTHER = trustme.CA(), trustme.CA()
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.issue(CA)
    (tmp_path / "keys.toml").write_text(FILE)
    return files


async def test_both_clients_bring_key_and_certificate(files):
    mine = CA.issue_cert("client@example.org")
    options = {**files.believe(CA), "api_keys": str(files.folder / "keys.toml")}
    with client_files(mine, CA) as (ca, cert, key):
        async with running(**options) as harness:
            target, tls = f"localhost:{harness.port}", Tls(ca, cert, key)
            async with AsyncClient(target, api_key=TOKEN, tls=tls) as client:
                await client.wait_until_ready(60)
                assert (await client.complete("hello", GREEDY)).usage.completion_tokens == 4

            def ask() -> int:
                with Client([target], api_key=TOKEN, tls=tls) as client:
                    client.wait_until_ready(60)
                    return client.complete("hello", GREEDY).usage.completion_tokens

            assert await asyncio.to_thread(ask) == 4
            for wrong in (Tls(ca), None):
                async with AsyncClient(target, api_key=TOKEN, tls=wrong) as client:
                    with pytest.raises(Unavailable):
                        await client.complete("hello", GREEDY)


async def test_commands_take_the_key_from_a_file_or_the_environment_and_certificates_by_flags(
    files, tmp_path, monkeypatch, capsys
):
    source, output, key = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "key"
    body = {"model": "fake", "prompt": "hello", "max_tokens": 3}
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    key.write_text(TOKEN + "\n")
    options = {**files.options, "api_keys": str(files.folder / "keys.toml")}
    with CA.cert_pem.tempfile() as ca, OTHER.cert_pem.tempfile() as other:
        async with running(**options) as harness:
            target = f"localhost:{harness.port}"

            async def run(*words: str) -> int:
                return await asyncio.to_thread(main, words)

            batch = ("batch", str(source), str(output), "--target", target, "--tls-ca", ca)
            assert await run(*batch) == 1
            assert await run(*batch, "--api-key-file", str(key)) == 0
            output.unlink()
            monkeypatch.setenv("JPAGED_API_KEY", TOKEN)
            assert await run(*batch) == 0
            assert await run("health", target, "--tls-ca", ca) == 0
            assert await run("health", target, "--tls-ca", other, "--timeout", "1") == 1
            assert await run("health", target, "--timeout", "1") == 1
    assert "localhost" in capsys.readouterr().out


def credentials_of(*words: str) -> tuple[str, Tls | None]:
    parser = argparse.ArgumentParser()
    add_credential_flags(parser)
    found = credentials_from(parser.parse_args(words))
    return found.api_key, found.tls


def test_flags_that_do_not_go_together_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPAGED_API_KEY", raising=False)
    assert credentials_of() == ("", None)
    assert credentials_of("--tls") == ("", Tls())
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for words, problem in (
        (("--tls-cert", str(empty)), "--tls-key: is missing: give both the certificate and the key"),
        (("--tls-key", str(empty)), "--tls-cert: is missing"),
        (("--tls-ca", str(tmp_path / "none")), "--tls-ca: cannot be read: .*none: No such file"),
        (("--api-key-file", str(tmp_path / "none")), "--api-key-file: cannot be read: .*none: No such file"),
        (("--api-key-file", str(empty)), "--api-key-file: .* is empty"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            credentials_of(*words)


@pytest.mark.parametrize("key", ["with space", "with\nline", "späße"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="api_key: must be printable ASCII") as refusal:
        Client("localhost:1", api_key=key)
    assert key not in str(refusal.value)


async def test_top_shows_key_and_certificate_to_the_http_port(files, monkeypatch, capsys):
    monkeypatch.setenv("JPAGED_API_KEY", TOKEN)
    options = {**files.believe(CA), "api_keys": str(files.folder / "keys.toml"), "public_page": False}
    with client_files(CA.issue_cert("client@example.org"), CA) as (ca, cert, key):
        async with running(http_port=0, **options) as harness:
            address = harness.http_url.removeprefix("http://")
            shown = "--tls-cert", cert, "--tls-key", key
            assert await asyncio.to_thread(main, ["top", address, "--once", "--tls-ca", ca, *shown]) == 0
            assert "blocks in use" in capsys.readouterr().out
            assert await asyncio.to_thread(main, ["top", address, "--once", "--tls", *shown]) == 1
            assert "certificate" in capsys.readouterr().err
