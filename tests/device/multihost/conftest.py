"""No leader of these tests ends the process: one whose connection is closed would, ten seconds later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jpaged.device.multihost.handshake import Leader


@pytest.fixture(autouse=True, scope="session")
def leaders_let_the_process_live() -> Iterator[None]:
    """For the whole session: a leader's threads see the end of a connection when its test is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leader, "_end_anyway", lambda leader: None)
        yield
