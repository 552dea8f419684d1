"""Rank of this process among several: from the options, or from a launcher's environment variables.

Supported: LeaderWorkerSet, GKE's TPU pods, Slurm (in srun), Open MPI (in mpirun). The first launcher that reports more
than one process is used. This module does not read the environment itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jpaged.errors import InvalidArgument

PORT = 8482
"""Port of process 0 if a launcher names only hosts. LeaderWorkerSet assigns 8476 to libtpu (TPU_PROCESS_PORT)."""
_FIRST_JOB_PORT, _NUM_JOB_PORTS = 61440, 4096
"""Launchers that number their jobs give each job a separate port, so that jobs can share a host."""

Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MultiHost:
    """Position of this process among several.

    Attributes:
        coordinator: HOST:PORT of process 0.
        num_processes: two or more.
        process_id: from 0.
        source: name of the source of these values, for messages.
        local_device: the accelerator of this process if each process of a host has one; None for all of the host.
    """

    coordinator: str
    num_processes: int
    process_id: int
    source: str
    local_device: int | None = None

    @property
    def is_leader(self) -> bool:
        """True for process 0, which schedules and serves clients."""
        return self.process_id == 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        return split_address("coordinator", self.coordinator)


def split_address(field: str, text: str) -> tuple[str, int]:
    """Split HOST:PORT or [HOST]:PORT.

    Raises:
        InvalidArgument: it is neither; names the field.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not host or (":" in host and not is_bracketed) or not is_port:
        raise InvalidArgument(field, f"{text!r} is not HOST:PORT with a port up to 65535")
    return host.strip("[]"), int(port)


def find_multihost(variables: Variables) -> MultiHost | None:
    """Return the position by a launcher's variables; None without a launcher or with one process.

    Raises:
        InvalidArgument: a launcher's variables contradict each other; names one.
    """
    for names, find in _LAUNCHERS.items():
        multihost = find(variables) if all(variables.get(name) for name in names) else None
        if multihost is not None and multihost.num_processes > 1:
            if not 0 <= multihost.process_id < multihost.num_processes:
                problem = f"sets process {multihost.process_id} of {multihost.num_processes}; the first process is 0"
                raise InvalidArgument(f"environment of {multihost.source}", problem)
            return multihost
    return None


def _leader_worker_set(variables: Variables) -> MultiHost:
    coordinator = _joined(variables["LWS_LEADER_ADDRESS"], PORT)
    size, index = _number(variables, "LWS_GROUP_SIZE"), _number(variables, "LWS_WORKER_INDEX")
    return MultiHost(coordinator, size, index, "LeaderWorkerSet")


def _gke_tpu(variables: Variables) -> MultiHost | None:
    hosts = variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES")
    if not hosts:
        return None
    names = hosts.split(",")
    num_slices, slice_id = 1, 0
    first = names[0]
    if variables.get("MEGASCALE_NUM_SLICES"):
        num_slices = _number(variables, "MEGASCALE_NUM_SLICES")
        slice_id = _number(variables, "MEGASCALE_SLICE_ID") if variables.get("MEGASCALE_SLICE_ID") else 0
        first = variables.get("MEGASCALE_COORDINATOR_ADDRESS") or first
    process_id = _number(variables, "TPU_WORKER_ID") + slice_id * len(names)
    return MultiHost(_joined(first.partition(":")[0], PORT), len(names) * num_slices, process_id, "GKE TPU pods")


def _slurm(variables: Variables) -> MultiHost:
    num_processes = _number(variables, "SLURM_NTASKS")
    shares_host = _number(variables, "SLURM_STEP_NUM_NODES", default=num_processes) < num_processes
    return MultiHost(
        _joined(_first_node(variables["SLURM_STEP_NODELIST"]), _job_port(_number(variables, "SLURM_JOB_ID"))),
        num_processes,
        _number(variables, "SLURM_PROCID"),
        "Slurm",
        _number(variables, "SLURM_LOCALID") if shares_host else None,
    )


def _open_mpi(variables: Variables) -> MultiHost:
    uri = variables["OMPI_MCA_orte_hnp_uri"]
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or 1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370
    match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    if match is None:
        raise InvalidArgument("OMPI_MCA_orte_hnp_uri", f"{uri!r} has no address")
    shares_host = _number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1) > 1
    return MultiHost(
        # Job ids are multiples of 4096.
        _joined(match[2] or match[3], _job_port(int(match[1]) // _NUM_JOB_PORTS)),
        _number(variables, "OMPI_COMM_WORLD_SIZE"),
        _number(variables, "OMPI_COMM_WORLD_RANK"),
        "Open MPI",
        _number(variables, "OMPI_COMM_WORLD_LOCAL_RANK") if shares_host else None,
    )


_LAUNCHERS: dict[tuple[str, ...], Callable[[Variables], MultiHost | None]] = {
    ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"): _leader_worker_set,
    ("TPU_WORKER_ID",): _gke_tpu,
    ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"): _slurm,
    ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"): _open_mpi,
}
"""Known launchers, by the variables that all have to be set."""


def _first_node(nodes: str) -> str:
    """Return the first node of a Slurm list: node[007-012,20],gpu3 -> node007."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if match is None:
        raise InvalidArgument("SLURM_STEP_NODELIST", f"{nodes!r} has no host")
    return match[1] + (match[2] or "")


def _job_port(job: int) -> int:
    return _FIRST_JOB_PORT + job % _NUM_JOB_PORTS


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(variables: Variables, name: str, *, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or len(text) > 18:
        raise InvalidArgument(name, f"{text!r} is not a number" if text is not None else "is missing")
    return int(text)
