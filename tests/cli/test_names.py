"""Options of an operator and of a command have names of their own: neither hides the other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, get_type_hints

import pytest

from autotax.cli.app import COMMANDS, Command, main, options_of
from autotax.cli.options import ProblemOptions
from autotax.operators import Operator, Problem, declaration, dtype, operators, ranks, registry


@dataclass(frozen=True)
class Clashing(Problem):
    mode: str = "slow"
    dtype: str = dtype()
    world_size: int = ranks()
    op: ClassVar[str] = "clashing"
    nbytes: ClassVar[int] = 1


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_option_of_a_command_is_a_field_of_an_operator_that_comes_with_it(command: Command) -> None:
    groups = [group for part, group in get_type_hints(command.run).items() if part != "return"]
    if ProblemOptions in groups:
        own = {name for group in groups if group is not ProblemOptions for name in options_of(group)}
        assert not own & {field.name for operator in operators().values() for field in fields(operator.problem)}


def test_a_field_that_an_option_would_hide_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    operators()
    mine = dict(declaration.declared)
    monkeypatch.setattr(declaration, "declared", mine)
    monkeypatch.setattr(registry, "declared", mine)
    Operator(Clashing)
    assert main(["lookup", "clashing"]) == 2
    message = "autotax: clashing has a field --mode, which is an option of autotax lookup: rename the field\n"
    assert capsys.readouterr().err == message
    assert main(["lookup", "all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--backend", "cpu"]) == 0
