"""Docstrings and help texts: sentences as short as those of the documents."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import typer

import autotax
from autotax.cli import app
from autotax.core.problem import about
from autotax.operators import operators
from tests.docs import prose

PACKAGE = Path(autotax.__file__).parent


def docstrings() -> Iterator[tuple[str, str]]:
    """All of the package, those of fields and constants too, each with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            body = getattr(node, "body", None)
            for child in body if isinstance(body, list) else []:
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                    yield f"{path.relative_to(PACKAGE.parent)}:{child.lineno}", inspect.cleandoc(child.value.value)


def helps() -> Iterator[tuple[str, str]]:
    """Yields the help text of each command, of each option and of the sizes of each operator."""

    def of(command: object, name: str) -> Iterator[tuple[str, str]]:
        yield name, str(getattr(command, "help", "") or "").replace("\f", "")
        for option in getattr(command, "params", []):
            yield f"{name} {option.name}", getattr(option, "help", "") or ""
        for word, subcommand in getattr(command, "commands", {}).items():
            yield from of(subcommand, f"{name} {word}")

    yield from of(typer.main.get_command(app.make([])), "autotax")
    for op in operators().values():
        yield from ((f"{op.name} {field.name}", str(about(field))) for field in fields(op.problem))


def long_ones(texts: Iterator[tuple[str, str]]) -> tuple[list[str], list[int]]:
    """Complaints, and the words of every sentence."""
    complaints, counts = [], []
    for place, text in texts:
        for block in prose.blocks(text):
            for passage in block.passages if block.kind in ("text", "item", "table") else []:
                counts += prose.sentences(passage)
                if (longest := max(prose.sentences(passage), default=0)) > prose.LONGEST:
                    complaints.append(f"{place}: a sentence of {longest} words; {prose.LONGEST} are allowed: make two of it")
    return complaints, counts


def test_sentences_of_docstrings_and_helps_are_short() -> None:
    for texts, least in ((docstrings(), 3000), (helps(), 100)):
        complaints, counts = long_ones(texts)
        assert not complaints, "\n".join(complaints)
        assert len(counts) > least and sum(counts) / len(counts) <= prose.AVERAGE


def test_a_long_sentence_is_told() -> None:
    complaints, _ = long_ones(iter([("here", f"Short. A{' word' * 41}.")]))
    assert complaints == ["here: a sentence of 42 words; 40 are allowed: make two of it"]
