"""`autotax compile`: which configs it compiles, what it prints and exits with. The compilers are stood in for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources
from autotax.operators.problems import AllGatherGemm
from autotax.runner.precompile import Surveyed
from autotax.spaces import space_for
from tests.cli.conftest import Run

GEMM = ["all-gather-gemm", "--m", "512", "--n", "7168", "--k", "8192"]
FITS = (Resources("publish", 0, 26, 0), Resources("pull_kernel", 180_224, 210, 48))


class Compilers:
    """Compile everything at once; `bad` variants do not compile."""

    def __init__(self) -> None:
        self.bad: tuple[str, ...] = ()
        self.asked: list[tuple[Problem, list[Config], Hardware]] = []

    def __call__(self, problem: Problem, configs: Sequence[Config], hardware: Hardware) -> Iterator[Surveyed]:
        self.asked.append((problem, list(configs), hardware))
        for config in configs:
            bad = config.variant in self.bad
            yield Surveyed(config, "compile_error", "no\nsuch thing") if bad else Surveyed(config, "ok", None, FITS)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    stand_in = Compilers()
    monkeypatch.setattr("autotax.runner.precompile.survey", stand_in)
    return stand_in


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_so_many_of_each_variant_the_default_first(run: Run, compilers: Compilers, db: Path, target: str) -> None:
    assert run("compile", *GEMM, "--target", target, "--trials", 5).code == 0
    [(problem, configs, hardware)] = compilers.asked
    assert problem == AllGatherGemm(512, 7168, 8192, world_size=8) and hardware.target == target
    space = space_for(problem, hardware)
    assert all(config in space for config in configs) and len(set(configs)) == len(configs)
    counts = Counter(config.variant for config in configs)
    assert list(counts) == list(space.variants) and (counts["bsp"], counts["pull"], counts["push"]) == (1, 5, 5)
    firsts = [next(config for config in configs if config.variant == variant) for variant in space.variants]
    assert firsts == [space.default(variant) for variant in space.variants]
    assert not db.parent.exists()


def test_a_table_of_what_each_takes(run: Run, compilers: Compilers) -> None:
    compilers.bad = ("push",)
    result = run("compile", *GEMM, "--target", "cuda:90", "--trials", 1, "--variants", "pull,push", "--world-size", 4)
    assert result.code == 1 and "world_size=4: compiled for cuda:90" in result.out
    assert "176.0 KiB         210    48 B   ok" in result.out
    assert "compile_error: no such thing" in result.out
    assert "2 configs: 1 ok, 1 compile_error; 1 take local memory" in result.out and "227.0 KiB for a program" in result.out


def test_one_document(run: Run, compilers: Compilers) -> None:
    compilers.bad = ("push",)
    result = run("compile", *GEMM, "--target", "cuda:90", "--trials", 1, "--variants", "pull,push", "--json")
    pull, push = result.results
    assert result.code == 1 and result.whole["about"]["target"] == "cuda:90"
    assert (pull["variant"], pull["status"], pull["error"]) == ("pull", "ok", None)
    assert pull["kernels"][1] == {"kernel": "pull_kernel", "shared": 180_224, "registers": 210, "local": 48, "code": ""}
    assert (push["variant"], push["status"], push["kernels"]) == ("push", "compile_error", [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*GEMM], "no target given; allowed are cuda:90, cuda:100, hip:gfx942, hip:gfx950"),
        ([*GEMM, "--target", "cuda:80"], "target is 'cuda:80'; allowed are cuda:90"),
        (["--target", "cuda:90"], "no operator given; allowed are all-gather-gemm, all-reduce-norm, decode-merge, flash-decode"),
        ([*GEMM, "--target", "cuda:90", "--trials", "0"], "trials is 0; it must be at least 1"),
        ([*GEMM, "--target", "cuda:90", "--variants", "pul"], "variant is 'pul'"),
        ([*GEMM, "--target", "cuda:90", "--shard", "n"], "shard is 'n'"),
        ([*GEMM, "--target", "cuda:90", "--db", "x.db"], "--db"),
    ],
)
def test_bad_input(run: Run, compilers: Compilers, db: Path, arguments: list[str], said: str) -> None:
    assert said in run("compile", *arguments).complaint
    assert not compilers.asked and not db.parent.exists()
