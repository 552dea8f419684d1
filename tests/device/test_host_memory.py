"""What a process may have of its machine's memory, from files as a kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jpaged.device.device_info import available_host_bytes, physical_host_bytes

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1,000 MiB available, and a process in no group that limits it."""
    write(tmp_path / "proc/meminfo", f"MemTotal:  4096000 kB\nMemFree:  1 kB\nMemAvailable:  {1000 * 1024} kB")
    write(tmp_path / "proc/self/cgroup", "0::/")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limit(group: Path, *, most: object, used: int, cached: int = 0) -> None:
    """A group of version 2."""
    write(group / "memory.max", most)
    write(group / "memory.current", used)
    write(group / "memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 7")


def test_without_a_limit_it_is_what_the_machine_has(root: Path) -> None:
    assert available_host_bytes(root) == 1000 * MIB
    limit(root / "sys/fs/cgroup", most="max", used=5 * MIB)
    assert available_host_bytes(root) == 1000 * MIB


def test_a_container_has_its_limit_less_what_it_uses(root: Path) -> None:
    limit(root / "sys/fs/cgroup", most=300 * MIB, used=120 * MIB, cached=50 * MIB)
    assert available_host_bytes(root) == (300 - 120 + 50) * MIB


def test_a_limit_above_what_is_free_is_none(root: Path) -> None:
    limit(root / "sys/fs/cgroup", most=9000 * MIB, used=0)
    assert available_host_bytes(root) == 1000 * MIB


def test_a_group_above_limits_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/one/server")
    groups = root / "sys/fs/cgroup/pods"
    limit(groups, most=200 * MIB, used=150 * MIB)
    limit(groups / "one", most="max", used=90 * MIB)
    limit(groups / "one/server", most=500 * MIB, used=80 * MIB)
    assert available_host_bytes(root) == 50 * MIB


def test_nothing_is_left_over_the_limit(root: Path) -> None:
    limit(root / "sys/fs/cgroup", most=100 * MIB, used=101 * MIB)
    assert available_host_bytes(root) == 0


def test_version_1_has_a_tree_for_memory(root: Path) -> None:
    write(root / "proc/self/cgroup", "12:cpu,cpuacct:/a\n5:memory:/box\n1:name=systemd:/x")
    box = root / "sys/fs/cgroup/memory/box"
    write(box / "memory.limit_in_bytes", 70 * MIB)
    write(box / "memory.usage_in_bytes", 30 * MIB)
    write(box / "memory.stat", f"total_inactive_file {10 * MIB}")
    write(box.parent / "memory.limit_in_bytes", 9223372036854771712)
    write(box.parent / "memory.usage_in_bytes", 30 * MIB)
    assert available_host_bytes(root) == 50 * MIB


def test_where_no_file_tells_it_is_all_that_the_machine_has(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) == physical_host_bytes()
    assert 1 << 28 < available_host_bytes() <= physical_host_bytes()
