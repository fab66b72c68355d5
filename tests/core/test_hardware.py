"""Hardware and environment: what is found, and one line for what is not here."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autotax.hardware
from autotax.core.errors import UsageError
from autotax.digests import kernel_digest
from autotax.hardware import Hardware, check_world_size, detect
from autotax.software import environment
from tests.spaces.drawing import H200


def refusal(function: object, *args: object) -> str:
    with pytest.raises(UsageError) as error:
        function(*args)  # type: ignore[operator]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_cpu_ranks_are_always_here() -> None:
    cpu = detect("cpu")
    assert not cpu.on_gpu
    assert cpu.default_world_size == 2
    assert cpu.target == "interpreter"
    assert "CPU ranks" in str(cpu)


def test_an_unknown_backend_is_refused() -> None:
    assert refusal(detect, "tpu") == "backend is 'tpu'; allowed are cuda, rocm, cpu: give one of these as --backend"


def test_a_backend_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotax.hardware, "backends_present", lambda: ["cpu"])
    message = refusal(detect.__wrapped__, "rocm")
    assert message == "backend is 'rocm'; this machine has cpu: leave --backend out, or run `autotax doctor`"


def test_torch_is_asked_for_gpus_only_where_there_is_a_device_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(autotax.hardware, "DEVICE_NODES", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "null").touch()
    assert autotax.hardware.backends_present() == ["cpu"]
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ImportError):
        autotax.hardware.backends_present()


def test_ranks_need_a_gpu_each() -> None:
    check_world_size(H200, 8)
    message = refusal(check_world_size, H200, 9)
    assert message == "world size is 9; this machine has 8 GPUs: give --world-size 8 or less, or --backend cpu"
    check_world_size(detect("cpu"), 64)


def test_gpus_need_to_reach_each_other() -> None:
    apart = dataclasses.replace(H200, links="peer access 0/56 pairs")
    assert "cannot reach each other's memory" in refusal(check_world_size, apart, 2)


def test_digests_change_with_every_field() -> None:
    assert Hardware(**H200.to_dict()).digest == H200.digest
    for field in dataclasses.fields(Hardware):
        value = getattr(H200, field.name)
        changed = dataclasses.replace(H200, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
        assert changed.digest != H200.digest, field.name


def test_the_environment_names_what_kernels_depend_on() -> None:
    here = environment("cpu")
    assert here.kernels == kernel_digest()
    assert "gloo" in here.comm
    assert dataclasses.replace(here, triton="0.0").digest != here.digest


def test_the_version_of_torch_is_told_without_importing_it() -> None:
    code = "import sys; from autotax.software import environment; print(environment('cpu').torch, 'torch' in sys.modules)"
    assert _python(code) == f"{torch.__version__} False"


def test_the_kernel_digest_is_that_of_the_sources() -> None:
    """Another process, in another folder, computes the same digest."""
    assert _python("from autotax.digests import kernel_digest; print(kernel_digest())") == kernel_digest()


def test_spaces_need_neither_torch_nor_triton() -> None:
    code = "import sys, autotax.operators; print({'torch', 'triton'} & set(sys.modules))"
    assert _python(code) == "set()"


def _python(code: str) -> str:
    """Runs `code` in another interpreter and returns its output."""
    here = os.environ | {"PYTHONPATH": str(Path(autotax.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=here, capture_output=True, text=True, check=True)
    return done.stdout.strip()
