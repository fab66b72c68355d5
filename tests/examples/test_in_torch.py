"""The complete examples on two CPU ranks: one size has a tuned config, the others fall back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from autotax.core.conditions import ON_CPU
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, GatherAttention
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner
from tests.volume import volume

ROOT = Path(__file__).parents[2]


GATHER, NORM = AllGatherGemm(256, 96, 64, "fp32", "m", 2), AllReduceNorm(16, 256, "fp32", 2, quant="row")
ATTENTION = GatherAttention(1, 4, 2, 16, 64, "bf16", 2, layout="zigzag")
EXAMPLES: dict[str, tuple[Problem, str, list[str]]] = {
    "in_torch": (GATHER, "decomposed", ["layer: (256, 96)", "attention: (2, 8, 16)", *["runs bulk-synchronous"] * 8]),
    "all_reduce_norm": (NORM, "one_shot", ["relative error"]),
    "gather_attention": (ATTENTION, "push", ["relative error"]),
}


def run_on_two_ranks(script: str, db: Path) -> list[str]:
    """The lines that the ranks of an example print."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one: no port is guessed
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": paths, "AUTOTAX_DB": str(db), "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", ROOT / "examples" / script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | settings | job | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("example", ["fp8_in_torch", "gather_attention"])
def test_a_small_example_has_40_lines(example: str) -> None:
    assert len((ROOT / f"examples/{example}.py").read_text().splitlines()) <= 40


@pytest.mark.volume
def test_the_example_of_fp8_runs(tmp_path: Path) -> None:
    for rank, output in enumerate(run_on_two_ranks("fp8_in_torch.py", tmp_path / "none.db")):
        assert f"rank {rank}: (8, 256) to (8, 256), torch.bfloat16, finite: True" in output


@pytest.mark.parametrize("example", ["in_torch", *volume("all_reduce_norm", "gather_attention")])
def test_an_example_runs_what_is_tuned_and_agrees_with_torch(tmp_path: Path, example: str) -> None:
    db, here = tmp_path / "winners.db", detect("cpu")
    problem, variant, lines = EXAMPLES[example]
    config = space_for(problem, here).default(variant)
    assert config is not None
    with Store.open(db) as winners:
        keep_winner(winners, problem, config, here, environment("cpu"), ON_CPU)
    outputs = run_on_two_ranks(f"{example}.py", db)
    assert str(config) in outputs[0]
    assert all(outputs[0].count(line) == lines.count(line) or "error" in line for line in lines), outputs[0]


@pytest.mark.volume
def test_without_a_launcher_it_says_how_to_start_it() -> None:
    settings = {name: value for name, value in os.environ.items() if name != "RANK"} | {"TRITON_INTERPRET": "1"}
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, ROOT / "examples/in_torch.py"]
    alone = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280)
    assert alone.returncode == 1 and "Traceback" not in alone.stderr
    assert "torchrun --nproc-per-node 2 examples/in_torch.py" in alone.stderr
