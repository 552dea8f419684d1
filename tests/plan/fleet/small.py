"""Small fleets: a day of some seconds on replicas of an 8B model on one H100 each."""

import dataclasses
from typing import Any

from jpaged.hardware import HARDWARE
from jpaged.plan.fleet.day import Day, Session, TurnLengths, draw_sessions
from jpaged.plan.fleet.fleet import FleetOptions, SimulatedFleet
from jpaged.plan.fleet.outcomes import Outcome
from jpaged.plan.fleet.replica import ReplicaPool
from jpaged.plan.fleet.routing import Rule
from jpaged.plan.fleet.topology import START_S, PoolKind, Serving
from jpaged.plan.simulator.deployment import MODELS, SimulatedDeployment, deploy

MODEL = MODELS["llama-3.1-8b"]
MAX_MODEL_LEN = 2048
SERVING = Serving("llama-3.1-8b", MAX_MODEL_LEN, 16, 32, 512)
DAY = Day(
    seconds=8.0,
    rate_per_s=10.0,
    max_model_len=MAX_MODEL_LEN,
    num_tenants=5,
    system=TurnLengths(300.0, 0.4),
    said=TurnLengths(60.0, 0.8),
    answered=TurnLengths(40.0, 0.6),
    mean_thinking_s=1.0,
    min_thinking_s=0.5,
)


def deployment(num_blocks: int = 1000, num_host_blocks: int = 0) -> SimulatedDeployment:
    config = dataclasses.replace(MODEL.config, max_position_embeddings=MAX_MODEL_LEN)
    model = dataclasses.replace(MODEL, config=config)
    slots = num_blocks * 16
    return deploy(model, HARDWARE["h100"], num_kv_slots=slots, block_size=16, num_host_blocks=num_host_blocks)


def pool(num_blocks: int = 1000, serving: Serving = SERVING) -> ReplicaPool:
    return ReplicaPool(deployment(num_blocks, serving.num_host_blocks), serving.engine)


def run(
    rule: Rule = "prefix+load",
    *,
    num_replicas: int = 3,
    num_blocks: int = 1000,
    day: Day = DAY,
    sessions: list[Session] | None = None,
    serving: Serving = SERVING,
    cold_start_s: float = START_S,
    **options: Any,
) -> Outcome:
    kind = PoolKind("h100", "h100", num_blocks * 16, 1, cold_start_s, 2.0)
    found = draw_sessions(day, 0) if sessions is None else sessions
    places = [0] * num_replicas
    return SimulatedFleet([pool(num_blocks, serving)], [kind], places, day, found, FleetOptions(rule, **options)).run()


def steady(outcome: Outcome) -> Outcome:
    """The same without what the simulation itself took, which no two have alike."""
    return dataclasses.replace(outcome, wall_s=0.0, cpu_s=0.0)
