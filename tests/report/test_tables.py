"""Tables in the terminal: figures, marks and labels are right for any text in a cell."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.db.records import RunRecord, TrialRecord
from autotax.hardware import Hardware
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.report import tables
from autotax.report.formatting import CPU_NOTE, duration, microseconds
from autotax.runner.measurement import Candidate, Measurement
from autotax.software import Environment
from autotax.tuner import Comparison, Row, Standing, Verdict
from autotax.tuner.progress import Refreshed

PROBLEM = AllGatherGemm(512, 7168, 8192, world_size=4)
GPUS = Hardware("cuda", "NVIDIA H200", "cuda:90", 4, 139, 132, 232448, 1, "peer access 12/12 pairs")
CPUS = replace(GPUS, backend="cpu", target="interpreter")
SOFTWARE = Environment("3.11", "2.9", "3.6", "nccl", "0")


def seen(table: RenderableType, width: int = 120) -> str:
    console = Console(width=width, file=None, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def a_measurement(us: float, variant: str = "push", **params: int | str) -> Measurement:
    return Measurement(Candidate(Config.of(variant, params)), "ok", samples=((us,),))


def a_verdict(hardware: Hardware = GPUS) -> Verdict:
    bsp, push, pull = a_measurement(154.9, "bsp"), a_measurement(118.2, "push", comm=16), a_measurement(153.0, "pull")
    standings = (
        Standing(push, 1.31, (1.28, 1.33)),
        Standing(pull, 1.01, (0.99, 1.03)),
        Standing(bsp, 1.0, (1.0, 1.0)),
    )
    conditions = Conditions.usual(hardware.on_gpu)
    trials = {"ok": 58, "hang": 2}
    return Verdict(
        PROBLEM, hardware, SOFTWARE, standings[0], bsp, False, standings, trials, 754.0, conditions=conditions
    )


def line_of(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if f" {word} " in line)


def test_finalists_against_bsp() -> None:
    text = seen(tables.finalists(a_verdict()))
    winner, tie, bsp = (line_of(text, variant) for variant in ("push", "pull", "bsp"))
    assert "118.2" in winner and "1.31x [1.28, 1.33]" in winner and "winner" in winner and "comm=16" in winner
    assert "tie" in tie and "winner" not in tie
    assert "154.9" in bsp and "1.00x" in bsp and "BSP" in bsp
    assert "push wins: 1.31x faster than BSP (95 % CI 1.28 to 1.33); 60 trials (58 ok, 2 hang) in 12:34" in " ".join(text.split())
    assert "4 x NVIDIA H200" in text and CPU_NOTE not in text


def test_a_narrow_terminal_keeps_the_figures_whole() -> None:
    text = seen(tables.finalists(a_verdict()), width=66)
    assert "118.2" in text and "1.31x [1.28, 1.33]" in text and max(map(len, text.splitlines())) <= 66
    assert line_of(text, "push").split()[-1] == "winner" and line_of(text, "bsp").split()[-1] == "BSP"
    assert "comm=16" in text and "comm=16" not in line_of(text, "push"), "parameters below the table"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 240])
def test_no_screen_breaks_a_name_or_cuts_a_figure(width: int) -> None:
    conditions = Conditions(mode="in-place")

    def measured(variant: str, us: float) -> Measurement:
        config = Config.of(variant, {"block_k": 64, "block_m": 128, "num_stages": 4, "order": "interleaved"})
        return Measurement(Candidate(config, conditions), "ok", samples=(tuple(us + at % 3 for at in range(20)),) * 2)

    bad = Measurement(Candidate(Config.of("nccl_ll128")), "crash", "no multicast on this machine")
    rows = (
        Row("autotax", "push_two_kernel", measured("push_two_kernel", 118.2), 1.31, "best of 9 trials"),
        Row("bsp-graph", "bsp", measured("bsp", 154.9), 1.0),
        Row("nccl-ll128", "nccl_ll128", bad, None),
    )
    compared = seen(tables.comparison(Comparison(PROBLEM, GPUS, conditions, rows)), width)
    standings = tuple(Standing(row.measurement, row.speedup or 1.0, (1.28, 1.33)) for row in rows[:2])
    verdict = replace(a_verdict(), standings=standings, winner=standings[0], baseline=standings[1].measurement)
    finals = seen(tables.finalists(verdict), width)
    for text, words in (
        (compared, "autotax push_two_kernel 119.2 1.31x best trials bsp-graph nccl-ll128 nccl_ll128 multicast machine order="),
        (finals, "push_two_kernel 119.2 1.31x winner BSP order="),
    ):
        assert all(word in text for word in words.split()) and "…" not in text, text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_a_tie_and_nothing_at_all() -> None:
    verdict = a_verdict()
    tied = replace(verdict, winner=verdict.standings[2], tie=True)
    assert "Differences are within noise; BSP is kept" in seen(tables.finalists(tied))
    assert "Nothing beats BSP (154.9 us) yet" in seen(tables.finalists(replace(tied, tie=False)))
    nothing = replace(verdict, winner=None, baseline=None, standings=())
    assert "nothing could be verified" in seen(tables.finalists(nothing))
    assert "interrupted" in seen(tables.finalists(replace(nothing, interrupted=True)))


def test_cpu_ranks_are_labelled_everywhere() -> None:
    rows = (Row("autotax", "push", a_measurement(80.0), 1.25),)
    assert CPU_NOTE in seen(tables.finalists(a_verdict(CPUS)))
    assert CPU_NOTE in seen(tables.comparison(Comparison(PROBLEM, CPUS, ON_CPU, rows)))
    assert CPU_NOTE not in seen(tables.comparison(Comparison(PROBLEM, GPUS, Conditions(), rows)))


def test_what_is_behind_a_verdict_is_below_it() -> None:
    accounts = {
        "device_s": 7.8, "compile_s": 1.6, "ranks_s": 4.0, "tuner_s": 6.6, "seconds": 20.0, "idle_share": 0.61,
        "trials": 60, "search_s": 16.0, "trials_per_minute": 225.0,
    }  # fmt: skip
    plain = seen(tables.finalists(a_verdict()))
    assert "not soaked" in plain and "tuned for" not in plain and "waited" not in plain
    full = replace(
        a_verdict(), soak=2000, conditions=Conditions("eager", "cold", 20.0), notices=("rank 1 is slow",), accounts=accounts
    )
    text = " ".join(seen(tables.finalists(full)).split())
    assert "finalists passed a soak of 2000 replays" in text and "notice: rank 1 is slow" in text
    assert "tuned for eager calls, cold L2, ranks up to 20 us apart" in text
    assert "Search 16 s, finals 4 s; GPUs waited for the host 61 % of the time." in text


def test_a_comparison_shows_what_failed_and_what_is_no_rival() -> None:
    bad = Measurement(Candidate(Config.of("torch")), "crash", "no [red]multicast[/red]\nhere")
    rows = (
        Row("autotax", "push", a_measurement(80.0), 1.25, "best of 9 trials"),
        Row("bsp-graph", "bsp", a_measurement(100.0, "bsp"), 1.0),
        Row("torch-graph", "torch", bad, None),
        Row("cublas", "product", a_measurement(60.0, "product"), 1.67),
    )
    text = seen(tables.comparison(Comparison(PROBLEM, GPUS, Conditions(), rows)), width=150)
    assert "crash: no [red]multicast[/red] here" in text
    assert "1.25x" in line_of(text, "push") and "best of 9 trials" in line_of(text, "push")
    line = " ".join(text.split())
    assert "bound 60.00 us: the larger of the product alone (60.00 us) and the links at full rate (16.78 us)" in line
    assert "autotax takes 1.33x the bound, 20.00 us more" in line
    assert "best alternative: bsp-graph, 100.0 us; autotax is 1.25x faster than bsp-graph" in line


def test_trials_without_any() -> None:
    assert "no trials" in seen(tables.trials(None, []))
    assert PROBLEM.op in seen(tables.trials(PROBLEM, []))


def test_trials_of_no_known_run() -> None:
    text = seen(tables.trials(None, [TrialRecord(3, Config.of("pull"), "compile_error", error="ptxas [died]")]))
    assert "compile_error: ptxas [died]" in text and "1 trial: 1 compile_error" in text


def test_figures() -> None:
    assert [microseconds(us) for us in (None, 5.123, 512.34, 12345.6)] == ["-", "5.12", "512.3", "12,346"]
    assert [duration(seconds) for seconds in (0.4, 9, 754, 3723)] == ["0:00", "0:09", "12:34", "1:02:03"]


def test_rates_stand_beside_microseconds_and_no_share_exceeds_the_bound() -> None:
    rows = (
        Row("autotax", "push", a_measurement(80.0), 1.25),
        Row("bsp-graph", "bsp", a_measurement(100.0, "bsp"), 1.0),
        Row("cublas", "product", a_measurement(60.0, "product"), 1.67),
    )
    text = seen(tables.comparison(Comparison(PROBLEM, GPUS, Conditions(), rows)))
    assert f"{PROBLEM.flops / 80.0 / 1e6:.0f} TFLOP/s, 75 % of bound" in seen(
        tables.comparison(Comparison(PROBLEM, GPUS, Conditions(), rows)), width=66
    ), "below a table that has no room"
    assert "TFLOP/s" in text and f" {PROBLEM.flops / 80.0 / 1e6:.0f} " in line_of(text, "push")
    assert " 75 % " in line_of(text, "push")
    decode = FlashDecode(8, 64, 8, 128, 32768, "bf16", 4)
    text = seen(tables.comparison(Comparison(decode, GPUS, Conditions(), rows)))
    assert "GB/s" in text and f" {decode.nbytes / 80.0 / 1e3:.0f} " in line_of(text, "push")
    assert "TFLOP/s" in seen(tables.finalists(a_verdict())) and "TFLOP/s" not in seen(tables.finalists(a_verdict(CPUS)))


def test_samples_of_cpu_ranks_that_scatter_give_no_ratios() -> None:
    wild = replace(a_measurement(80.0), samples=(tuple(80.0 * 50 ** (i % 2) for i in range(20)),) * 2)
    bsp = replace(a_measurement(100.0, "bsp"), samples=((100.0,) * 20,) * 2)
    rows = (Row("autotax", "push", wild, 1.25), Row("bsp-eager", "bsp", bsp, 1.0))
    noisy = seen(tables.comparison(Comparison(PROBLEM, CPUS, ON_CPU, rows)))
    assert "samples of one config scatter 50-fold" in noisy and "1.25x" not in noisy and "best alternative" not in noisy
    assert "1.25x" in seen(tables.comparison(Comparison(PROBLEM, GPUS, Conditions(), rows))), "GPUs are not noisy like that"
    verdict = a_verdict(CPUS)
    standings = (replace(verdict.standings[0], measurement=wild), *verdict.standings[1:])
    table = seen(tables.finalists(replace(verdict, standings=standings, winner=standings[0])))
    assert "push wins; 60 trials" in table and "1.31x" not in table


def test_a_refresh_says_that_bsp_is_kept_and_shows_no_ratio_of_scattered_samples() -> None:
    wild = replace(a_measurement(80.0), samples=(tuple(80.0 * 50 ** (i % 2) for i in range(20)),))
    verdict, standing = a_verdict(CPUS), Standing(wild, 1.31, (1.28, 1.33))
    noisy = replace(verdict, winner=standing, standings=(standing,))
    former = SimpleNamespace(problem=PROBLEM, conditions=ON_CPU, config=Config.of("push"), speedup=1.25)
    stale: Any = SimpleNamespace(winners=[former], configs=[Config.of("bsp")])
    table = seen(tables.refreshed([Refreshed(stale, noisy)], CPUS))
    assert "1.25x" in table and "1.31x" not in table and "scatter 50-fold" in table
    kept = Refreshed(stale, replace(verdict, winner=verdict.standings[2]))
    assert tables.refreshed_outcome(kept) == "BSP wins: no former winner is faster here"


def test_scattered_problems_are_in_no_mean() -> None:
    wild = replace(a_measurement(80.0), samples=(tuple(80.0 * 50 ** (i % 2) for i in range(20)),))
    verdict, standing = a_verdict(CPUS), Standing(wild, 1.31, (1.28, 1.33))
    noisy = replace(verdict, problem=replace(PROBLEM, m=64), winner=standing, standings=(standing,))
    text = seen(tables.summary([verdict, noisy]))
    assert "1.31x" in line_of(text, "512") and "1.31x" not in line_of(text, "64") and "scatter 50-fold" in text
    assert "geometric mean" not in text, "there is none of CPU ranks"
    assert "geometric mean: 1.31x faster than BSP" in seen(tables.summary([a_verdict(), replace(a_verdict(), winner=None)]))
    rows = (Row("autotax", "push", wild, 9.0), Row("bsp-eager", "bsp", a_measurement(100.0, "bsp"), 1.0))
    mean = seen(tables.means([Comparison(PROBLEM, CPUS, ON_CPU, rows)]))
    assert "9.00x" not in mean and "no ratios are shown" in mean


def test_a_table_is_as_wide_as_its_cells() -> None:
    shown = seen(tables.means([Comparison(PROBLEM, CPUS, ON_CPU, ())]))
    head = next(line.rstrip() for line in shown.splitlines() if "operator" in line)
    assert len(head) < len(CPU_NOTE), "the note below is wider, and no column is padded for it"


def test_figures_of_search_and_finals_have_tables_of_their_own() -> None:
    records = [
        TrialRecord(number, Config.of("push", comm=number), "ok", 80.0 + number, verified=True, conditions=stage)
        for number, stage in ((0, {}), (1, {"stage": "finalists"}), (2, {}))
    ]
    run = RunRecord(1, PROBLEM, GPUS, SOFTWARE, {}, "done", datetime.now(UTC))
    text = seen(tables.trials(PROBLEM, [replace(record, run=run) for record in records]))
    finals, search = text.index(": finals, measured in turn"), text.index(": search, one after the other")
    assert [line.strip() for line in text[:search].splitlines()[-2:-1]] == [""], "a blank line between tables"
    assert finals < text.index("comm=1") < search < text.index("comm=0") < text.index("comm=2")
