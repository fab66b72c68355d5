"""A Triton built for ROCm alone lacks the modules for NVIDIA: what AMD has must not import them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import sys

import triton
for name in ("language.extra.cuda", "experimental.gluon.language.nvidia", "experimental.gluon.nvidia"):
    sys.modules[f"triton.{name}"] = None  # so that it is not found
from autotax.kernels import offline
from autotax.operators import operators, with_world_size
from autotax.spaces import space_for

for operator in operators().values():
    problem = with_world_size(operator.examples[True], 8)
    for variant in space_for(problem, offline.known_hardware("hip:gfx942")).variants:
        operator.variants[variant].kernel_class()
        print(operator.name, variant)
"""


def test_variants_of_amd_need_no_modules_for_nvidia() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "push" in run.stdout
    assert "push_words" not in run.stdout
