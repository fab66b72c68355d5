"""The doctor: an answer to every check whatever the machine is like, and a next step where something lacks."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from autotax import hardware, software
from autotax.cli import doctor, field_report
from autotax.cli.doctor import Check, examine, usable
from autotax.core.errors import UsageError
from tests.cli.conftest import Run


def check_of(name: str, backend: str = "cpu", db: str | None = None) -> Check:
    return next(check for check in examine(backend, db) if check.name == name)


def test_prints_one_document(run: Run, db: Path) -> None:
    result = run("doctor", "--backend", "cpu", "--json")
    checks = result.results
    assert all(check.keys() >= {"name", "ok", "found", "next"} for check in checks)
    assert {"python", "torch", "triton", "shared memory", "database"} <= {check["name"] for check in checks}
    assert result.code == (0 if all(check["ok"] or not check["needed"] for check in checks) else 1)
    assert not db.parent.exists()


def test_what_lacks_has_a_next_step() -> None:
    for backend in ("cuda", "rocm", "cpu"):
        for check in examine(backend):
            assert check.ok or check.next, check


def test_a_backend_that_is_not_here_is_a_finding(run: Run) -> None:
    import torch

    if torch.version.hip:
        pytest.skip("this torch is for ROCm")
    result = run("doctor", "--backend", "rocm")
    assert result.code == 1 and "GPUs" in result.out


@pytest.mark.parametrize(("version", "ok"), [("3.6.0+git1", True), ("3.5.1", False), (None, False), ("4.0", True)])
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str | None, ok: bool) -> None:
    monkeypatch.setattr(doctor, "triton_version", lambda: version)
    assert check_of("triton").ok is ok
    assert ("not tried: 3.6 to 3.9 were" in check_of("triton").found) is (version in ("3.5.1", "4.0"))


def test_the_versions_tried_are_those_of_the_makefile() -> None:
    lines = (Path(__file__).parents[2] / "Makefile").read_text().splitlines()
    tried = next(line for line in lines if line.startswith("SETS := ")).removeprefix("SETS := ").split()
    of = [dict(zip(("python", "torch", "triton"), version.split("/"), strict=True)) for version in tried]
    for name, (first, last) in doctor.TRIED.items():
        numbers = [doctor.numbers_of(version[name]) for version in of]
        assert (min(numbers), max(numbers)) == (doctor.numbers_of(first), doctor.numbers_of(last)), name


@pytest.mark.parametrize("hip", [None, "7.2"])
def test_a_host_of_amd_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hip: str | None) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    monkeypatch.setattr(torch.version, "hip", hip)
    for module in (doctor, hardware):
        monkeypatch.setattr(module, "KERNEL_DRIVER", tmp_path)
    check = next(check for check in examine() if check.name == "GPUs")
    assert not check.ok and check.needed and ("groups render" if hip else "ROCm") in check.next
    hardware.detect.cache_clear()
    with pytest.raises(UsageError, match="sees no GPU" if hip else "install the builds of torch and triton for ROCm"):
        hardware.detect()
    assert hardware.detect("cpu").backend == "cpu"


def test_hardware_queues_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, ok, needed in (("8", True, True), ("2", False, True), (None, False, False)):
        monkeypatch.setenv("GPU_MAX_HW_QUEUES", value) if value else monkeypatch.delenv("GPU_MAX_HW_QUEUES", raising=False)
        check = check_of("GPU_MAX_HW_QUEUES", "rocm")
        assert (check.ok, check.needed or check.ok) == (ok, needed)


@pytest.mark.parametrize(("dies", "ok"), [(8, True), (None, True), (6, False)])
def test_dies_are_asked_of_hip(monkeypatch: pytest.MonkeyPatch, dies: int | None, ok: bool) -> None:
    import torch

    from tests.spaces.drawing import MI300X

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "detect", lambda _: MI300X)
    monkeypatch.setattr(doctor, "dies_by_hip", lambda: dies)
    check = doctor.dies()
    assert check.ok is ok
    assert str(dies or "HIP does not tell") in check.found


def test_tritons_version_is_what_it_says_of_itself() -> None:
    """Wheels for ROCm are distributions of other names."""
    triton = pytest.importorskip("triton")
    assert software.triton_version() == triton.__version__


def test_one_connection_breaks_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert check_of("CUDA_DEVICE_MAX_CONNECTIONS").ok
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not check_of("CUDA_DEVICE_MAX_CONNECTIONS").ok and not usable(examine("cpu"))


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'iris'"), OSError("libamdhip64.so: no such file")])
def test_iris_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real = doctor.importlib.import_module

    def fails(name: str) -> object:
        if name == "iris":
            raise error
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", fails)
    check = check_of("iris", "rocm")
    assert not check.ok and str(error) in check.found and "install" in check.next


def test_databases(tmp_path: Path) -> None:
    assert check_of("database", db=str(tmp_path / "new" / "my.db")).ok
    assert not (tmp_path / "new").exists()
    (tmp_path / "notes.txt").write_text("not a database\n" * 50)
    bad = check_of("database", db=str(tmp_path / "notes.txt"))
    assert not bad.ok and bad.next
    assert not check_of("database", db=str(tmp_path / "notes.txt" / "my.db")).ok
    assert not check_of("database", db="nonsense://x").ok


@pytest.mark.parametrize(
    ("error", "following"),
    [(RuntimeError("the driver\nis gone"), "the driver must fit"), (ImportError("the driver is gone"), "`pip install autotax`")],
)
def test_a_check_that_breaks_is_an_answer(monkeypatch: pytest.MonkeyPatch, error: Exception, following: str) -> None:
    def breaks() -> Check:
        raise error

    monkeypatch.setattr(doctor, "_gloo", breaks)
    [broken] = [check for check in examine("cpu") if "the driver is gone" in check.found]
    assert not broken.ok and not usable([broken]) and following in broken.next


def test_a_report_holds_nothing_private(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = "hunter2"
    monkeypatch.setenv("HOME", str(tmp_path / "someone"))
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("NCCL_PROTO", f"$({secret})")
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "8")
    monkeypatch.setattr(platform, "node", lambda: f"{secret}.example")
    of_root = Path("/") / "root"
    error = f"in {tmp_path}/someone/x and {Path('/') / 'home' / secret}/y.py on {secret}.example: {of_root}/z, {of_root}ing"
    monkeypatch.setattr(field_report, "_trials", lambda *_: ([{"variant": "bsp", "error": error}], None))
    monkeypatch.setattr(field_report, "_heap", lambda _: {"proved": True})
    file = tmp_path / "report.json"
    db = f"postgresql://{secret}:{secret}@{secret}/x"
    result = run("doctor", "--backend", "cpu", "--db", db, "--report", str(file), "--json")
    assert result.results and str(file) in result.err
    text = file.read_text()
    assert secret not in text and "someone" not in text and str(tmp_path) + "/someone" not in text
    report = json.loads(text)
    assert report["variables"] == {"GPU_MAX_HW_QUEUES": "8", "NCCL_PROTO": "set"}
    assert report["trials"][0]["error"] == f"in ~/x and ~/y.py on host: ~/z, {of_root}ing"
    assert {check["name"] for check in report["checks"]} >= {"python", "torch", "triton"} and report["packages"]["torch"]


def test_a_report_that_cannot_be_written_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--report", str(tmp_path / "no" / "report.json"))
    assert result.code == 2 and "cannot be written" in result.err and len(result.err.splitlines()) == 1


@pytest.mark.volume
def test_a_report_of_cpu_ranks_has_a_verified_trial_and_a_proved_heap() -> None:
    """The ranks are real."""
    report = field_report.collect("cpu", [])
    assert [trial["status"] for trial in report["trials"]] == ["ok", "ok"] and report["trials"][1]["variant"] == "bsp"
    assert 0 < report["seconds_to_first_verified_trial"] < report["seconds"]
    assert report["heap"]["proved"] and report["heap"]["library"] == "SharedHeap" and report["heap"]["ranks"] == 2
    assert report["software"]["comm"] and "error" not in report


def test_a_report_without_ranks_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("no GPU answers")

    monkeypatch.setattr(field_report, "detect", refuse)
    report = field_report.collect(None, [])
    assert report["error"] == "no GPU answers" and report["packages"] and "trials" not in report
