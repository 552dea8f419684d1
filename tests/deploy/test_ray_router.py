"""Ray's interface of the prefix router, over stand-ins for Ray; `make ray` runs it in Ray's proxies."""

import ast
import asyncio
import importlib.util
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jpaged._proto.v1 import inference_pb2

FILE = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "router.py"
SYSTEM = "You are a helpful assistant of few words. " * 10


class RequestRouter:
    """What the router uses of Ray's."""

    def __init__(self) -> None:
        self.replica_queue_len_cache: dict[str, int] = {}
        self.told: list[Any] = []

    def update_replicas(self, replicas: list[Any]) -> None:
        self.told = replicas


@dataclass(frozen=True)
class Sent:
    """What Ray's proxy makes of a message."""

    user_request_proto: Any


@dataclass
class Context:
    metadata: tuple[tuple[str, str], ...] = ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata


@dataclass
class Pending:
    """A call that waits for a replica."""

    message: Any
    call: str
    tenant: str = "alice"
    is_grpc: bool = True
    args: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.args = self.args or [pickle.dumps(Sent(self.message))]
        self.routing_context = SimpleNamespace(should_backoff=False)
        self.metadata = SimpleNamespace(
            internal_request_id=self.call,
            is_grpc_request=self.is_grpc,
            grpc_context=Context((("x-jpaged-tenant", self.tenant),)),
        )


@pytest.fixture
def module(monkeypatch):
    stand_in = ModuleType("ray.serve.request_router")
    names = ("PendingRequest", "ReplicaID", "ReplicaResult", "RunningReplica")
    vars(stand_in).update(dict.fromkeys(names, Any), RequestRouter=RequestRouter)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.serve.request_router", stand_in)
    spec = importlib.util.spec_from_file_location("prefix_router", FILE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@dataclass(frozen=True)
class Name:
    unique_id: str


class Rig:
    """A router over replicas that always have room."""

    def __init__(self, module: Any, names: str) -> None:
        self.router = module.PrefixRouter()
        self.router.initialize_state(max_known_prefixes=1000)
        self.replicas = [SimpleNamespace(replica_id=Name(name)) for name in names]
        self.router.update_replicas(self.replicas)
        self.num_calls = 0

    def ranks(self, pending: Pending) -> list[list[str]]:
        found = asyncio.run(self.router.choose_replicas(self.replicas, pending))
        return [[one.replica_id.unique_id for one in rank] for rank in found]

    def call(self, text: str, tenant: str = "alice", *, place: int = 0) -> str:
        """A call that the replica in one place takes, those before it being full, and that ends."""
        self.num_calls += 1
        pending = Pending(inference_pb2.GenerateRequest(text=text), str(self.num_calls), tenant)
        ranks = self.ranks(pending)
        assert pending.routing_context.should_backoff
        assert sorted(name for rank in ranks for name in rank) == sorted(
            one.replica_id.unique_id for one in self.replicas
        )
        (name,) = ranks[place]
        self.router.on_request_routed(pending, Name(name), None)
        self.router.on_request_completed(Name(name), pending.call)
        return name


def test_turns_go_where_their_conversation_began(module):
    rig = Rig(module, "abc")
    where = {i: rig.call(f"{i}: {SYSTEM}") for i in range(30)}
    assert set(where.values()) == {"a", "b", "c"}
    assert {i: rig.call(f"{i}: {SYSTEM} and then {i}") for i in range(30)} == where


def test_tenants_do_not_share(module):
    rig = Rig(module, "abc")
    assert {rig.call(SYSTEM, f"tenant{i}") for i in range(30)} == {"a", "b", "c"}


def test_what_another_replica_took_is_there(module):
    rig = Rig(module, "abc")
    taken = rig.call(SYSTEM, place=1)
    assert rig.call(SYSTEM) == taken


def test_what_ray_knows_of_queues_counts(module):
    rig = Rig(module, "ab")
    name = rig.call(SYSTEM)
    rig.router.replica_queue_len_cache = {Name(name): 9}
    assert rig.call(SYSTEM) != name


def test_replicas_that_come_and_go_are_told_to_ray_and_to_the_directory(module):
    rig = Rig(module, "ab")
    name = rig.call(SYSTEM)
    kept = [one for one in rig.replicas if one.replica_id.unique_id != name]
    everybody, rig.replicas = rig.replicas, kept
    rig.router.update_replicas(kept)
    assert rig.router.told == kept
    other = rig.call(SYSTEM)
    rig.replicas = everybody
    rig.router.update_replicas(everybody)
    assert rig.call(SYSTEM) == other != name


@pytest.mark.parametrize(
    "pending",
    [
        Pending(inference_pb2.TokenizeRequest(text=SYSTEM), "1"),
        Pending(inference_pb2.GenerateRequest(text=SYSTEM), "1", is_grpc=False),
        Pending(None, "1", args=["not bytes"]),
        None,
    ],
    ids=["no prompt", "by a handle", "no bytes", "nothing waits"],
)
def test_all_else_is_rays_to_choose_among_all(module, pending):
    rig = Rig(module, "abcd")
    ((*names,),) = rig.ranks(pending)
    assert sorted(names) == list("abcd")
    seen = {tuple(rig.ranks(pending)[0]) for _ in range(100)}
    assert {names[0] for names in seen} == set("abcd")  # Ray takes the first of those that are equally busy


def test_a_call_that_waits_is_hashed_once_and_so_many_are_kept(module, monkeypatch):
    rig = Rig(module, "ab")
    made: list[str] = []
    get_key = module.get_key

    def counted(pending: Pending) -> Any:
        made.append(pending.call)
        return get_key(pending)

    monkeypatch.setattr(module, "get_key", counted)
    monkeypatch.setattr(module, "MAX_KEPT_KEYS", 2)
    waiting = [Pending(inference_pb2.GenerateRequest(text=f"{i}{SYSTEM}"), str(i)) for i in range(3)]
    for _ in range(3):
        rig.ranks(waiting[0])
    assert made == ["0"]
    for one in waiting:
        rig.ranks(one)
    rig.ranks(waiting[0])
    assert made == ["0", "1", "2", "0"]


def test_it_imports_nothing_that_lies_beside_it():
    tree = ast.parse(FILE.read_text())
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    beside = {path.stem for path in FILE.parent.glob("*.py")}
    assert {name.partition(".")[0] for name in found} & beside == set()
    assert {name for name in found if name.startswith("jpaged.")} == {
        "jpaged.route.methods",
        "jpaged.route.prefix_table",
    }


def test_calls_that_wait_are_kept_without_their_prompts(module):
    ids = inference_pb2.TokenIds(ids=range(1000))
    key = module.get_key(Pending(inference_pb2.GenerateRequest(token_ids=ids), "1"))
    assert (len(key.chain) > 1, key.token_ids) == (True, None)
