"""A fleet in simulated time: the same however it is divided, nothing lost, and what is known of it beforehand."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jpaged.errors import InternalError
from jpaged.plan.cost import StepLoad
from jpaged.plan.fleet import fleet as fleet_module
from jpaged.plan.fleet import replica as worker_module
from jpaged.plan.fleet.autoscaler import Autoscaling, Direction, Policy
from jpaged.plan.fleet.day import Attempt, Ended, Session, draw_sessions
from jpaged.plan.fleet.outcomes import LatencyGoals, curve, summary
from jpaged.plan.fleet.replica import FleetWindow, ProcessWorker, SimulatedReplica, cut_at
from jpaged.plan.fleet.routing import RULES
from jpaged.plan.simulator.simulation import simulate
from jpaged.plan.simulator.trace import TraceRequest
from tests.plan.fleet.small import DAY, SERVING, deployment, pool, run, steady

HEAVY = dataclasses.replace(DAY, rate_per_s=60.0, seconds=5.0)
GOALS = LatencyGoals(1.0, 0.05)


def session(begin_s, said, answered, number=0, tenant=0, system_tokens=0):
    return Session(number, begin_s, tenant, system_tokens, (said,), (answered,), ())


# --- the same result --------------------------------------------------------------------------------------------------


@pytest.mark.thinned(9)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.long
def test_processes_change_nothing(rule):
    options: dict[str, Any] = {"num_failures": 3, "num_drains": 2, "drain_s": 0.5, "cold_start_s": 1.0}
    alone = steady(run(rule, **options))
    assert steady(run(rule, num_processes=2, **options)) == alone


@pytest.mark.long
def test_a_seed_decides_everything_and_another_seed_does_not():
    outcomes = [steady(run(num_failures=3, seed=seed, num_processes=n)) for seed, n in ((1, 1), (1, 3), (2, 1))]
    assert outcomes[0] == outcomes[1] != outcomes[2]


@pytest.mark.long
@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(150, 0), (1000, 0), (150, 300)])
def test_one_replica_is_the_simulator(num_blocks, num_host_blocks):
    """Request by request, also where blocks run out and groups are preempted."""
    day = dataclasses.replace(HEAVY, mean_turns=1.0)
    sessions = [dataclasses.replace(one, system_tokens=0) for one in draw_sessions(day, 3)]
    serving = dataclasses.replace(SERVING, num_host_blocks=num_host_blocks)
    outcome = run("random", num_replicas=1, num_blocks=num_blocks, day=day, sessions=sessions, serving=serving)
    trace = [TraceRequest(one.begin_s, one.said[0], one.answered[0]) for one in sessions]
    options = SERVING.engine.replace(num_scheduler_steps=1)
    wanted = simulate(trace, deployment(num_blocks, num_host_blocks), options)
    found = sorted(outcome.ends)
    assert [end.arrival_s for end in found] == [one.arrival_s for one in trace]
    for end, served in zip(found, wanted.served, strict=True):
        assert end.first_token_s == pytest.approx(served.first_token_s, abs=1e-9)
        assert end.end_s == pytest.approx(served.end_s, abs=1e-9)
    totals, load = outcome.totals, wanted.load
    assert (totals.num_steps, totals.num_tokens) == (load.num_steps, load.num_generation_tokens)
    assert (totals.num_preemptions > 0) == (num_blocks == 150) == (load.num_preemptions > 0)
    assert totals.num_recomputed_tokens == load.num_recomputed_tokens


@pytest.mark.long
@pytest.mark.parametrize("window_s", [0.01, 0.3, 100.0])
def test_windows_change_nothing_of_a_replica(window_s):
    ends = []
    for width_s in (window_s, 1.0):
        replica, sessions = SimulatedReplica(0, deployment(), SERVING.engine), draw_sessions(HEAVY, 1)
        attempts = [Attempt(number, one, 0, one.begin_s) for number, one in enumerate(sessions)]
        until_s, found = 0.0, list[Ended]()
        while len(found) < len(attempts):
            begin_s, until_s = until_s, until_s + width_s
            replica.give([one for one in attempts if begin_s <= one.arrival_s < until_s])
            replica.advance(until_s)
            found += replica.take_ended()
        ends.append(sorted(found))
    assert [one._replace(end_s=0.0, first_token_s=0.0) for one in ends[0]] == [
        one._replace(end_s=0.0, first_token_s=0.0) for one in ends[1]
    ]
    for first, second in zip(*ends, strict=True):
        assert (first.first_token_s, first.end_s) == pytest.approx((second.first_token_s, second.end_s), abs=1e-9)


class Twice:
    """Steps of a device that takes twice as long as is planned, and when each is asked for."""

    def __init__(self, clock):
        self.clock, self.begun_s = clock, []

    def step_s(self, load):
        self.begun_s.append(self.clock())
        return 2 * deployment().step_s(load)


def test_steps_whose_times_nobody_foresees_hold_up_no_arrival():
    """A request gets in at the next step, however many steps of the planned times would be over before it comes."""
    made = []

    def drawn(clock):
        made.append(Twice(clock))
        return made[-1]

    step_s = deployment().step_s(StepLoad.decoding(1, 100))
    replica = SimulatedReplica(0, dataclasses.replace(deployment(), drawn=drawn), SERVING.engine)
    sessions = session(0.0, 64, 60), session(41 * step_s, 64, 4, number=1)  # within the twentieth step or so
    replica.give([Attempt(number, one, 0, one.begin_s) for number, one in enumerate(sessions)])
    replica.advance(1e6)
    first_s = {one.number: one.first_token_s for one in replica.take_ended()}[1]
    begun_s = np.array(made[0].begun_s)
    assert (np.diff(begun_s) > 0).all()  # each is asked for once, when it begins
    assert len(begun_s) == replica.totals.num_steps
    next_s = begun_s[begun_s >= sessions[1].begin_s]
    assert first_s == pytest.approx(next_s[1], abs=1e-9)  # where the step ends that begins next


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_failures", "num_drains", "drain_s"), [(0, 0, 60.0), (6, 0, 60.0), (4, 4, 0.25)])
def test_every_turn_ends_once_with_all_its_tokens(rule, num_failures, num_drains, drain_s):
    outcome = run(
        rule,
        num_failures=num_failures,
        num_drains=num_drains,
        drain_s=drain_s,
        cold_start_s=1.0,
        day=HEAVY,
        num_blocks=400,
        checks=True,
    )
    sessions = draw_sessions(HEAVY, 0)
    turns = Counter((end.session, end.turn) for end in outcome.ends)
    assert set(turns.values()) == {1}
    assert {(one.number, 0) for one in sessions} <= set(turns)
    for end in outcome.ends:
        one = sessions[end.session]
        assert (end.num_tokens, end.prompt_tokens) == (one.answered[end.turn], one.prompt_tokens(end.turn))
    assert len(outcome.ends) + outcome.num_skipped == sum(len(one.said) for one in sessions)
    assert all(end.arrival_s < end.first_token_s <= end.end_s <= outcome.elapsed_s for end in outcome.ends)
    num_lost = outcome.totals.num_tokens - sum(end.num_tokens for end in outcome.ends)
    # What was sampled in a step that a replica did not live to see the end of.
    assert 0 <= num_lost <= 32 * (outcome.num_failures + outcome.num_drains)
    cut = [end for end in outcome.ends if end.num_cut]
    assert bool(cut) == bool(num_failures)
    assert all(end.away_s > 0 and end.num_again > 0 for end in cut)
    assert all(end.num_again == 0 for end in outcome.ends if not end.num_cut)


@pytest.mark.long
def test_a_drain_with_time_enough_cuts_nobody_off():
    outcome = run(num_drains=3, drain_s=60.0, cold_start_s=1.0)
    assert outcome.num_drains == 3
    assert not any(end.num_cut for end in outcome.ends)


def test_a_replica_that_dies_gives_what_it_had_told_and_no_token_more():
    """Cut at the end of each step, and within it: the token of a step that had not ended is not there."""
    step_ends_s = list[float]()
    replica = SimulatedReplica(0, deployment(), SERVING.engine)
    replica.give([Attempt(0, session(0.0, 100, 20), 0, 0.0)])
    while not (ended := replica.take_ended()):
        replica.advance(step_ends_s[-1] + 1e-6 if step_ends_s else 1e-6)
        step_ends_s.append(replica._clock())
    assert ended[0].num_tokens == 20
    for count in (1, 2, 7, 19):
        for at_s, wanted in ((step_ends_s[count - 1] + 1e-9, count), (step_ends_s[count] - 1e-6, count)):
            replica = SimulatedReplica(0, deployment(), SERVING.engine)
            replica.give([Attempt(0, session(0.0, 100, 20), 0, 0.0)])
            replica.advance(at_s)
            replica.kill(at_s)
            (cut,) = replica.take_ended()
            assert (cut.num_tokens, cut.is_whole, cut.end_s) == (wanted, False, at_s)


def test_an_end_that_a_replica_does_not_live_to_see_is_none():
    whole = Ended(2.0, 0, 0, 1.0, 5, 0, is_whole=True)
    assert cut_at(whole, 2.0) == whole
    assert cut_at(whole, 1.9) == Ended(1.9, 0, 0, 1.0, 4, 0, is_whole=False)
    assert cut_at(whole._replace(num_tokens=1, first_token_s=2.0), 1.9) == Ended(1.9, 0, 0, None, 0, 0, is_whole=False)


def test_requests_wait_where_nobody_is_ready():
    day = dataclasses.replace(DAY, seconds=4.0)
    outcome = run(num_replicas=1, num_failures=1, cold_start_s=3.0, day=day)
    assert outcome.num_failures == 1
    failed_s = next(moment.at_s for moment in outcome.moments if not moment.num_ready)
    waited = [end for end in outcome.ends if failed_s < end.arrival_s < failed_s + 2.0]
    assert waited
    assert all(end.first_token_s >= failed_s + 3.0 for end in waited)


# --- what is known beforehand -----------------------------------------------------------------------------------------


def test_alone_a_request_takes_its_steps():
    model = deployment()
    outcome = run("random", num_replicas=4, sessions=[session(0.1, 100, 3)])
    (end,) = outcome.ends
    assert end.first_token_s - end.arrival_s == pytest.approx(model.step_s(StepLoad(1, 100, 100, 5050)))
    decode_s = model.step_s(StepLoad(1, 1, 101, 101)) + model.step_s(StepLoad(1, 1, 102, 102))
    assert end.end_s - end.first_token_s == pytest.approx(decode_s)


@pytest.mark.long
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_a_random_router_before_single_servers_waits_as_pollaczek_and_khinchine_say(load):
    """A row a step and equal requests: each replica is an M/D/1 queue, whose mean wait is load * D / (2 (1 - load))."""
    serving = dataclasses.replace(SERVING, max_num_seqs=1)
    (alone,) = run("random", num_replicas=1, serving=serving, sessions=[session(0.0, 64, 16)]).ends
    service_s, num_replicas, count = alone.end_s, 8, 6000
    rate_per_s = load * num_replicas / service_s
    begins_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate_per_s, count)).tolist()
    sessions = [session(begin_s, 64, 16, number) for number, begin_s in enumerate(begins_s)]
    day = dataclasses.replace(DAY, seconds=begins_s[-1] + 1)
    ends = run("random", num_replicas=num_replicas, serving=serving, sessions=sessions, day=day, window_s=1.0).ends
    waits_s = [end.end_s - end.arrival_s - service_s for end in ends]
    assert np.mean(waits_s) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


@pytest.mark.long
def test_conversations_stay_where_they_are_remembered():
    quiet = dataclasses.replace(DAY, rate_per_s=3.0, num_tenants=50)
    hits = {rule: summary(run(rule, day=quiet, num_replicas=6), GOALS)["prefix_hit_percent"] for rule in RULES}
    assert hits["prefix"] > 2 * hits["random"]
    assert hits["prefix+load"] > 2 * hits["random"]


@pytest.mark.long
def test_what_a_failure_costs_is_told():
    calm, broken = (summary(run(num_failures=n, cold_start_s=1.0, day=HEAVY), GOALS) for n in (0, 5))
    assert calm["interruptions"]["num_turns_cut"] == calm["interruptions"]["tokens_computed_again"] == 0
    told = broken["interruptions"]
    assert told["num_failures"] == 5
    assert told["num_turns_cut"] > 0
    assert told["max_standstill_s"] >= told["mean_standstill_s"] > 0.1
    assert broken["itl_p99_ms"] > calm["itl_p99_ms"]


@pytest.mark.long
def test_money_is_of_all_places_while_they_are_paid_for():
    outcome = run(num_replicas=3)
    assert outcome.usd == pytest.approx(3 * 2.0 * outcome.elapsed_s / 3600)
    told = summary(outcome, GOALS)
    assert told["usd_per_million_tokens"] == pytest.approx(outcome.usd / told["num_output_tokens"] * 1e6)


@pytest.mark.long
def test_a_curve_has_everything_that_came():
    outcome = run()
    drawn = curve(outcome, GOALS)
    assert sum(drawn["arrived_per_s"]) * DAY.seconds / 96 == pytest.approx(len(outcome.ends))
    assert set(drawn["ready"]) == {3.0}
    assert len({len(column) for column in drawn.values()}) == 1


SCALING = Autoscaling(
    1,
    4,
    "num_waiting",
    2.0,
    Direction(0.0, (Policy("Pods", 2, 15.0),)),
    Direction(15.0, (Policy("Pods", 1, 15.0),)),
    scrape_s=5.0,
    mean_s=10.0,
    drain_s=30.0,
)


@pytest.mark.long
def test_an_autoscaler_adds_replicas_for_a_queue_and_takes_them_away():
    day = dataclasses.replace(DAY, seconds=180.0, rate_per_s=0.4)
    burst = [session(20 + number / 20, 100, 400, number) for number in range(320)]
    serving = dataclasses.replace(SERVING, max_num_seqs=8)
    outcome = run(
        num_replicas=4, autoscaling=SCALING, day=day, sessions=burst, cold_start_s=5.0, serving=serving, window_s=1.0
    )
    ready = [moment.num_ready for moment in outcome.moments]
    assert (ready[0], max(ready)) == (1, 4)
    assert outcome.replica_hours < 4 * outcome.elapsed_s / 3600
    assert len(outcome.ends) == len(burst)


@pytest.mark.long
def test_a_replica_that_is_restarted_is_none_that_the_autoscaler_has_to_replace():
    quiet = [session(2.0 * number, 50, 1500, number) for number in range(60)]  # each takes 10 s and more
    scaling = dataclasses.replace(SCALING, min_replicas=2)
    day = dataclasses.replace(DAY, seconds=120.0)
    outcome = run(
        num_replicas=4, autoscaling=scaling, day=day, sessions=quiet, num_drains=6, cold_start_s=20.0, window_s=1.0
    )
    assert outcome.num_drains > 2
    assert max(moment.num_ready + moment.num_starting for moment in outcome.moments) == 2
    assert outcome.replica_hours == pytest.approx(2 * outcome.elapsed_s / 3600)


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_end_that_is_lost_on_its_way_is_found(monkeypatch):
    lost = list[Ended]()

    class Losing(worker_module.WorkerReplicas):
        def run(self, window):
            report = super().run(window)
            if report.ended and not lost:
                lost.append(report.ended[0])
                report = dataclasses.replace(report, ended=report.ended[1:])
            return report

    monkeypatch.setattr(worker_module, "WorkerReplicas", Losing)
    monkeypatch.setattr(fleet_module, "_MAX_DAYS", 0)
    with pytest.raises(InternalError, match="the simulation is stuck: 1 turns in flight, 0 pending"):
        run(window_s=20.0)


def test_an_end_that_is_told_twice_is_found(monkeypatch):
    class Repeating(worker_module.WorkerReplicas):
        def run(self, window):
            report = super().run(window)
            return dataclasses.replace(report, ended=report.ended * 2)

    monkeypatch.setattr(worker_module, "WorkerReplicas", Repeating)
    with pytest.raises(KeyError):
        run()


def test_tokens_that_are_missing_are_found(monkeypatch):
    class Stingy(worker_module.WorkerReplicas):
        def run(self, window):
            report = super().run(window)
            return dataclasses.replace(
                report, ended=tuple(one._replace(num_tokens=one.num_tokens - 1) for one in report.ended)
            )

    monkeypatch.setattr(worker_module, "WorkerReplicas", Stingy)
    with pytest.raises(InternalError, match="ended without all of its tokens"):
        run()


def test_a_block_that_is_lost_is_found(monkeypatch):
    give_back = SimulatedReplica.take_ended

    def lose(self):
        self._engine._loop.memory._pool.allocate(1)
        return give_back(self)

    monkeypatch.setattr(SimulatedReplica, "take_ended", lose)
    with pytest.raises(InternalError):
        run(checks=True)


@pytest.mark.long
def test_a_worker_that_dies_is_told_of():
    worker = ProcessWorker([pool()])
    worker.send(FleetWindow(0.0, 1.0))
    assert worker.receive().ended == ()
    worker._process.kill()
    worker._process.join()
    with pytest.raises(InternalError, match="a worker process exited with code -9"):
        worker.send(FleetWindow(1.0, 2.0))


@pytest.mark.long
def test_what_goes_wrong_in_a_worker_is_raised_here():
    worker = ProcessWorker([pool()])
    worker.send(FleetWindow(0.0, 1.0, attempts={5: []}))
    with pytest.raises(KeyError):
        worker.receive()
    worker._process.join()
