"""The checks of a first run, most valuable first, with the seconds that each may take at most."""

from __future__ import annotations

from benchmarks.first_contact.driver import Check

_ROOM = "benchmarks.first_contact"

CHECKS = (
    Check("device", f"{_ROOM}.device:check", 15),
    Check("mosaic", f"{_ROOM}.attention:check_mosaic", 75),
    Check("triton", f"{_ROOM}.products:check", 60),
    Check("demo", f"{_ROOM}.demo:check", 45),
    Check("dispatch", f"{_ROOM}.speed:check_dispatch", 30),
    Check("decode", f"{_ROOM}.speed:check_decode", 75),
    Check("prefill", f"{_ROOM}.speed:check_prefill", 45),
    Check("llama", f"{_ROOM}.llama:check", 100),
    Check("serve", f"{_ROOM}.serving:check", 60),
)
"""The limits exceed the whole time together: a check that ends early leaves its rest to the last ones."""
