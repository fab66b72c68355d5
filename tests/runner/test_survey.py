"""Compilation for a GPU that is not here: the resources that configs need, and the configs that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autotax.core.config import Config
from autotax.operators.problems import AllGatherGemm
from autotax.runner.precompile import Surveyed, survey
from autotax.spaces import space_for
from tests.spaces.drawing import H200

GEMM = AllGatherGemm(256, 256, 256, "bf16", "m", 4)
NARROW = replace(H200, shared_memory=48 << 10)
PULL = space_for(GEMM, H200).default("pull")
TINY = Config.of("pull", PULL.values | {"block_m": 16, "block_n": 32, "num_stages": 2})
CONFIGS = [PULL, TINY, *map(Config, ("bsp", "does_not_compile", "spills"))]


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Config, Surveyed]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        surveyed = list(survey(GEMM, CONFIGS, NARROW, modules=("tests.runner.bad_to_compile",)))
    assert [entry.config for entry in surveyed] == CONFIGS
    yield {entry.config: entry for entry in surveyed}


def test_what_compiles_tells_what_it_takes(surveyed: dict[Config, Surveyed]) -> None:
    assert (surveyed[TINY].status, surveyed[TINY].error) == ("ok", None)
    publish, pull = surveyed[TINY].kernels
    assert (publish.kernel, pull.kernel) == ("publish", "pull_kernel")
    assert publish.shared < pull.shared <= NARROW.shared_memory
    assert 0 < (publish.registers or 0) < (pull.registers or 0) <= 255
    assert publish.local == 0 and pull.local is not None
    assert surveyed[Config("bsp")] == Surveyed(Config("bsp"), "ok")


def test_what_would_not_fit_is_out_of_resources(surveyed: dict[Config, Surveyed]) -> None:
    kernel = surveyed[PULL].kernels[-1]
    assert surveyed[PULL].status == "out_of_resources" and kernel.shared > NARROW.shared_memory
    assert surveyed[PULL].error == f"pull_kernel takes {kernel.shared} bytes of shared memory; cuda:90 has 49152 for a program"


def test_what_registers_do_not_hold_is_told(surveyed: dict[Config, Surveyed]) -> None:
    (kernel,) = surveyed[Config("spills")].kernels
    assert kernel.registers == 255 and (kernel.local or 0) >= 4


def test_what_does_not_compile_says_why(surveyed: dict[Config, Surveyed]) -> None:
    """test_precompile.py tests configs that abort or hang the compiler."""
    failed = surveyed[Config("does_not_compile")]
    assert failed.status == "compile_error" and "CompilationError" in (failed.error or "") and failed.kernels == ()
