"""Commands with good input: their requests to the tuner, their output, the records they store and their exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.core.errors import MachineError
from autotax.db import Store, TrialRecord
from autotax.hardware import detect
from autotax.operators import operators, with_world_size
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.report.formatting import CPU_NOTE
from autotax.runner.local_runner import GroupLost
from autotax.software import environment
from autotax.tuner.comparison import Choice
from autotax.tuner.progress import FailedVariant
from tests.cli.conftest import BSP, GPUS, HANG, PUSH, Ranks, Run, Tuner, keep_run, keep_winner, on_machine

ROOT = Path(__file__).parents[2]
GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--dtype", "fp32"]
PROBLEM = AllGatherGemm(64, 96, 64, "fp32", world_size=2)
DECODE = FlashDecode(2, 8, 2, 32, 128, "fp32", world_size=2)
TUNE_KEYS = {
    "problem", "hardware", "conditions", "winner", "trials", "seconds", "soak", "notices", "accounts", "db", "interrupted",
}  # fmt: skip


# tune


def test_tune_asks_for_what_was_given(run: Run, tuner: Tuner, db: Path) -> None:
    arguments = [
        "--trials",
        7,
        "--timeout",
        "10m",
        "--sampler",
        "random",
        "--seed",
        3,
        "--fresh",
        "--variants",
        "pull, push",
    ]
    assert run("tune", *GEMM, "--shard", "k", "--world-size", 4, *arguments).code == 0
    [(problem, settings)] = tuner.asked
    assert problem == AllGatherGemm(64, 96, 64, "fp32", "k", 4)
    assert (settings.trials, settings.timeout_s, settings.sampler, settings.seed) == (7, 600.0, "random", 3)
    assert (settings.resume, settings.variants) == (False, ("pull", "push"))
    assert db.exists() and not tuner.compared


def test_tune_has_sensible_defaults(run: Run, tuner: Tuner) -> None:
    run("tune", "flash-decode", "--batch", 2, "--q-heads", 8, "--kv-heads", 2, "--head-dim", 32, "--kv-len", 128)
    [(problem, settings)] = tuner.asked
    assert problem == FlashDecode(2, 8, 2, 32, 128, "bf16", world_size=2)
    assert (settings.trials, settings.timeout_s, settings.resume, settings.variants) == (60, None, True, None)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("10m", 600), ("2h", 7200)])
def test_timeouts(run: Run, tuner: Tuner, text: str, seconds: float) -> None:
    assert run("tune", *GEMM, "--timeout", text).code == 0
    assert tuner.asked[0][1].timeout_s == seconds


def test_the_first_of_several_problems_does_not_pay_for_the_start_of_the_ranks(
    run: Run, ranks: Ranks, tuner: Tuner, tmp_path: Path
) -> None:
    ranks.start_s = 0.5
    shapes = tmp_path / "two.toml"
    shapes.write_text("all-gather-gemm = [{m = 64, n = 96, k = 64}, {m = 128, n = 96, k = 64}]")
    assert run("tune", "--shapes", shapes, "--timeout", "20s").code == 0
    assert len(tuner.spent_s) == 2 and max(tuner.spent_s) < 0.5, "the limit is one of each problem"
    ranks.started.clear()
    assert run("tune", *GEMM, "--timeout", "20s").code == 0 and tuner.spent_s[-1] >= 0.5, "the limit is one of the command"


@pytest.mark.usefixtures("tuner")
def test_tune_ends_with_the_finalists_against_bsp(run: Run) -> None:
    result = run("tune", *GEMM)
    assert "push wins: 1.25x faster than BSP (95 % CI 1.20 to 1.30)" in result.out and "[1.20, 1.30]" in result.out
    assert CPU_NOTE in result.out
    assert "searching: 1/60" in result.err and CPU_NOTE in result.err


@pytest.mark.usefixtures("tuner")
def test_tune_prints_one_document(run: Run, db: Path) -> None:
    result = run("tune", *GEMM, "--json")
    document = result.document
    assert document.keys() == TUNE_KEYS
    assert document["problem"] == PROBLEM.to_dict()
    assert document["hardware"]["backend"] == "cpu"
    assert document["winner"] == {
        "variant": "push",
        "config": {"block_m": 64, "comm": 16},
        "latency_us": 80.0,
        "interval_us": [80.0, 80.0],
        "back_to_back_us": document["winner"]["back_to_back_us"],
        "baseline_us": 100.0,
        "speedup": 1.25,
        "interval": [1.2, 1.3],
        "verified": True,
        "tie": False,
    }
    assert document["trials"] == {"ok": 2, "hang": 1} and document["interrupted"] is False
    assert document["db"] == f"sqlite:///{db}"
    assert result.code == 0


def test_a_tie_is_called_one(run: Run, tuner: Tuner) -> None:
    tuner.how = "ties"
    assert "Differences are within noise; BSP is kept" in run("tune", *GEMM).out
    winner = run("tune", *GEMM, "--json").document["winner"]
    assert winner["tie"] and winner["variant"] == "bsp" and winner["speedup"] == 1.0


def test_nothing_verified_is_a_failure(run: Run, tuner: Tuner) -> None:
    tuner.how = "nothing"
    result = run("tune", *GEMM)
    assert result.code == 1 and "nothing could be verified" in result.err and "autotax trials" in result.err
    assert run("tune", *GEMM, "--json").document["winner"] is None


def test_an_interruption_says_how_to_go_on(run: Run, tuner: Tuner, db: Path) -> None:
    tuner.how = "interrupted"
    result = run("tune", *GEMM)
    assert (result.code, result.out) == (130, "")
    assert "interrupted" in result.err and str(db) in result.err and "same command again" in result.err
    assert "--resume" in run("tune", *GEMM, "--fresh").err
    assert run("tune", *GEMM, "--json").document["interrupted"] is True


def test_the_usual_pair_of_a_machine_without_gpus(run: Run, tuner: Tuner, ranks: Ranks) -> None:
    result = run("tune")
    examples = [with_world_size(operator.examples[False], 2) for operator in operators().values()]
    assert {PROBLEM, DECODE} <= set(examples)
    assert [problem for problem, _ in tuner.asked] == examples
    assert {settings.trials for _, settings in tuner.asked} == {10}
    assert [compared[0] for compared in tuner.compared] == examples
    assert [compared[1:] for compared in tuner.compared] == [(PUSH, BSP)] * len(examples)
    assert result.out.count("compared") == len(examples) and result.out.count(CPU_NOTE) == 2 * len(examples) + 1
    assert result.code == 0 and ranks.started == [2] and ranks.closed == 1


def test_the_usual_pair_of_gpus(run: Run, tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, GPUS)
    result = run("tune", "--json")
    examples = [with_world_size(operator.examples[True], 4) for operator in operators().values()]
    assert [problem for problem, _ in tuner.asked] == examples and AllGatherGemm(512, 7168, 8192, world_size=4) in examples
    assert {settings.trials for _, settings in tuner.asked} == {60}
    assert [document["problem"]["op"] for document in result.results] == list(operators())
    assert CPU_NOTE not in result.err


def test_the_usual_pair_with_other_settings(run: Run, tuner: Tuner) -> None:
    run("tune", "--trials", 3, "--world-size", 3)
    asked = [(problem.to_dict()["world_size"], settings.trials) for problem, settings in tuner.asked]
    assert asked == [(3, 3)] * len(operators())


def test_a_file_of_shapes_shares_ranks(run: Run, tuner: Tuner, ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(
        "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\ndtype = 'fp32'\n"
        "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\nworld_size = 4\nshard = 'k'\n"
        "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\ndtype = 'fp32'\n"
        "[[flash-decode]]\nbatch = 2\nq_heads = 8\nkv_heads = 2\nhead_dim = 32\nkv_len = 128\ndtype = 'fp32'\n"
    )
    documents = run("tune", "--shapes", file, "--json").results
    wide = AllGatherGemm(64, 96, 64, shard="k", world_size=4)
    assert [problem for problem, _ in tuner.asked] == [PROBLEM, DECODE, wide]
    assert [document["problem"] for document in documents] == [p.to_dict() for p in (PROBLEM, wide, DECODE)]
    assert ranks.started == [2, 4] and ranks.closed == 2
    assert ranks.ahead == [PROBLEM, wide], "kernels of the first problem compile while ranks start"
    assert not tuner.compared


def test_problems_of_a_file_have_those_of_the_variants_that_are_theirs(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(
        "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\ndtype = 'fp32'\n"
        "[[flash-decode]]\nbatch = 2\nq_heads = 8\nkv_heads = 2\nhead_dim = 32\nkv_len = 128\ndtype = 'fp32'\n"
    )
    assert run("tune", "--shapes", file, "--variants", "bsp,push,fused").code == 0
    assert [settings.variants for _, settings in tuner.asked] == [("bsp", "push"), ("bsp", "fused")]
    tuner.asked.clear()
    of_file = ("tune", "--shapes", file, "--variants")
    assert "variant is 'pusch'; allowed are bsp" in run(*of_file, "push,pusch,fused").complaint
    assert f"variant is push; {DECODE} has bsp" in run(*of_file, "bsp,push").complaint
    assert tuner.asked == []


def test_an_interruption_ends_a_file_of_shapes(run: Run, tuner: Tuner, ranks: Ranks) -> None:
    tuner.how = "interrupted"
    result = run("tune", "--json")
    assert result.code == 130 and len(result.results) == 1 and len(tuner.asked) == 1 and ranks.closed == 1


@pytest.mark.usefixtures("tuner")
def test_ranks_that_do_not_start(run: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise GroupLost("crash", "rank 1 was killed by SIGKILL\nat 'starting'")

    monkeypatch.setattr(Ranks, "start", lost)
    result = run("tune", *GEMM)
    assert result.code == 1 and "SIGKILL" in result.err and "autotax doctor" in result.err
    assert ranks.closed == 1 and result.err.count("\n") == 3, "that it is slow, what is tuned, and why it is not"


@pytest.mark.usefixtures("tuner")
def test_ctrl_c_while_the_ranks_start(run: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ranks, "start", interrupt)
    result = run("tune", *GEMM)
    assert result.code == 130 and "interrupted" in result.err and ranks.closed == 1


def test_conditions_and_soak_are_passed_on(run: Run, tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, GPUS)
    run("tune", *GEMM, "--mode", "eager", "--l2", "warm", "--skew", "12.5", "--soak", 500)
    run("tune", *GEMM)
    run("compare", *GEMM, "--l2", "warm")
    settings = [settings for _, settings in tuner.asked]
    assert [s.conditions for s in settings] == [Conditions("eager", "warm", 12.5), Conditions("in-place")]
    assert [s.soak for s in settings] == [500, None] and tuner.conditions == [Conditions("in-place", "warm")]


@pytest.mark.usefixtures("tuner")
def test_tune_says_its_conditions_and_notices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, GPUS)
    result = run("tune", *GEMM, "--skew", 20)
    assert "tuned for graph calls, cold L2, ranks up to 20 us apart" in result.out
    assert "notice: rank 1 is slow" in result.out and "notice: rank 1 is slow\n" in result.err
    document = run("tune", *GEMM, "--skew", 20, "--json").document
    assert document["conditions"] == {"mode": "graph", "l2": "cold", "skew_us": 20.0}
    assert document["notices"] == ["rank 1 is slow"]


@pytest.mark.parametrize("trouble", ["database x.db is full: free space", "no space left on the disk of the ranks"])
@pytest.mark.usefixtures("tuner")
def test_a_machine_that_lets_the_run_down(run: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    def down(*_: object, **__: object) -> None:
        raise MachineError(trouble)

    monkeypatch.setattr("autotax.tuner.tune", down)
    result = run("tune", *GEMM)
    assert (result.code, result.out) == (1, "") and ranks.closed == 1
    assert result.err.splitlines()[2:] == [f"autotax: {trouble}"], "after the lines that say what is tuned, and that it is slow"


# compare


def test_compare_takes_the_tuned_config_and_its_baseline(run: Run, tuner: Tuner, db: Path) -> None:
    hardware = detect("cpu")
    push = _a_config(PROBLEM, "push")
    keep_winner(db, PROBLEM, hardware, push, BSP)
    result = run("compare", *GEMM, "--json")
    assert tuner.compared == [(PROBLEM, push, BSP)]
    document = result.document
    assert document.keys() >= {"problem", "hardware", "rows"} and document["match"] == "exact"
    keys = {"name", "variant", "config", "latency_us", "speedup_vs_bsp", "verified", "status", "error"}
    assert all(row.keys() > keys for row in document["rows"])
    first = document["rows"][0]
    assert (first["source"], first["rounds_us"]) == ("look-up: exact", [80.0, 80.0])
    assert first["samples_us"] == [[80.0, 80.0], [79.0, 79.0]] and "[80.0, 80.0]" in result.out
    assert (document["best_peer"], document["speedup_vs_best_peer"]) == ("bsp-eager", 1.25)
    assert [row["name"] for row in document["rows"]] == ["autotax", "bsp-eager", "torch-eager"]
    assert document["rows"][0]["speedup_vs_bsp"] == 1.25
    assert document["rows"][2]["status"] == "hang" and document["rows"][2]["latency_us"] is None
    assert result.code == 0 and result.err == ""


def test_compare_without_a_tuned_config_says_so(run: Run, tuner: Tuner, db: Path) -> None:
    result = run("compare", *GEMM)
    assert "nothing is tuned" in result.err and "autotax tune" in result.err
    assert tuner.compared == [(PROBLEM, BSP, BSP)]
    assert CPU_NOTE in result.out and "hang: no answer" in result.out
    assert result.code == 0 and not db.exists()


def test_compare_fails_if_nothing_is_verified(run: Run, tuner: Tuner) -> None:
    tuner.how = "nothing"
    assert run("compare", *GEMM).code == 1


SHAPES = """
[[flash-decode]]
batch = 2
q_heads = 8
kv_heads = 2
head_dim = 32
kv_len = 128
dtype = 'fp32'
[[all-gather-gemm]]
m = 64
n = 96
k = 64
dtype = 'fp32'
"""


def test_a_file_of_shapes_is_compared_whatever_fails(run: Run, tuner: Tuner, ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(SHAPES)
    whole = run("compare", "--shapes", file)
    assert whole.code == 0 and "geometric means" in whole.out and "1.25x" in whole.out
    late = run("compare", "--shapes", file, "--timeout", "0.0000001s")
    assert late.code == 1 and "is over; 0 of 2 problems were compared" in late.err and "median" not in late.out
    tuner.broken = [DECODE]
    result = run("compare", "--shapes", file, "--json")
    assert [document["problem"] for document in result.results] == [DECODE.to_dict(), PROBLEM.to_dict()]
    assert [document["error"] for document in result.results] == ["the ranks do not start again", None]
    assert [len(document["rows"]) for document in result.results] == [0, 3]
    assert result.code == 1 and ranks.started == [2] and ranks.closed == 3, "one pool of ranks for each command"


def test_every_variant_comes_with_its_best_trial(run: Run, tuner: Tuner, db: Path) -> None:
    fast, slow = _a_config(PROBLEM, "push", block_m=16), _a_config(PROBLEM, "push", block_m=32)
    pull = _a_config(PROBLEM, "pull")
    software, conditions = environment("cpu"), ON_CPU.to_dict()
    with Store.open(db) as store:
        run_id = store.begin_run(PROBLEM, detect("cpu"), software, {})
        for us, config, status in ((99.0, fast, "ok"), (90.0, slow, "ok"), (80.0, fast, "ok"), (50.0, pull, "hang")):
            store.add_trial(run_id, TrialRecord(0, config, status, us, [[us]], verified=status == "ok", conditions=conditions))
        stale = store.begin_run(PROBLEM, detect("cpu"), software, {})
        of_old = {"kernel_digest": "of another day", "conditions": conditions}
        store.add_trial(stale, TrialRecord(0, slow, "ok", 1.0, [[1.0]], verified=True, **of_old))
    run("compare", *GEMM)
    assert tuner.choices == {}
    run("compare", *GEMM, "--variants")
    assert set(tuner.choices) >= {"bsp", "pull", "push"}
    assert tuner.choices["push"] == Choice(fast, "best of 3 trials")
    assert tuner.choices["pull"].source == "default: none of 1 trials is verified"
    assert tuner.choices["bsp"].source == "default"


# taxes


def test_taxes_tell_what_bsp_takes_and_what_is_won_back(run: Run, tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("taxes", *GEMM)
    assert f"{PROBLEM.op} m=64" in result.out and "communication and computation" in result.out and CPU_NOTE in result.out
    assert "BSP takes 100.0 us, autotax 80.00 us" in result.out and "won back" not in result.out
    assert result.code == 0 and not tuner.choices, "no rows that say nothing"
    on_machine(monkeypatch, GPUS)
    run("taxes", *GEMM, "--mode", "eager")
    assert tuner.conditions[-1] == Conditions("eager", "cold")


def test_taxes_of_decoding_are_told_by_its_variants(run: Run, tuner: Tuner) -> None:
    run("taxes", "flash-decode", "--batch", 2, "--q-heads", 8, "--kv-heads", 2, "--head-dim", 32, "--kv-len", 128)
    assert {"bsp", "gather", "fine_grained", "fused", "single"} <= tuner.choices.keys()


def test_taxes_print_one_document(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    document = run("taxes", *GEMM, "--json").document
    assert document["taxes"] == [{"name": "all", "us": 100.0, "description": "communication and computation"}]
    assert (document["bsp_us"], document["tuned_us"], document["won_back"]) == (100.0, 80.0, None)
    file = tmp_path / "shapes.toml"
    file.write_text("[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\n[[all-gather-gemm]]\nm = 32\nn = 96\nk = 64\n")
    tuner.broken = [AllGatherGemm(32, 96, 64, world_size=2)]
    result = run("taxes", "--shapes", file, "--json")
    assert [document["problem"]["m"] for document in result.results] == [64, 32] and result.code == 1
    assert result.results[1]["taxes"] == [] and "the ranks do not start again" in result.results[1]["error"]
    assert "could not be compared" in run("taxes", "--shapes", file).out


# lookup


def test_lookup_falls_back(run: Run, db: Path) -> None:
    document = run("lookup", *GEMM, "--json").document
    assert document.keys() == {"problem", "match", "variant", "config", "from_problem", "reason"}
    assert (document["match"], document["variant"], document["from_problem"]) == ("fallback", "bsp", None)
    assert not db.exists()


def test_lookup_finds_the_winner(run: Run, db: Path) -> None:
    push = _a_config(PROBLEM, "push")
    keep_winner(db, PROBLEM, detect("cpu"), push, BSP)
    document = run("lookup", *GEMM, "--json").document
    assert (document["match"], document["config"]) == ("exact", dict(push.params))
    nearest = run("lookup", *GEMM, "--m", 60)
    assert "nearest" in nearest.out and "tuned for m=64 and not m=60" in " ".join(nearest.out.split()) and CPU_NOTE in nearest.out


def test_lookup_answers_for_the_conditions_asked_for(run: Run, db: Path) -> None:
    push = _a_config(PROBLEM, "push")
    keep_winner(db, PROBLEM, detect("cpu"), push, BSP, Conditions("eager", "warm", 40.0))
    assert run("lookup", *GEMM, "--json").document["match"] == "fallback"
    assert run("lookup", *GEMM, "--skew", 40, "--json").document["match"] == "exact"


# trials


def test_trials_come_with_their_reason(run: Run, db: Path) -> None:
    with Store.open(db) as store:
        keep_run(store, PROBLEM, detect("cpu"), environment("cpu"))
        keep_run(store, DECODE, GPUS, environment("cpu"))
    everything = run("trials", "--json").results
    assert len(everything) == 4
    keys = {"status", "error", "variant", "config", "latency_us", "number", "created_at"}
    assert all(trial.keys() >= keys for trial in everything)
    assert [trial["error"] for trial in everything] == [None, HANG] * 2
    one = run("trials", *GEMM, "--json").whole
    assert one["about"]["problem"] == PROBLEM.to_dict() and len(one["results"]) == 2
    assert len(run("trials", "--backend", "cpu", "--json").results) == 2
    shown = run("trials").out
    assert "wrong_result: no answer within 60 s" in " ".join(shown.split())
    assert "NVIDIA H200" in shown and shown.count(CPU_NOTE) == 1


def test_trials_of_no_database(run: Run, db: Path) -> None:
    result = run("trials", "--json")
    assert result.results == [] and result.code == 0
    assert str(db) in result.err and not db.parent.exists()


# The way in


def test_every_command_explains_itself(run: Run) -> None:
    for command in ("tune", "compare", "lookup", "trials"):
        result = run(command, "flash-decode", "--help")
        assert result.code == 0 and "--kv-heads" in result.out and "--backend" in result.out
        assert "--shard" not in result.out and "--shapes" not in result.out, "only what applies"
    assert run("--help").code == 0


OF_CHECKOUT = pytest.param([str(ROOT / "cli.py")], marks=pytest.mark.volume)


@pytest.mark.parametrize("program", [["-m", "autotax"], OF_CHECKOUT], ids=["module", "checkout"])
def test_runs_as_a_program(program: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *program, "lookup", *GEMM, "--world-size", "0", "--db", str(tmp_path / "x.db")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("autotax: world_size is 0") and ended.stderr.count("\n") == 1


def test_comes_up_without_torch_triton_or_a_database() -> None:
    heavy = "torch", "triton", "numpy", "optuna", "sqlalchemy", "rich.live"
    code = f"import sys, autotax.cli.app; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert ended.stdout == "[]\n", ended.stderr


def _a_config(problem: AllGatherGemm, variant: str, **other: int) -> Config:
    from autotax.spaces import space_for

    space = space_for(problem, detect("cpu"))
    config = Config.of(variant, space.default(variant).values | other)
    assert config in space
    return config


# failures of an author's variant, and small things


def test_a_variant_that_fails_in_all_trials_is_loud(run: Run, tuner: Tuner) -> None:
    error = "verify 0: NameError: x (mine.py:7)\nTraceback (most recent call last):\n y"
    tuner.failed = (FailedVariant("push", 3, "crash", error),)
    named, unnamed = run("tune", *GEMM, "--variants", "push"), run("tune", *GEMM)
    assert (named.code, unnamed.code) == (1, 0), "a variant of the package may fail here, unless it is asked for"
    for result in (named, unnamed):
        assert "push failed in all 3 trials, first: crash: verify 0: NameError: x (mine.py:7);" in result.err
        assert "--variant push --errors` shows the tracebacks" in result.err and "Traceback" not in result.err


def test_a_run_that_came_too_late_prints_no_table(run: Run, tuner: Tuner) -> None:
    tuner.how = "late"
    result = run("tune", *GEMM, "--timeout", "20s")
    assert result.code == 1 and result.out.count("\n") == 1 and "no winner: the time limit came first; 3 trials" in result.out
    assert "came before the verdict; the finished trials are stored in" in result.err and "nothing could be" not in result.err
    tuner.how = "late at once"
    assert run("tune", *GEMM, "--timeout", "20s").err.endswith("came before the verdict; no trial had ended\n")


@pytest.mark.parametrize("alone", [[], ["fleet"], ["new"]])
def test_a_family_of_commands_alone_prints_its_help(run: Run, alone: list[str]) -> None:
    result = run(*alone)
    assert result.code == 0 and "Usage: autotax" in result.out


def test_only_what_the_operator_has_is_suggested(run: Run) -> None:
    for command in (["trace", *GEMM, "--variant"], ["tune", *GEMM, "--variants"], ["trials", *GEMM, "--variant"]):
        assert "push" in (complaint := run(*command, "foo").complaint) and "fused" not in complaint
    assert "did you mean" not in run("tune", *GEMM, "--kv-lem", 4).complaint


def test_a_minute_is_one(run: Run, tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotax.cli.problem_selection.expected_on_cpu", lambda *_: 70.0)
    assert "about 1 minute;" in run("tune", *GEMM).err and tuner.asked
