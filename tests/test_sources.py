"""What a variant is made of, and that an edit changes the digests of what it decides and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autotax
from autotax import sources
from autotax.hardware import kernel_digest
from autotax.sources import reached_from, variant_digest
from autotax.spaces import space_for
from tests.edits import edited
from tests.tuner.shared import DECODE, GEMM, H200

FOLDERS = {"all-gather-gemm": "all_gather_gemm", "flash-decode": "flash_decode"}
VARIANTS = [(problem.op, variant) for problem in (GEMM, DECODE) for variant in space_for(problem, H200).variants]

IMPORTING = """
import importlib, json, sys, types
import autotax.kernels, autotax.spaces

ARITHMETIC = ("order", "pieces", "shares", "sides")

def ours(name):
    return name.startswith("autotax.kernels.") or name in [f"autotax.spaces.{each}" for each in ARITHMETIC]

def alone(module):
    # What is imported for this module, its package's `__init__` left out.
    for name in filter(ours, list(sys.modules)):
        del sys.modules[name]
    for name in ARITHMETIC:
        vars(autotax.spaces).pop(name, None)
    stub = types.ModuleType(package)
    stub.__path__ = folders
    sys.modules[package] = stub
    importlib.import_module(module)
    return sorted(name for name in filter(ours, sys.modules) if name != package)

found = {}
for package in ("autotax.kernels.all_gather_gemm", "autotax.kernels.flash_decode"):
    loaded = importlib.import_module(package)
    folders = loaded.__path__
    modules = {variant: operator.__module__ for variant, operator in loaded.VARIANTS.items()}
    found |= {f"{package}.{variant}": [module, alone(module)] for variant, module in modules.items()}
print(json.dumps(found))
"""


def test_what_is_reached_is_what_python_imports_for_it() -> None:
    here = os.environ | {"PYTHONPATH": str(Path(autotax.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", IMPORTING], env=here, capture_output=True, text=True, check=True)
    imported = json.loads(ran.stdout)
    assert len(VARIANTS) == 15
    for op, variant in VARIANTS:
        name = f"autotax.kernels.{FOLDERS[op]}.{variant}"
        module, modules = imported[name]
        assert module == name, "a variant is in the module that bears its name"
        reached = reached_from(f"kernels/{FOLDERS[op]}/{variant}.py")
        assert sorted(f"autotax.{path.removesuffix('.py').replace('/', '.')}" for path in reached) == modules


GEMMS, DECODES = ({(op, variant) for op, variant in VARIANTS if op == asked} for asked in FOLDERS)


@pytest.mark.parametrize(
    ("path", "stale"),
    [
        ("kernels/all_gather_gemm/pull.py", {("all-gather-gemm", "pull"), ("all-gather-gemm", "staged_pull")}),
        ("kernels/all_gather_gemm/gemm.py", GEMMS - {("all-gather-gemm", "bsp"), ("all-gather-gemm", "decomposed")}),
        ("kernels/flash_decode/bsp.py", {("flash-decode", variant) for variant in ("bsp", "gather", "fine_grained")}),
        ("kernels/primitives.py", GEMMS | DECODES),
        ("spaces/shares.py", GEMMS - {("all-gather-gemm", "bsp"), ("all-gather-gemm", "decomposed")}),
        ("spaces/order.py", GEMMS - {("all-gather-gemm", "bsp")} | DECODES),
        ("kernels/all_gather_gemm/peers.py", set()),
        ("kernels/all_gather_gemm/__init__.py", set()),
        ("kernels/all_gather_gemm/of_tomorrow.py", set()),
    ],
)
def test_an_edit_changes_the_digests_of_what_it_decides(path: str, stale: set[tuple[str, str]]) -> None:
    before, whole = {each: variant_digest(*each) for each in VARIANTS}, kernel_digest()
    assert len(set(before.values())) == len(VARIANTS)
    with edited(path):
        assert {each for each in VARIANTS if variant_digest(*each) != before[each]} == stale
        assert sources.kernel_digest() != whole
    assert {each: variant_digest(*each) for each in VARIANTS} == before


@pytest.mark.parametrize("variant", ["product", "torch", "of_a_plugin", "__init__", "../primitives", "", "pull.py"])
def test_what_has_no_module_of_its_own_depends_on_all(variant: str) -> None:
    assert variant_digest(GEMM.op, variant) == kernel_digest() == variant_digest("all-reduce", "bsp")


@pytest.mark.parametrize(
    "text",
    [
        b"from autotax.kernels.flash_decode.words import merge_words\n",
        b"from autotax.kernels.flash_decode import (\n    inbox,\n    words as w,\n)\n",
        b"from autotax.kernels.flash_decode import inbox, \\\n    words\n",
        b"import autotax.kernels.flash_decode.words as words\n",
        b"def later():\n    from autotax.kernels.flash_decode import words\n",
    ],
)
def test_every_way_to_import_counts(text: bytes) -> None:
    words = "kernels/flash_decode/words.py"
    assert words not in reached_from("kernels/flash_decode/gather.py")
    with edited("kernels/flash_decode/gather.py", text):
        assert words in reached_from("kernels/flash_decode/gather.py")
        assert words in reached_from("kernels/flash_decode/fine_grained.py"), "which imports gather"


def test_digests_need_neither_torch_nor_triton_nor_the_kernels() -> None:
    code = (
        "import sys; from autotax.sources import variant_digest as digest; print(digest('flash-decode', 'fused'),"
        "[name for name in sys.modules if name.startswith(('torch', 'triton', 'autotax.kernels'))])"
    )
    here = os.environ | {"PYTHONPATH": str(Path(autotax.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", code], cwd="/", env=here, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [variant_digest("flash-decode", "fused"), "[]"]
