"""The signatures that plugins rely on: of the stand-ins, and of the frameworks' wheels where AUTOTAX_WHEELS names their folder.

    pip download --no-deps -d wheels vllm==0.33.0 sglang==0.5.23 torchtitan==0.3.0
    AUTOTAX_WHEELS=wheels python -m pytest tests/engines/test_contracts.py

Wheels are read, not imported: what is in them needs GPUs.
"""

from __future__ import annotations

import ast
import os
import re
import zipfile
from pathlib import Path

import pytest

from autotax.engines import sglang, vllm
from autotax.engines.plugin import Contract
from autotax.engines.vllm_norms import SCHEMAS
from autotax.torch import registration
from tests.engines import stand_ins

CONTRACTS = {"vllm": vllm.CONTRACTS, "sglang": sglang.CONTRACTS}
ALL = [(package, contract) for package, contracts in CONTRACTS.items() for contract in contracts]
CALLERS = ("torchtitan/distributed/linear.py", "sglang/srt/layers/layernorm_sp.py")


@pytest.mark.parametrize("package", CONTRACTS)
def test_the_stand_ins_keep_the_contracts(package: str) -> None:
    with stand_ins.vllm(), stand_ins.sglang():
        assert [contract.broken() for contract in CONTRACTS[package]] == [""] * len(CONTRACTS[package])


def wheel_of(package: str) -> zipfile.ZipFile:
    folder = os.environ.get("AUTOTAX_WHEELS")
    wheels = sorted(Path(folder).glob(f"{package}-*.whl")) if folder else []
    if not wheels:
        pytest.skip(f"no wheel of {package} in AUTOTAX_WHEELS")
    return zipfile.ZipFile(wheels[-1])


@pytest.mark.parametrize(("package", "contract"), ALL, ids=lambda value: value.name if isinstance(value, Contract) else value)
def test_the_wheels_keep_the_contracts(package: str, contract: Contract) -> None:
    with wheel_of(package) as wheel:
        tree: ast.AST = ast.parse(wheel.read(contract.module.replace(".", "/") + ".py"))
    for part in contract.name.split("."):
        named = [node for node in ast.walk(tree) if getattr(node, "name", "") == part]  # some are defined in an `if`
        assert named, f"no {part} in {contract.module}"
        tree = named[-1]
    assert isinstance(tree, ast.FunctionDef)
    arguments = tree.args
    assert tuple(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)) == contract.parameters


FIELDS = (
    ("kernels/linear/scaled_mm/ScaledMMLinearKernel.py", "FP8ScaledMMLinearLayerConfig",
     {"activation_quant_key", "weight_quant_key", "out_dtype"}),
    ("layers/quantization/utils/quant_utils.py", "ScaleDesc", {"static", "group_shape"}),
    ("layers/quantization/utils/quant_utils.py", "QuantKey", {"scale"}),
)  # fmt: skip


@pytest.mark.parametrize(("path", "name", "fields"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_wheel_of_vllm_says_how_weights_are_quantised(path: str, name: str, fields: set[str]) -> None:
    with wheel_of("vllm") as wheel:
        tree = ast.parse(wheel.read(f"vllm/model_executor/{path}"))
    (kept,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    assert fields <= {ast.unparse(statement.target) for statement in kept.body if isinstance(statement, ast.AnnAssign)}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_extension_of_vllm_declares_its_norms_that_quantise(name: str) -> None:
    with wheel_of("vllm") as wheel:
        (extension,) = [path for path in wheel.namelist() if path.startswith("vllm/_C_stable")]
        (arguments,) = set(re.findall(rb"%b\(([^)]*)\) -> \(\)" % name.encode(), wheel.read(extension)))
    assert [argument.split()[-1] for argument in arguments.decode().split(", ")] == SCHEMAS[name].split()


PEERS = (
    Contract(
        "vllm.distributed.device_communicators.custom_all_reduce",
        "CustomAllreduce.all_reduce",
        ("self", "inp", "out", "registered"),
    ),
    Contract(
        "sglang.kernels.ops.communication.all_reduce_fusion",
        "_norm_launch",
        ("world_size", "num_tokens", "hidden_dim", "finalize", "two_shot", "vecs_per_thread", "cluster_size"),
    ),
    Contract(
        "sglang.kernels.ops.communication.all_reduce_fusion",
        "_all_reduce_residual_norm_op",
        (
            "world_size", "hidden_dim", "cluster_size", "out", "input", "norm_weight", "norm_eps", "residual", "residual_out",
            "weight_offset", "two_shot", "vecs_per_thread",
        ),
    ),
)  # fmt: skip
"""The engines' functions that rows of `compare all-reduce-norm` call."""


@pytest.mark.parametrize("contract", PEERS, ids=lambda contract: contract.name)
def test_the_wheels_have_the_kernels_that_comparisons_run(contract: Contract) -> None:
    test_the_wheels_keep_the_contracts(contract.module.partition(".")[0], contract)


@pytest.mark.parametrize("path", CALLERS)
def test_the_wheels_call_torchs_operators(path: str) -> None:
    with wheel_of(path.partition("/")[0]) as wheel:
        text = wheel.read(path).decode()
    for name in registration.SCHEMAS:
        assert f"torch.ops.symm_mem.{name}(" in text
