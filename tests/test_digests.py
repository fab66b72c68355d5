"""The code that a variant consists of. An edit changes the digests of the variants that use the edited code, and no others."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autotax
from autotax import digests as sources
from autotax import software
from autotax.digests import Symbol, kernel_digest, reached_from, symbol_digest
from autotax.operators import named, operators
from autotax.operators.registry import variant_digest
from autotax.spaces import space_for
from tests.edits import Edit, edited
from tests.tuner.shared import DECODE, GEMM, H200
from tests.volume import volume

FOLDERS = {"all-gather-gemm": "all_gather_gemm", "flash-decode": "flash_decode"}
VARIANTS = [
    (problem.op, variant) for problem in (GEMM, DECODE) for variant in space_for(problem, H200).variants
    if variant not in named(problem.op).peers
]  # fmt: skip

IMPORTING = """
import importlib, json, sys

def ours(name):
    return name.startswith("autotax.kernels.") and not hasattr(sys.modules[name], "__path__")

imported = {}
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("autotax.kernels")]:
        del sys.modules[name]
    importlib.import_module(module)
    if "autotax.kernels.scaled_product" in sys.modules:  # whose class imports this one for its first product
        importlib.import_module("autotax.kernels.specialized_product")
    imported[module] = sorted(filter(ours, sys.modules))
print(json.dumps(imported))
"""


def reached_modules(place: Symbol) -> list[str]:
    return sorted({symbol.module for symbol in reached_from(place)})


@pytest.mark.volume
def test_what_is_reached_is_imported_by_python_too() -> None:
    here = os.environ | {"PYTHONPATH": str(Path(autotax.__file__).parents[1])}
    places = {(op, variant): Symbol(*named(op).variants[variant].place) for op, variant in VARIANTS}
    command = [sys.executable, "-c", IMPORTING, *(place.module for place in places.values())]
    imported = json.loads(subprocess.run(command, env=here, capture_output=True, text=True, check=True).stdout)
    assert len(VARIANTS) == 14
    for (op, _), place in places.items():
        assert place.module.startswith(f"autotax.kernels.{FOLDERS[op]}."), "a variant is in the folder of its operator"
        assert place.module in reached_modules(place)
        assert set(reached_modules(place)) <= set(imported[place.module])


GEMMS, DECODES = ({(op, variant) for op, variant in VARIANTS if op == asked} for asked in FOLDERS)


def gemms(*names: str) -> set[tuple[str, str]]:
    return {("all-gather-gemm", name) for name in names}


@pytest.mark.parametrize(
    ("path", "stale"),
    [
        ("kernels/all_gather_gemm/pull.py", gemms("pull")),
        ("kernels/flash_decode/bsp.py", {("flash-decode", variant) for variant in ("bsp", "gather", "fine_grained", "fused")}),
        ("kernels/primitives.py", GEMMS | DECODES),
        ("kernels/all_gather_gemm/__init__.py", set()),
        *volume(
            ("kernels/all_gather_gemm/push.py", gemms("push", "push_two_kernel")),
            ("kernels/all_gather_gemm/gemm.py", GEMMS),
            ("kernels/tiling.py", GEMMS | DECODES),
            ("kernels/all_gather_gemm/peers.py", set()),
        ),
    ],
)
def test_an_edit_changes_the_digests_of_what_it_decides(path: str, stale: set[tuple[str, str]]) -> None:
    before, whole = {pair: variant_digest(*pair) for pair in VARIANTS}, kernel_digest()
    assert len(set(before.values())) == len(VARIANTS)
    with edited(path):
        assert {pair for pair in VARIANTS if variant_digest(*pair) != before[pair]} == stale
        assert sources.kernel_digest() != whole
    assert {pair: variant_digest(*pair) for pair in VARIANTS} == before


def reworded(text: str) -> str:
    """Every docstring says something else, comments and blank lines come and go, and long lines are broken otherwise."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                child.value.value = "Something else."
    return "# A comment.\n\n" + ast.unparse(tree).replace("\n", "  # another\n", 1)


def test_prose_and_formatting_change_no_digest() -> None:
    before, whole = {pair: variant_digest(*pair) for pair in VARIANTS}, kernel_digest()
    with edited("*", reworded):
        assert {pair: variant_digest(*pair) for pair in VARIANTS} == before
        assert kernel_digest() != whole, "it is one of text"


def constant(name: str) -> Edit:
    """An edit that changes the value of a module's constant."""

    def edit(text: str) -> str:
        lines = [f"{name} = 4096" if line.startswith(f"{name} = ") else line for line in text.splitlines()]
        assert lines != text.splitlines()
        return "\n".join(lines)

    return edit


def test_a_constant_of_push_makes_only_its_own_winners_stale() -> None:
    before = {pair: variant_digest(*pair) for pair in VARIANTS}
    with edited("kernels/all_gather_gemm/push.py", constant("COPY_ELEMENTS")):
        stale = {variant for op, variant in VARIANTS if variant_digest(op, variant) != before[op, variant]}
    # push_two_kernel launches push's own push_shard.
    assert stale == {"push", "push_two_kernel"}


@pytest.mark.parametrize("variant", ["of_a_plugin", "__init__", "../primitives", "", "pull.py"])
def test_what_is_not_here_depends_on_all(variant: str) -> None:
    assert variant_digest(GEMM.op, variant) == kernel_digest() == variant_digest("all-reduce", "bsp")


@pytest.mark.parametrize(
    "text",
    [
        "from autotax.kernels.flash_decode.exchange import merge_words\nprint(merge_words)\n",
        "from autotax.kernels.flash_decode import (\n    inbox,\n    exchange as w,\n)\nprint(w.merge_words)\n",
        "from autotax.kernels.flash_decode import inbox, \\\n    exchange\nprint(exchange)\n",
        "import autotax.kernels.flash_decode.exchange as words\nprint(words.merge_words)\n",
        "import autotax.kernels.flash_decode.exchange\nprint(autotax.kernels.flash_decode.exchange.merge_words)\n",
        "from . import exchange\nprint(exchange.merge_words)\n",
        "from .exchange import *\nprint(merge_words)\n",
        "if True:\n    from autotax.kernels.flash_decode import exchange\nprint(exchange)\n",
        "def later():\n    from autotax.kernels.flash_decode import exchange\nprint(later)\n",
    ],
)
def test_every_way_to_import_counts(text: str) -> None:
    words, shapes = "autotax.kernels.flash_decode.exchange", "autotax.kernels.flash_decode.shapes"
    place = Symbol(shapes, "Shapes")
    assert words not in reached_modules(place)
    with edited("kernels/flash_decode/shapes.py", lambda before: before + "\n" + text):
        assert words in reached_modules(place)
        users = Symbol(*named("flash-decode").variants["gather"].place)
        assert words in reached_modules(users), "which imports shapes"


def is_function(symbol: Symbol) -> bool:
    bound = sources._source(symbol.module, "autotax").bound
    return isinstance(bound.get(symbol.name, [None])[0], ast.FunctionDef)


COVERED = [symbol for variant in VARIANTS for symbol in reached_from(Symbol(*named(variant[0]).variants[variant[1]].place))]


def test_all_that_kernel_modules_define_is_covered_but_for_what_spaces_use_alone() -> None:
    variants = [entry for operator in operators().values() for entry in (*operator.variants.values(), *operator.peers.values())]
    covered = {symbol for variant in variants for symbol in reached_from(Symbol(*variant.place))}
    modules = {symbol.module for symbol in covered}
    defined = {Symbol(module, name) for module in modules for name in sources._source(module, "autotax").bound}
    left = {symbol.name for symbol in defined - covered}
    assert left <= {"BLOCKS_M", "BLOCKS_OF_B", "TILES_BY_WORDS", "is_a_tile", "delay_kernel", "delay", "align_kernel", "Aligner"}


def test_a_peer_has_another_digest_with_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> tuple[str, str]:
        variant_digest.cache_clear()
        return variant_digest("gemm-reduce-scatter", "torch_one_shot"), variant_digest("gemm-reduce-scatter", "push")

    before = digests()
    monkeypatch.setattr(software, "torch_version", lambda: "9.9.9")
    after = digests()
    variant_digest.cache_clear()
    assert before[0] != after[0] and before[1] == after[1]


@pytest.mark.parametrize("number", [*range(0, 60, 20), *volume(*range(10, 60, 20), *range(1, 60, 10))])
def test_a_statement_more_in_a_function_changes_the_digests_of_its_users(number: int) -> None:
    functions = sorted({symbol for symbol in COVERED if is_function(symbol)})
    symbol = functions[number * len(functions) // 60]

    def edit(text: str) -> str:
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == symbol.name:
                node.body.append(ast.parse("assert True").body[0])
        return ast.unparse(tree)

    before = {variant: variant_digest(*variant) for variant in VARIANTS}
    users = {v for v in VARIANTS if symbol in reached_from(Symbol(*named(v[0]).variants[v[1]].place))}
    with edited(symbol.module.removeprefix("autotax.").replace(".", "/") + ".py", edit):
        assert {variant for variant in VARIANTS if variant_digest(*variant) != before[variant]} == users != set()


def test_digests_need_neither_torch_nor_triton_nor_the_kernels() -> None:
    code = (
        "import sys; from autotax.operators.registry import variant_digest as digest; print(digest('flash-decode', 'fused'),"
        "[name for name in sys.modules if name.startswith(('torch', 'triton', 'autotax.kernels'))])"
    )
    here = os.environ | {"PYTHONPATH": str(Path(autotax.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", code], cwd="/", env=here, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [variant_digest("flash-decode", "fused"), "[]"]


def _python(version: str) -> str | None:
    """The program of another version of Python, wherever its usual installers put it."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return next(map(str, installed), None) or shutil.which(f"python{version}")  # the PATH may hold only a placeholder for it


@pytest.mark.parametrize("version", ["3.13", *volume("3.11", "3.12", "3.14")])
def test_digests_are_equal_on_all_versions_of_python(version: str) -> None:
    """Digests need only the package's text, so a bare Python is enough."""
    if (python := _python(version)) is None:
        pytest.skip(f"there is no Python {version} here")
    code = (
        "import sys; from autotax.operators import operators; from autotax.operators.registry import variant_digest as digest\n"
        "print({(op, name): digest(op, name) for op in operators() for name in operators()[op].variants})"
    )
    here = {"PYTHONPATH": str(Path(autotax.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(Path.home())}
    ran = subprocess.run([python, "-S", "-c", code], cwd="/", env=here, capture_output=True, text=True, check=True)
    digests = ast.literal_eval(ran.stdout)
    assert digests.items() >= {pair: variant_digest(*pair) for pair in VARIANTS}.items()


DIGESTS = "import json; from autotax.operators.registry import operators, variant_digest as digest\n" + (
    "print(json.dumps({f'{op} {name}': digest(op, name) for op in operators() for name in operators()[op].variants}))"
)


def _digests_of_copy(root: Path) -> dict[str, str]:
    here = os.environ | {"PYTHONPATH": str(root)}
    ran = subprocess.run([sys.executable, "-P", "-c", DIGESTS], cwd=root, env=here, capture_output=True, text=True, check=True)
    digests: dict[str, str] = json.loads(ran.stdout)
    return digests


MERGED = {"autotax.kernels.flash_decode.exchange": "autotax.kernels.flash_decode.cores"}
MOVES = {
    "autotax.kernels.primitives": "autotax.kernels.device.instructions",
    "autotax.kernels.tiling": "autotax.kernels.device.order",
    "autotax.core.config": "autotax.core.point",
    "autotax.heap.world": "autotax.ranks",
}


def _moved(root: Path) -> None:
    """Appends modules of a copy of the package to others, moves some, and follows in all imports."""
    for old, new in MERGED.items():
        source, target = (root.joinpath(*name.split(".")).with_suffix(".py") for name in (old, new))
        target.write_text(target.read_text() + source.read_text().replace("from __future__ import annotations\n", ""))
        source.unlink()
        for path in (root / "autotax").rglob("*.py"):
            path.write_text(path.read_text().replace(f"from {old} import", f"from {new} import"))
    for old, new in MOVES.items():
        source, target = root.joinpath(*old.split(".")), root.joinpath(*new.split("."))
        source = source if source.is_dir() else source.with_suffix(".py")
        target.parent.mkdir(exist_ok=True)
        source.rename(target if source.is_dir() else target.with_suffix(".py"))
    (root / "autotax/kernels/device/__init__.py").touch()
    for path in (root / "autotax").rglob("*.py"):
        text = path.read_text()
        for old, new in MOVES.items():
            text = re.sub(rf"\b{re.escape(old)}\b", new, text)
            package, _, name = old.rpartition(".")
            new_package, _, new_name = new.rpartition(".")
            brought = rf"from {re.escape(package)} import {name}$"
            text = re.sub(brought, f"from {new_package} import {new_name} as {name}", text, flags=re.M)
        path.write_text(text)


def test_moved_and_renamed_modules_keep_digests_and_an_edit_of_one_token_changes_them(tmp_path: Path) -> None:
    package = Path(autotax.__file__).parent
    shutil.copytree(package, tmp_path / "autotax", ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    before = _digests_of_copy(tmp_path)
    _moved(tmp_path)
    assert _digests_of_copy(tmp_path) == before
    primitives = tmp_path / "autotax/kernels/device/instructions.py"
    primitives.write_text(primitives.read_text() + "\nassert True\n")
    now = _digests_of_copy(tmp_path)
    assert {name for name in before if now[name] == before[name]} == set()


def test_a_circle_of_modules_from_outside_has_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circle_of_two").mkdir()
    first, second = (tmp_path / "circle_of_two" / f"{name}.py" for name in ("first", "second"))
    (tmp_path / "circle_of_two/__init__.py").touch()
    first.write_text("from circle_of_two import second\ndef a():\n    return second.b\n")
    monkeypatch.syspath_prepend(tmp_path)
    digests = set()
    for number in (1, 2):
        second.write_text(f"from . import first\ndef b():\n    return first.a, {number}\n")
        for cached in (sources._source, sources._spelled_symbol, symbol_digest, sources._file_of):
            cached.cache_clear()
        digests |= {symbol_digest(Symbol("circle_of_two.first", "a")), symbol_digest(Symbol("circle_of_two.second", "b"))}
    assert len(digests) == 4
