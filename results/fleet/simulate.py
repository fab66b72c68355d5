"""A fleet of 64 Ray workers on one machine: 500 problems, the replayed runner, the real tuner, a real PostgreSQL server.

    pip install "autotax[ray,test]"; python results/fleet/simulate.py > results/fleet/simulate.txt

Real: the driver, 64 Ray actors with a worker each, claims, leases, Optuna's studies, every write to the database. Made up: the
hosts (all actors are on one node of one machine), the GPUs and their time. A config that the search asks for takes the samples of
the nearest config of its variant in results/h200x4/tuned; a problem takes as long as it took there, times SCALE, in equal parts a
trial. It gets TRIALS trials, not 60, and random ones, for two cores must do the tuners' work of 64 hosts.
"""

from __future__ import annotations

import gc
import heapq
import json
import logging
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])

import sqlalchemy  # noqa: E402

from autotax.core.config import Config  # noqa: E402
from autotax.core.problem import Problem  # noqa: E402
from autotax.db import Store, TrialRecord, resolve_url  # noqa: E402
from autotax.fleet.driver import Took, estimator  # noqa: E402
from autotax.fleet.messages import Ended, FleetJob, HostHello, Order, Probe, Probed, TrialEnded  # noqa: E402
from autotax.fleet.worker import Worker  # noqa: E402
from autotax.hardware import Hardware  # noqa: E402
from autotax.operators import problem_from_dict  # noqa: E402
from autotax.runner.measurement import Candidate, Effort, Measurement, Overlap  # noqa: E402
from autotax.software import environment  # noqa: E402
from autotax.tuner import Progress, Settings, tune  # noqa: E402
from results.search.replay_runner import ReplayRunner  # noqa: E402

ZONE = "SELECT extract(epoch FROM now()) - extract(epoch FROM now() AT TIME ZONE 'UTC')"
HOSTS = int(os.environ.get("FLEET_HOSTS", "64"))
PROBLEMS = int(os.environ.get("FLEET_PROBLEMS", "500"))
TRIALS = int(os.environ.get("FLEET_TRIALS", "4"))
SCALE = float(os.environ.get("FLEET_SCALE", "3"))
RECORDED = sorted((ROOT / "results/h200x4/tuned").glob("*.db"))
OLDER = replace(environment("cpu"), triton="3.0.0")
H200 = Hardware("cuda", "NVIDIA H200 (replayed)", "cuda:90", 4, 140, 132, 232448, 60 << 20, "peer access 12/12 pairs")


@cache
def records() -> dict[str, tuple[Problem, float, list[TrialRecord]]]:
    """Recorded problems by their key: with the seconds of their longest run, and verified trials."""
    entries: dict[str, tuple[Problem, float, list[TrialRecord]]] = {}
    for path in RECORDED:
        with Store.open(resolve_url(str(path)), create=False) as store:
            seconds = {}
            for run in store.runs():
                if run.accounts.get("seconds"):
                    seconds[run.problem.key] = max(run.accounts["seconds"], seconds.get(run.problem.key, 0.0))
            for trial in store.trials(status="ok"):
                assert trial.run
                problem = trial.run.problem
                if problem.key in seconds and problem.world_size == 4:
                    entries.setdefault(problem.key, (problem, seconds[problem.key], []))[2].append(trial)
    return entries


def problems() -> list[tuple[Problem, Problem, float]]:
    """As many as asked for, each with the recorded one it stands for, and its seconds: one of its sizes is a little larger."""
    known, jobs = list(records().values()), []
    for number in range(PROBLEMS):
        problem, seconds, _ = known[number % len(known)]
        values = problem.to_dict()
        name = next(name for name in ("m", "kv_len") if name in values)
        jobs.append((problem_from_dict(values | {name: values[name] + 1 + number // len(known)}), problem, seconds))
    return jobs


@cache
def by_key() -> dict[str, tuple[Problem, float]]:
    return {problem.key: (original, seconds) for problem, original, seconds in problems()}


class Recorded:
    """The replayed runner, which answers for configs that were not recorded with the nearest of their variant."""

    foresight = 1

    def __init__(self) -> None:
        self.environment = environment("cpu")
        self._replay = ReplayRunner.of(trial for _, _, trials in records().values() for trial in trials)

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        original, seconds = by_key()[problem.key]
        time.sleep(seconds * SCALE / (TRIALS + 1))
        if overlap:
            overlap()
        stand_ins = [Candidate(self._nearest(original, candidate.config), candidate.conditions) for candidate in candidates]
        answers = self._replay.measure(original, stand_ins, effort)
        return [replace(answer, candidate=candidate) for answer, candidate in zip(answers, candidates, strict=True)]

    def expect(self, problem: Problem, configs: Sequence[Config], later: Sequence[Config] = ()) -> int:  # noqa: ARG002
        return 0

    @staticmethod
    def _nearest(original: Problem, config: Config) -> Config:
        recorded = [trial.config for trial in records()[original.key][2] if trial.config.variant == config.variant]

        def distance(other: Config) -> int:
            return sum(other.values.get(name) != value for name, value in config.params)

        return min(recorded, key=distance, default=config)


class ThreadBench:
    """The bench in a thread of the worker's process: 64 processes more would be too many for this machine."""

    def __init__(self) -> None:
        self._coming: queue.Queue[Any] = queue.Queue()
        self._runner = Recorded()

    def start(self, order: Order) -> HostHello:
        self._order = order
        return HostHello(H200, environment("cpu"))

    def send(self, asked: object) -> None:
        job = asked.job if isinstance(asked, Probe) else asked
        assert isinstance(job, FleetJob)
        if isinstance(asked, Probe):
            self._coming.put(Probed(None))
        else:
            threading.Thread(target=self._tune, args=[job], daemon=True).start()

    def _tune(self, job: FleetJob) -> None:
        try:
            with Store.open(self._order.url) as store:
                settings = replace(job.settings, host=f"host-{self._order.slot}")
                verdict = tune(
                    job.problem,
                    hardware=H200,
                    runner=self._runner,  # type: ignore[arg-type]
                    store=store,
                    environment=self._runner.environment,
                    settings=settings,
                    listener=self,
                )
            self._coming.put(Ended("tuned" if verdict.winner else "unverified", ""))
            gc.collect()
        except Exception as error:
            self._coming.put(Ended("trouble", f"{type(error).__name__}: {error}"))

    def progress(self, progress: Progress) -> None:
        self._coming.put(TrialEnded(progress.done, progress.total))

    def notice(self, text: str) -> None:
        pass

    def receive(self, seconds: float) -> Any:
        try:
            return self._coming.get(timeout=seconds)
        except queue.Empty:
            return None

    def interrupt(self) -> None:
        pass

    def kill(self) -> None:
        pass


class Watch:
    """A screen that only remembers when what happened, and how long it took to come up."""

    def __init__(self) -> None:
        self.hosts = 0
        self.all_joined: float | None = None
        self.first: float | None = None

    def show(self, snapshot: Any, happened: Sequence[dict[str, Any]]) -> None:
        self.hosts = len(snapshot.hosts)
        if self.hosts == HOSTS and self.all_joined is None:
            self.all_joined = snapshot.seconds
        for event in happened:
            if any(word in event["event"] for word in ("failed", "lost", "waiting", "retired")):
                print(json.dumps(event), file=sys.stderr, flush=True)
        if int(snapshot.seconds) % 30 == 0:
            left = len(snapshot.left)
            print(f"{snapshot.seconds:.0f} s: {self.hosts} hosts, {left} left", file=sys.stderr, flush=True)


@contextmanager
def watched(url: str, seen: dict[str, Any]):
    """Samples the transactions, connections and waiting sessions of the server while the body runs, into `seen`."""
    engine, done = sqlalchemy.create_engine(url), threading.Event()
    samples: list[tuple[int, int, int]] = []

    def counters() -> tuple[float, int]:
        with engine.connect() as connection:
            query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
            return time.monotonic(), int(connection.exec_driver_sql(query).scalar() or 0)

    def sample() -> None:
        query = (
            "SELECT count(*), count(*) FILTER (WHERE wait_event_type = 'Lock'), count(*) FILTER (WHERE state = 'active') "
            "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        with engine.connect() as connection:
            while not done.wait(0.1):
                samples.append(tuple(connection.exec_driver_sql(query).one()))
                connection.rollback()

    thread = threading.Thread(target=sample, daemon=True)
    began, before = counters()
    thread.start()
    yield
    done.set()
    thread.join()
    ended, after = counters()
    own = len(samples)  # each of them is a transaction too
    seen |= {
        "transactions_per_s": (after - before - own) / (ended - began),
        "transactions": after - before - own,
        "connections": max(count for count, _, _ in samples),
        "waiting": statistics.mean(waiting for _, waiting, _ in samples),
        "most_waiting": max(waiting for _, waiting, _ in samples),
        "active": statistics.mean(active for _, _, active in samples),
    }


# Without Ray: what any order of problems would have come to


def makespan(seconds: Sequence[float], hosts: int) -> float:
    """Each host takes the next of the list when it is free."""
    free = [0.0] * hosts
    for duration in seconds:
        heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


def schedules(hosts: int, count: int) -> None:
    known = list(records().values())
    jobs = [known[number % len(known)] for number in range(count)]
    ideal = sum(seconds for _, seconds, _ in jobs) / hosts
    chance = random.Random(0)
    others = {problem.key: guess(problem) for problem, _, _ in known}
    orders: dict[str, Callable[[Any], float]] = {
        "longest first, by what each took before": lambda job: -job[1],
        "by what other problems of like sizes took": lambda job: -(others[job[0].key] or 0.0),
        "the most bytes first, where nothing is known": lambda job: -job[0].nbytes,
        "at random": lambda _: chance.random(),
    }
    print(f"{count} problems on {hosts} hosts, {count / hosts:.1f} each: with all hosts busy all the time {ideal:.0f} s")
    for name, key in orders.items():
        took = makespan([seconds for _, seconds, _ in sorted(jobs, key=key)], hosts)
        print(f"  {name}: {took:.0f} s, hosts busy {100 * ideal / took:.1f} %")


def guess(problem: Problem) -> float | None:
    """The expected seconds of a problem, estimated from the other recorded problems."""
    return estimator([run for run in recorded_runs() if run.key != problem.key], H200.digest)(problem)


def recorded_runs() -> list[Took]:
    return [Took(problem.key, problem.to_dict(), H200.digest, seconds) for problem, seconds, _ in records().values()]


def main() -> None:
    schedules(64, 500)
    schedules(1000, 5000)
    schedules(1000, 20000)
    import ray

    from autotax.fleet.driver import Driver, new_order
    from autotax.fleet.messages import EngineOptions
    from autotax.fleet.ray_engine import Host, RayEngine
    from tests.db.server import binaries, running

    class ReplayedHost(Host):
        def work(self, order: Order) -> str:
            logging.disable(logging.CRITICAL)
            import simulate

            return Worker(replace(order, suffix=f"#{order.slot}"), simulate.ThreadBench()).run()

    class OneNode(RayEngine):
        strategy = "PACK"
        host = ReplayedHost

        def _bundles(self) -> list[dict[str, float]]:
            return [{"CPU": 1.0}] * HOSTS

    programs = binaries()
    assert programs
    known = {problem.key: SCALE * seconds for problem, _, seconds in problems()}
    jobs = [FleetJob(problem, Settings(trials=TRIALS, soak=0, sampler="random").on(H200)) for problem, _, _ in problems()]
    with tempfile.TemporaryDirectory(), running(programs, "-c max_connections=400 -c shared_buffers=256MB") as url:
        with Store.open(url) as store:  # what each took before, as in a fleet that tunes what an upgrade made stale
            for job in jobs:
                run_id = store.begin_run(job.problem, H200, OLDER, {})
                store.end_run(run_id, "done", {"seconds": known[job.problem.key]})
        quiet: Any = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
        ray.init(num_cpus=HOSTS, object_store_memory=80 * 2**20, **quiet)
        watch, load = Watch(), {}
        try:
            engine = OneNode(EngineOptions("ray", wait_s=600.0))
            driver = Driver(new_order(url, lease_s=120.0), engine, lambda _: jobs, watch, grace_s=60.0)
            with watched(url, load):
                outcome = driver.run()
        finally:
            ray.shutdown()
        report(url, outcome, load)


def report(url: str, outcome: Any, load: dict[str, Any]) -> None:
    now = outcome.snapshot
    with sqlalchemy.create_engine(url).connect() as connection:
        trials = connection.exec_driver_sql("SELECT count(*) FROM autotax_trial").scalar()
        winners = connection.exec_driver_sql("SELECT count(*) FROM autotax_winner").scalar()
        size = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar()
        runs = connection.exec_driver_sql(
            "SELECT r.settings->>'host', extract(epoch FROM r.started_at), extract(epoch FROM r.ended_at) FROM autotax_run r "
            "WHERE r.settings->>'host' IS NOT NULL"
        ).all()
        joined = dict(connection.exec_driver_sql("SELECT slot, extract(epoch FROM joined) FROM autotax_fleet_host").all())
        zone = connection.exec_driver_sql(ZONE).scalar()
    end = max(float(ended) for _, _, ended in runs) + float(zone)
    begin = max(float(timestamp) for timestamp in joined.values())
    present = sum(end - float(timestamp) for timestamp in joined.values())
    busy, measuring = sum(host.busy_s for host in now.hosts), sum(SCALE * seconds for _, _, seconds in problems())
    first, per_trial = min(map(float, joined.values())), load["transactions"] / trials
    at_once = load["connections"]
    lapses, again = sum(claim.lapses for claim in now.claims), len(runs) - PROBLEMS
    for line in (
        f"\nsimulated: {HOSTS} Ray workers, {PROBLEMS} problems, {TRIALS} trials each, time x {SCALE:g}",
        f"tuned {now.count('tuned')}, failed {now.count('failed')}, left {len(now.left)}, winners {winners}, trials {trials}",
        f"claims that lapsed {lapses}; problems that were run more than once {again}",
        f"the last host joined {begin - first:.0f} s after the first; from then on it took {end - begin:.0f} s",
        f"hosts held a problem {100 * busy / present:.1f} % of the time from their joining to the end of the last problem",
        f"replayed measuring is {100 * measuring / present:.1f} % of it; the rest is tuners that share these cores",
        f"PostgreSQL: {load['transactions_per_s']:.0f} transactions a second, {per_trial:.0f} a trial, finalists counted",
        f"  {at_once} connections at most, {at_once / HOSTS:.1f} a host; {size / 2**20:.0f} MiB at the end",
        f"  sessions at work {load['active']:.2f} on average",
        f"  sessions that wait for a lock {load['waiting']:.3f} on average, {load['most_waiting']} at most",
        f"cores of this machine: {os.cpu_count()}, load average at the end {os.getloadavg()[0]:.1f}",
    ):
        print(line)


if __name__ == "__main__":
    main()
