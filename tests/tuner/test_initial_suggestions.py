"""The first configs of a problem are compiled while the finalists of the previous problem are measured, or while ranks start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from autotax import api
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.operators import registry
from autotax.operators.declaration import ONLY_OURS_VARIABLE
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.software import Environment, environment
from autotax.spaces import space_for
from autotax.tuner import Settings, Silence, compile_ahead
from autotax.tuner.model import Prior
from autotax.tuner.search import FEWEST, Search
from tests.tuner.shared import DECODE, GEMM, H200, run
from tests.tuner.synthetic import SyntheticRunner

LATER = replace(GEMM, m=1024)
SUM = GemmReduceScatter(512, 8192, 2048, world_size=4)
FORESIGHT = 8


def smooth(config: Config) -> float:
    return 100.0 + len(str(config)) if config.variant == "bsp" else 80.0 + len(str(config))


class Machine(SyntheticRunner):
    """Records the order of requests, and acts as a machine where everything is compiled in advance."""

    environment = environment("cpu")

    def __init__(self) -> None:
        super().__init__(smooth)
        self.look_ahead = FORESIGHT
        self.jobs: list[tuple[Problem, int]] = []
        self.ahead: list[tuple[Problem, list[Config]]] = []
        """Configs announced in calls of `expect` that request no config, by problem."""

    def start(self, overlap: Callable[[], None]) -> Environment:
        if not self.jobs:
            overlap()
        return self.environment

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        self.jobs.append((problem, len(candidates)))
        return super().measure(problem, candidates, effort, overlap)

    def expect(self, problem: Problem, configs: Sequence[Config], later: object = ()) -> int:
        later = list(later)  # type: ignore[call-overload]
        if not configs:
            self.ahead.append((problem, later))
            self.jobs.append((problem, 0))
        return super().expect(problem, configs, later)


@pytest.mark.sampled
@pytest.mark.parametrize("problem", [GEMM, DECODE], ids=lambda p: p.op)
@pytest.mark.parametrize("sampler", ["gp", "tpe", None])
@pytest.mark.parametrize("variants", [None, ("push", "single")])
def test_a_run_asks_first_for_what_was_compiled_ahead(
    problem: Problem, sampler: str | None, variants: tuple[str, ...] | None, store: Store
) -> None:
    chosen = variants and tuple(v for v in variants if v in ("single" if problem is DECODE else "push"))
    settings = Settings(sampler=sampler, trials=12, variants=chosen)
    ahead, later = Machine(), Machine()
    compile_ahead(problem, H200, ahead, store, ahead.environment, settings)
    ((_, foreseen),) = ahead.ahead
    run(store, later, problem, sampler=sampler, trials=12, variants=chosen)
    asked = list(dict.fromkeys(config for configs, _ in later.requests for config in configs))
    assert foreseen[:FORESIGHT] == asked[:FORESIGHT] and len(foreseen) > FORESIGHT


@pytest.mark.parametrize("problem", [GEMM, SUM, replace(SUM, output="replicated")], ids=lambda p: p.brief())
@pytest.mark.parametrize("sampler", ["gp", "tpe", "random"])
def test_a_search_asks_for_what_others_wrote_before_it_can_end_by_itself(
    problem: Problem, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ONLY_OURS_VARIABLE)
    space, alternatives = space_for(problem, H200), set(registry.of(problem).peers)
    others = alternatives & set(space.variants)
    search = Search(space, Settings(sampler=sampler))
    asked = [search.ask() for _ in range(2 * len(others) + 2)]
    first, *rest = [config.variant for config in asked if config]
    assert first == "bsp" and len(asked) <= FEWEST
    assert alternatives.isdisjoint(rest[::2]) and set(rest[1::2]) == others
    ours = set(space.variants) - alternatives - {"bsp"}
    assert len(set(rest[2::2])) >= min(len(rest[2::2]), len(ours) - 1), "one of each variant comes first"


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random"])
def test_a_variant_that_won_nowhere_is_tried_before_other_winners_of_one_that_did(sampler: str) -> None:
    few = GemmReduceScatter(16, 7168, 8192, "e4m3", "replicated", 2, scales="block")
    space = space_for(few, H200)
    won = [config for config in space.seeds() if config.variant == "scaled_two_kernel"]
    search = Search(space, Settings(sampler=sampler), won)
    alternatives = set(registry.of(few).peers) & set(space.variants)
    ours = set(space.variants) - alternatives
    turns = 2 if sampler == "gp" else 1  # every other turn is the model's
    asked = [search.ask() for _ in range(len(alternatives) + turns * len(ours))]
    assert len(won) > len(ours) and {config.variant for config in asked if config} >= ours


def test_a_variant_that_is_newer_than_the_prior_is_tried_before_those_that_won_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    few = GemmReduceScatter(16, 7168, 8192, "e4m3", "replicated", 2, scales="block")
    space, knows = space_for(few, H200), Prior.knows
    *old, new = (name for name, variant in space.variants.items() if name.startswith("scaled_") and variant.seeds)
    monkeypatch.setattr(Prior, "knows", lambda prior, variant: variant != new and knows(prior, variant))
    search = Search(space, Settings(sampler="gp"), [space.variants[name].seeds[0] for name in old])
    asked = [search.ask() for _ in range(6 + len(set(registry.of(few).peers) & set(space.variants)))]
    assert new in {config.variant for config in asked if config}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()

    @contextmanager
    def ranks(*_: object) -> Iterator[Machine]:
        yield machine

    monkeypatch.setattr(api, "ranks", ranks)
    return machine


def tuned(store: Store, *problems: Problem) -> list[str]:
    jobs = [(problem, Settings(trials=12, soak=0)) for problem in problems]
    verdicts = api.tune_jobs(jobs, H200, store, lambda *_: nullcontext(Silence()))
    return [verdict.problem.key for verdict in verdicts if verdict.winner]


def test_compilers_begin_while_ranks_start_and_with_the_next_problem_while_finalists_are_measured(
    machine: Machine, store: Store
) -> None:
    assert tuned(store, GEMM, LATER) == [GEMM.key, LATER.key]
    assert [problem for problem, _ in machine.ahead] == [GEMM, LATER], "once, and for the last one nothing is left to do"
    assert machine.jobs[0] == (GEMM, 0)
    at = machine.jobs.index((LATER, 0))
    assert machine.jobs[at - 1][0] == GEMM and machine.jobs[at - 1][1] > 2, "the finalists"
    assert all(problem == GEMM for problem, _ in machine.jobs[:at])


@pytest.mark.usefixtures("machine")
def test_what_goes_wrong_there_is_the_next_problems(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def expect(_: object, __: Problem, configs: Sequence[Config], ___: object = ()) -> int:
        if not configs:
            raise ValueError("as the test wants it")
        return 0

    monkeypatch.setattr(Machine, "expect", expect)
    assert tuned(store, GEMM, LATER) == [GEMM.key, LATER.key]
