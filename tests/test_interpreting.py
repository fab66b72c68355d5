"""The lighter interpreter computes the same, patches once a launch, and knows when to leave a Triton alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from triton.runtime import interpreter

from autotax.interpreting import lighten_interpreter

ROOT = Path(__file__).parents[1]


def test_computes_the_same_with_less_work() -> None:
    command, interpreting = [sys.executable, "-m", "tests.interpreted"], os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=interpreting, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    before, first, again = found["results"]
    values = np.arange(8) + 2 * 28 - 7 - 28  # each call of the device function adds 28 and takes the greatest away
    assert before == [*(values * 100_000_000).astype(np.int32).tolist(), *(values * 0.75).astype(np.int64).tolist()]
    assert first == again == before
    usual, *lighter = found["calls"]
    assert max(lighter) <= min(usual, 2), "the kernel's patch serves the functions that it calls"
    assert found["undone"]


def test_leaves_alone_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("interpreter_builder", "_patch_lang", "_get_np_dtype"):
        monkeypatch.delattr(interpreter, name)
    lighten_interpreter.__wrapped__()
    assert not hasattr(interpreter, "_patch_lang")
