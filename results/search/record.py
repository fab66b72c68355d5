"""Records a dense, seeded sample of a space, each config measured once. Replays and models of latencies read the file."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from random import Random

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.db import Store
from autotax.hardware import Hardware
from autotax.runner.measurement import Candidate, Effort, Runner
from autotax.software import Environment
from autotax.spaces import Space, space_for
from autotax.tuner.progress import Silence
from autotax.tuner.run_recorder import Ledger
from results.search import landscapes


def sample(space: Space, seed: int, count: int) -> Iterator[Config]:
    """Yields each config at most once: the seeds, then random valid configs of the variants in turn."""
    seen: set[Config] = set()
    variants = [variant.some(count, Random(f"{seed}/{name}")) for name, variant in space.variants.items()]
    in_turn = (config for some in zip_longest(*variants) for config in some if config)
    for config in (*space.seeds(), *in_turn):
        if config not in seen:
            seen.add(config)
            yield config


def record(
    problem: Problem, hardware: Hardware, runner: Runner, environment: Environment, conditions: Conditions, trials: int,
    seed: int, path: Path,
) -> dict[str, int]:  # fmt: skip
    """Measures `count` configs and writes them to a file. Returns the number of trials by status. Ctrl-C writes the trials so
    far.
    """
    settings = Settings(trials=trials, seed=seed, sampler="random", conditions=conditions).on(hardware)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "record.db"
        with Store.open(database) as store:
            ledger = Ledger(store, problem, hardware, environment, settings, Silence())
            status = "interrupted"
            try:
                coming = list(islice(sample(space_for(problem, hardware), seed, trials), trials))
                while coming:
                    config = coming.pop(runner.expect(problem, coming[: runner.foresight]))
                    (measurement,) = runner.measure(problem, [Candidate(config, conditions)], Effort())
                    ledger.add(sum(counts.values()), measurement)
                    counts[measurement.status] += 1
                status = "done"
            except KeyboardInterrupt:
                if not counts:
                    raise
            finally:
                ledger.end(status, {})
        landscapes.write(path, [database], Path(folder))
    return dict(counts)
