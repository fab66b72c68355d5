"""Every module does what a torch user expects, or says why not: all cases on two ranks, for each subject one run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.runner.ranks import Ranks
from tests.nn import conformance
from tests.nn.conformance import GatherSubject, MergeSubject, NormSubject, Subject, cases_of
from tests.nn.test_modules import ATTENTION, EXCHANGE, linear, row_linear

SINGLE = Config.of("single", ATTENTION | EXCHANGE | {"heads": 1, "receivers": 2, "splits": 1})
WORDS = Config.of("words", rows=2, num_warps=4, parts=1, per_processor=1)
PUSH = Config.of("push", block_m=16, block_n=16, num_warps=4, num_stages=2, order="block_first", dies=1, comm=2, piece=16,
                 group=32, loads="tma")  # fmt: skip
ONE_SHOT = Config.of("one_shot", words="blank", split=2, num_warps=4, per_processor=1)
SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("linear, bulk-synchronous", "gather"),
        Subject("linear, pull", "gather", linear("pull")),
        Subject("linear reduce-scatter, push", "scatter", row_linear("push")),
        Subject("linear all-reduce, words", "reduce", row_linear("words")),
        Subject("attention, bulk-synchronous"),
        Subject("attention, single", config=SINGLE),
        Subject("attention, pages and own heads", page=16, output="head_scatter"),
        MergeSubject("merge, bulk-synchronous", base="2"),
        MergeSubject("merge, words and own heads", config=WORDS, output="head_scatter"),
        NormSubject("norm, bulk-synchronous"),
        NormSubject("norm, one_shot", config=ONE_SHOT),
        GatherSubject("gathered attention, bulk-synchronous"),
        GatherSubject("gathered attention, push", config=PUSH),
    )
}
WANTED = 60
_outcomes: dict[str, list[dict[str, str]]] = {}


def outcome(ranks: dict[int, Ranks], name: str) -> list[dict[str, str]]:
    if name not in _outcomes:
        _outcomes[name] = ranks[2].run(conformance.run_all, SUBJECTS[name], timeout=200)
    return _outcomes[name]


ALL = [(name, case) for name, subject in SUBJECTS.items() for case in cases_of(subject)]
QUICK = "linear reduce-scatter, push"
"""The subject of the quick run; other subjects repeat its cases."""


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(*pair, marks=[] if pair[0] == QUICK else pytest.mark.volume) for pair in ALL],
    ids=lambda value: value.replace(" ", "-"),
)
def test_a_module_is_like_any_other(ranks: dict[int, Ranks], name: str, case: str) -> None:
    failures = [rank[case] for rank in outcome(ranks, name)]
    assert failures == ["", ""], "\n".join(failures)


def test_the_documentation_names_each_case() -> None:
    assert len(ALL) >= WANTED
    text = (Path(__file__).parents[2] / "docs/runtime.md").read_text()
    listed = text.split("### Like any torch module")[1].split("\n#")[0]
    named = re.findall(r"^- `(\w+)`\. ", listed, re.MULTILINE)
    assert sorted(named) == sorted({case for _, case in ALL})
