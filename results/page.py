"""Makes a host's report from the files that the tree keeps of it.

    python results/page.py results/HOST          writes results/HOST/report.html, or report.html.xz where that is large

Winners are those of winners.json.xz and the shipped ones, comparisons those of each compare.json.xz. Of each problem the page
shows the last search in landscapes.json.gz. Searches under faults are left out.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import autotax
from autotax.core.files import write_whole
from autotax.db import RunRecord, TrialRecord, formats
from autotax.hardware import Hardware
from autotax.report import taxes
from autotax.report.page import page
from autotax.software import Environment
from results.search import landscapes

SHIPPED = Path(autotax.__file__).parent / "shipped"
FAULTS = "unattended"
"""How the names of databases begin whose searches ran under faults."""
LARGEST = 600_000
"""Bytes of a page that the tree keeps as it is."""
LEAST = 10
"""Trials of a search. A run with fewer only proves winners again."""


def last_searches(file: landscapes.Landscapes) -> Iterator[TrialRecord]:
    """The trials of the last search of each problem."""
    sizes = [0] * len(file.runs)
    for result in file.results:
        sizes[result.run] += not result.final
    searches = [at for at, run in enumerate(file.runs) if sizes[at] >= LEAST and not run.database.startswith(FAULTS)]
    last = {file.runs[at].problem: at for at in sorted(searches, key=lambda at: file.runs[at].started_at)}
    for number, result in enumerate(file.results):
        run = file.runs[result.run]
        if last.get(run.problem) == result.run:
            yield _trial(file, number, run, result)


def _trial(file: landscapes.Landscapes, number: int, run: landscapes.Run, result: landscapes.Result) -> TrialRecord:
    hardware, environment = Hardware(**file.hardware[run.hardware]), Environment(**file.environments[run.environment])
    began = datetime.fromisoformat(run.started_at)
    record = RunRecord(run.id, file.problem(run.problem), hardware, environment, run.settings, run.status, began)
    stage = {"stage": landscapes.FINALISTS} if result.final else {}
    return TrialRecord(
        number=result.number, config=result.config, status=result.status, latency_us=result.latency_us,
        verified=bool(result.correctness), error=result.error, conditions=file.conditions[result.conditions] | stage,
        kernel_digest=result.kernel_digest, id=number, run=record,
    )  # fmt: skip


def main(folder: Path) -> None:
    """Writes the report of a host's folder."""
    kept = [folder / "winners.json.xz", *sorted(SHIPPED.glob(f"{folder.name}*.json"))]
    winners = [entry.winner for path in kept for entry in formats.read(path)]
    trials = list(last_searches(landscapes.read(folder / "landscapes.json.gz")))
    compared = [document for path in sorted(folder.glob("*/compare*.json.xz")) for document in taxes.read(path)]
    made = page(folder.name, datetime.now(UTC), winners, trials, compared).encode()
    plain, packed = folder / "report.html", folder / "report.html.xz"
    large = len(made) > LARGEST
    write_whole(*((packed, lzma.compress(made, preset=9 | lzma.PRESET_EXTREME)) if large else (plain, made)))
    (plain if large else packed).unlink(missing_ok=True)
    print(f"{len(winners)} winners, {len(trials)} trials, {len(compared)} comparisons, {len(made)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
