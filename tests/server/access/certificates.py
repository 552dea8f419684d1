"""Certificates for tests, and channels that believe them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import trustme
from grpc import aio


class Files:
    """A certificate authority's server certificate, in files that can be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {"tls_cert": str(folder / "server.pem"), "tls_key": str(folder / "server.key")}

    def issue(self, authority: trustme.CA, *names: str) -> None:
        """Have the files hold a new certificate for these names; the key is replaced first."""
        issued = authority.issue_cert(*(names or ("localhost", "127.0.0.1")))
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        self._replace("server.key", issued.private_key_pem.bytes())
        self._replace("server.pem", chain)

    def believe(self, *authorities: trustme.CA) -> dict[str, Any]:
        """Have clients show a certificate of one of these; returns the options for it."""
        self._replace("clients.pem", b"".join(one.cert_pem.bytes() for one in authorities))
        return {**self.options, "tls_client_ca": str(self.folder / "clients.pem")}

    def _replace(self, name: str, content: bytes) -> None:
        new = self.folder / f"{name}.new"
        new.write_bytes(content)
        new.replace(self.folder / name)


def credentials(authority: trustme.CA, client: trustme.LeafCert | None = None) -> Any:
    """A client that believes an authority, and shows a certificate if it has one."""
    if client is None:
        return grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    chain = b"".join(pem.bytes() for pem in client.cert_chain_pems)
    return grpc.ssl_channel_credentials(authority.cert_pem.bytes(), client.private_key_pem.bytes(), chain)


def channel(port: int, shown: Any) -> aio.Channel:
    """A connection of its own."""
    return aio.secure_channel(f"localhost:{port}", shown, options=[("grpc.use_local_subchannel_pool", 1)])


@contextmanager
def client_files(client: trustme.LeafCert, authority: trustme.CA) -> Iterator[tuple[str, str, str]]:
    """Paths of what a client believes, of its certificate and of its key."""
    with (
        authority.cert_pem.tempfile() as ca,
        client.cert_chain_pems[0].tempfile() as chain,
        client.private_key_pem.tempfile() as key,
    ):
        yield ca, chain, key
