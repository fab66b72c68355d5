"""A worker of a fleet on real GPUs: it sees all of them, probes BSP, tunes, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from autotax.db import Store
from autotax.fleet.messages import FleetJob, Order
from autotax.fleet.queue import ClaimQueue, Due
from autotax.fleet.worker import Worker
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.tuner import Settings
from tests.db import server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(server.binaries() is None, reason="there is no wheel with a PostgreSQL server"),
]


def test_a_worker_tunes_on_all_gpus_of_its_host() -> None:
    programs, here = server.binaries(), detect()
    assert programs
    problem = AllGatherGemm(256, 512, 512, "bf16", "m", here.default_world_size)
    job = FleetJob(problem, Settings(trials=4, soak=20).on(here))
    with server.running(programs) as url, Store.open(url) as store, ClaimQueue(url) as desk:
        desk.begin("fleet")
        desk.deal("fleet", here.digest, [Due(job)], job)
        before = torch.cuda.mem_get_info()[0]
        assert Worker(Order(url, "fleet", 0)).run() == "left"
        (host,), (claim,) = desk.attend("fleet", 60.0)
        assert (claim.outcome, host.kind, host.trials) == ("tuned", here.digest, 4) and host.probes[problem.key] > 0
        (winner,) = store.winners()
        assert desk.provers([winner.trial_id]) == {winner.trial_id: host.name}
        assert torch.cuda.mem_get_info()[0] > before - (1 << 30), "ranks are gone with the worker"
