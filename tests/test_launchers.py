"""Which of several processes this is, from made-up environments and from options."""

from __future__ import annotations

from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.distributed_env import MultiHost, find_multihost, split_address
from jpaged.errors import InvalidArgument
from jpaged.llm import LLM

LWS = {"LWS_LEADER_ADDRESS": "m-0.m.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
GKE = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t", "TPU_WORKER_ID": "1"}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "node[007-010,12],other3",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "8",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s-0.t:8080"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (LWS, MultiHost("m-0.m.default:8482", 4, 3, "LeaderWorkerSet")),
        (GKE, MultiHost("t-0.t:8482", 2, 1, "GKE TPU pods")),
        ({**GKE, "TPU_PROCESS_ADDRESSES": "a:8471,b:8471,c:8471"}, MultiHost("a:8482", 3, 1, "GKE TPU pods")),
        ({**GKE, **SLICES}, MultiHost("s-0.t:8482", 4, 3, "GKE TPU pods")),
        ({**GKE, **LWS}, MultiHost("m-0.m.default:8482", 4, 3, "LeaderWorkerSet")),
        (SLURM, MultiHost("node007:61444", 8, 5, "Slurm")),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu1,gpu2"}, MultiHost("gpu1:61444", 8, 5, "Slurm")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, MultiHost("node007:61444", 8, 5, "Slurm", local_device=1)),
        (MPI, MultiHost("10.96.0.1:62624", 2, 1, "Open MPI")),
        (
            {**MPI, "OMPI_MCA_orte_hnp_uri": "8192.0;tcp6://[fe80::1,2620::2]:43370"},
            MultiHost("[fe80::1]:61442", 2, 1, "Open MPI"),
        ),
        (
            {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            MultiHost("10.96.0.1:62624", 2, 1, "Open MPI", local_device=1),
        ),
    ],
)
def test_a_launcher_tells(variables, expected):
    assert find_multihost(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOSTNAME": "laptop", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},  # a batch script, not a step
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    ],
)
def test_one_process_stays_alone(variables):
    assert find_multihost(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**LWS, "LWS_GROUP_SIZE": "many"}, "LWS_GROUP_SIZE: 'many' is not a number"),
        ({**LWS, "LWS_WORKER_INDEX": "4"}, "environment of LeaderWorkerSet: sets process 4 of 4"),
        ({**MPI, "OMPI_MCA_orte_hnp_uri": "nothing"}, "OMPI_MCA_orte_hnp_uri: 'nothing' has no address"),
    ],
)
def test_a_launcher_that_contradicts_itself_is_named(variables, message):
    with pytest.raises(InvalidArgument, match=message):
        find_multihost(variables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"coordinator": "a:1"},
            "num_processes: is missing: give all of coordinator, num_processes, process_id, or none",
        ),
        ({"num_processes": 2, "process_id": 0}, "coordinator: is missing"),
        ({"num_processes": 2}, "coordinator: is missing"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id: 2 is not below num_processes .2."),
        ({"coordinator": "a", "num_processes": 2, "process_id": 1}, "coordinator: 'a' is not HOST:PORT"),
        ({"coordinator": "a:99999", "num_processes": 2, "process_id": 1}, "coordinator: 'a:99999' is not HOST:PORT"),
        ({"coordinator": "a:0", "num_processes": 2, "process_id": 1}, "only process 0 can pick a port"),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "num_processes: 0 is below the limit of 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        EngineConfig.load(options)


def test_options_come_before_the_environment(monkeypatch):
    for name, value in LWS.items():
        monkeypatch.setenv(name, value)
    given = EngineConfig.load({"coordinator": "[::1]:7000", "num_processes": 2, "process_id": 0})
    multihost = given.multihost()
    assert multihost == MultiHost("[::1]:7000", 2, 0, "the options")
    assert multihost.is_leader
    assert multihost.address == ("::1", 7000)
    assert EngineConfig.load({"num_processes": 1}).multihost() is None
    found = EngineConfig().multihost()
    assert found is not None
    assert found.source == "LeaderWorkerSet"
    for name in LWS:
        monkeypatch.delenv(name)
    assert EngineConfig().multihost() is None


@pytest.mark.parametrize(("name", "value"), [("compiled", "programs"), ("enable_lora", True), ("role", "prefill")])
def test_what_works_in_one_process_alone_is_refused_by_name(name, value):
    multihost = MultiHost("a:1", 2, 1, "Slurm")
    with pytest.raises(InvalidArgument, match=f"{name}: {value}.* requires a single process .there are 2, from Slurm"):
        EngineConfig.load({name: value}).for_multihost(multihost)
    place = EngineConfig().for_multihost(multihost).parallel
    assert (place.coordinator, place.num_processes, place.process_id) == ("a:1", 2, 1)


def test_replicas_have_equally_many_processes():
    multihost = MultiHost("a:1", 4, 1, "Slurm")
    for size in (1, 2, 4):
        found = EngineConfig.load({"data_parallel_size": size}).for_multihost(multihost)
        assert found.parallel.data_parallel_size == size
    for size in (3, 8):
        message = f"data_parallel_size: {size} does not divide the 4 processes .from Slurm., of which each replica has"
        with pytest.raises(InvalidArgument, match=message):
            EngineConfig.load({"data_parallel_size": size}).for_multihost(multihost)


def test_options_of_several_processes_are_those_of_a_server():
    options: dict[str, Any] = {"coordinator": "a:1", "num_processes": 1, "process_id": 0, "join_timeout": 5.0}
    for name, value in options.items():
        with pytest.raises(InvalidArgument, match=f"{name}: is an option of `jpaged serve`"):
            LLM("demo", **{name: value})


def test_an_address_has_a_host_and_a_port():
    assert split_address("x", "node1:80") == ("node1", 80)
    assert split_address("x", "[fe80::1]:80") == ("fe80::1", 80)
    for text in ("node1", ":80", "fe80::1:80", "node1:x", "node1:70000"):
        with pytest.raises(InvalidArgument, match="x: "):
            split_address("x", text)
