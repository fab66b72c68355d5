"""Training of the linear layers: on all ranks the gradients equal plain torch's, for tuned and bulk-synchronous calls."""

from __future__ import annotations

import pytest
import torch

from autotax.core.config import Config
from autotax.operators.verification import TOLERANCE
from autotax.runner.ranks import Ranks
from tests.nn import training
from tests.nn.checks import K
from tests.nn.test_modules import PACKETS, linear, row_linear
from tests.nn.training import Trained
from tests.volume import volume

BF16 = torch.bfloat16
ENGINE = Config.of("decomposed", products="two", comm=0, warm=0)
KERNEL = Config.of("decomposed", products="one", comm=1, warm=0)
SENT = Config.of("decomposed", products="each", sender="kernel", comm=1)
BF16_PUSH = row_linear("push", payload="bf16")
CASES = [
    (Trained("gather"), "bsp, bsp"),
    (Trained("gather", "kn", config=ENGINE, backward=row_linear("push"), keep=False), "decomposed, push"),
    (Trained("gather", dtype=BF16, config=linear("push", chunk_rows=16), backward=SENT), "push, decomposed"),
    (Trained("gather", config=linear("pull")), "pull, bsp"),
    (Trained("scatter", residual=True), "bsp, bsp"),
    (Trained("scatter", "kn", config=row_linear("push"), backward=KERNEL, residual=True), "push, decomposed"),
    (Trained("scatter", dtype=BF16, config=BF16_PUSH, backward=KERNEL, bias=False), "push, decomposed"),
    (Trained("reduce", "kn", dtype=BF16, residual=True), "bsp, bsp"),
    (Trained("scatter", config=SENT, residual=True), "decomposed, bsp"),
    (Trained("reduce", config=row_linear("words"), residual=True), "words, words"),
]


@pytest.mark.sampled(by=lambda case, ran: {"kind": case.kind, "forward": ran.partition(",")[0]})
@pytest.mark.parametrize(("case", "ran"), CASES, ids=lambda value: value if isinstance(value, str) else value.kind)
def test_gradients_are_those_of_plain_torch(ranks: dict[int, Ranks], case: Trained, ran: str) -> None:
    name = "bf16" if case.dtype is BF16 else "fp32"
    for error, took in ranks[2].run(training.gradient_errors, case, timeout=120):
        assert took == ran
        assert error <= TOLERANCE[name]


@pytest.mark.parametrize(
    "case", [Trained("reduce", "kn"), *volume(Trained("gather"), Trained("scatter"))], ids=lambda case: case.kind
)
def test_gradients_are_the_numerical_ones(ranks: dict[int, Ranks], case: Trained) -> None:
    assert ranks[2].run(training.numerically, case, timeout=120) == [True, True]


@pytest.mark.parametrize("kind", training.LAYERS)
def test_a_backward_computes_what_is_asked_for_and_refuses_the_rest(ranks: dict[int, Ranks], kind: str) -> None:
    for report in ranks[2].run(training.what_is_asked_for, kind, timeout=120):
        assert "create_graph=True" in report.pop("second")
        assert report.pop("nothing") is False
        assert report.pop("autocast") == (torch.float32, BF16, torch.float32)
        assert report.pop("empty") == (0, K)
        assert set(report.values()) == {True}, report


@pytest.mark.volume
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_compiled_training_is_the_eager_one(ranks: dict[int, Ranks], kind: str) -> None:
    for early, difference in ranks[2].run(training.compiled, kind, kind != "gather", timeout=120):
        assert "call prepare_backward() on all ranks before" in early
        assert difference <= 1e-3


@pytest.mark.parametrize(
    ("config", "layout"),
    [(linear("push", chunk_rows=16), "nk"), (ENGINE, "kn"), *volume((None, "nk"), (linear("pull"), "nk"), (PACKETS, "nk"))],
    ids=str,
)
def test_several_weights_share_one_gather_and_its_result(ranks: dict[int, Ranks], config: Config | None, layout: str) -> None:
    for error, of_gradients, shared in ranks[2].run(training.several, config, layout, timeout=120):
        assert max(error, of_gradients) <= TOLERANCE["fp32"]
        assert shared


@pytest.mark.sampled(by=lambda kind, **_: {"kind": kind})
@pytest.mark.parametrize(
    ("kind", "config"), [("scatter", row_linear("push")), ("reduce", row_linear("words")), ("reduce", None)], ids=str
)
def test_a_residual_is_added_however_it_is_laid_out(ranks: dict[int, Ranks], kind: str, config: Config | None) -> None:
    for report in ranks[2].run(training.what_a_residual_may_be, kind, config, timeout=120):
        assert report.pop("ran") == (config.variant if config else "bsp", None)
        assert "it must be torch.float32 [" in report.pop("shape")
        assert "residual is torch.float64" in report.pop("type")
        assert "out shares memory with residual" in report.pop("out itself")
        assert set(report.values()) == {True}, report
