"""The tables of a database, and the current digests of variants that version 0.1 named otherwise, for one release."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    String,
    Text,
    TypeDecorator,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from autotax.core.decoding import Malformed, reason
from autotax.core.settings import RUN_STATUSES, TRIAL_STATUSES
from autotax.db.records import Samples

FORMER = {
    "1e0df87ce532a799": (  # all-gather-gemm/bsp
        "fe0bb2886133dd1f", "be95cc05ac6f4283", "968257b504555392", "8fab94daced175f4",
        "3e1c42a7d5b36e8b", "059d3350cfb63119", "2a9b7b6e185d4faa", "de53815979869ae2",
    ),
    "e8a68393cd794e46": ("c8a0d36aecd63d13", "43c89fafeeaf951a"),  # all-gather-gemm/decomposed
    "157e42f50e4c4d45": ("21a515005894653a", "cbe2b1f07ec33270"),  # all-gather-gemm/copy_engine
    "eb57cd082d397992": ("6fed33a6fa964287", "55ad396ba14ca79f"),  # all-gather-gemm/pull
    "182b6a94904d8012": ("bf706b5dfba1ddc5", "9d55d90b78669463"),  # all-gather-gemm/push
    "708b68736758160d": ("82037b6f0e76fbf5", "5d89877e16cb3687"),  # all-gather-gemm/push_packets
    "d8539f6bfac44aa1": ("73ed1c04cb7287de", "e308c3ea46bfc8fb"),  # all-gather-gemm/push_two_kernel
    "ba22f904031df697": ("ebf24f3fdd3d6263", "e97162c29504a0ce"),  # decode-merge/bsp
    "578679e67cb0c759": ("96ad667509d140bd", "266d7b2f6958cfa4"),  # decode-merge/gather
    "ff01e3285d64870f": ("8a6e8434acc79ce2", "61610584055d813e"),  # decode-merge/fine_grained
    "8e21e03a57d27896": ("b9ec9ac8a89fea7d", "331b8f5bddad6d42"),  # decode-merge/words
    "5a8adbbca3001c50": ("3c0d91f651ee8527", "d89f7585b3a68a38"),  # decode-merge/compact
    "b976760a132d20d9": ("3d1712e1f4db8526", "0388d92146935b2f"),  # flash-decode/bsp
    "daf53610b5101455": ("7659f1ffadbe0f64", "d4f5fa450ae58fea"),  # flash-decode/gather
    "d1d18f9d06dbd47f": ("42ecd53b08c9bb29", "a80a976f8e7e6ebd"),  # flash-decode/fine_grained
    "62fc337c7858ca6b": ("f6b5321262a2e0b7", "8927592aed1ec14e"),  # flash-decode/fused
    "92fb6b63a0d48823": ("b33b0952a97b73ca", "8769bab8aebe5425"),  # flash-decode/single
    "39c41afe55a1ee03": ("64d50ef743601d9e", "7689408d43ffffd1"),  # flash-decode/resident
    "4369cc3e3ff29a78": ("72aacc8bf78cbc19", "69b2c5c7ff0fb829"),  # flash-decode/compact
    "9ac6c04a5b4e9dc4": (  # gemm-reduce-scatter/bsp
        "b26684f604a75676", "ca42ca7c722ff4f8", "6b465d057055f05a", "d039365174a30dbe",
        "f7f3c5f4055b4aa3", "8fc8149f83fcd0e4", "d168751f9a7bbeae", "19bf51a94d22c4f4",
    ),
    "a43e05c6b4c42f01": ("f5a132cbadb05cbb", "a7c0e6e63f5c4df2"),  # gemm-reduce-scatter/decomposed
    "00467e33e64b2bf0": ("d0d051949b79d731", "63e24e5fbba46f2a"),  # gemm-reduce-scatter/push
    "c76d4d2b5023994d": ("5da769fcff0e6761", "d141c62b4569bac9"),  # gemm-reduce-scatter/pull_reduce
    "3aec379ed28ab567": ("61b084ebc06e8254", "0166d5b96ea142c5", "3506c51f12e9d7d7"),  # gemm-reduce-scatter/words
    "678375d8cc229406": ("8f742c7113e5bbe1",),  # head-gather/bsp
    "6baa68e1adcfc643": ("7e0a30f37f938799", "2cd25a7f7a120c21"),  # head-gather/push
    "7e59f065d24f2be3": ("26f57f11c0c18a78", "230dbed894586807"),  # head-gather/words
}
"""Digests of `autotax.digests` of today, and those that the same code had formerly, the latest last."""
CURRENT = {former: current for current, formers in FORMER.items() for former in formers}


# The tables. Their names begin with `autotax_`, because Optuna keeps its tables in the same database.

SCHEMA_VERSION = 4
"""Version of the tables below. Raise it with every change of them. Databases of another version are refused; their winners can be
moved by `autotax export` and `autotax import`.
"""
PREFIX = "autotax_"

Digest = String(16)


class Strict(TypeDecorator[Any]):
    """A column type that raises Malformed for values of another type, because SQLite accepts any value in any column."""

    impl: Any
    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        process = super().result_processor(dialect, coltype)

        def checked(value: Any) -> Any:
            try:
                return process(value) if process else value
            except (ValueError, TypeError, RecursionError) as error:
                raise Malformed(reason(error)) from None

        return checked


class Json(Strict):
    impl = JSON(none_as_null=True)
    cache_ok = True


class Flag(Strict):
    impl = Boolean
    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:  # noqa: ARG002
        def checked(value: Any) -> bool | None:
            if value is not None and (type(value) not in (int, bool) or value not in (0, 1)):
                raise Malformed(f"a flag is {str(value)[:40]!r}")
            return value if value is None else bool(value)

        return checked


class Utc(Strict):
    """A time in UTC. SQLite does not store the zone, so it is removed on writing and added on reading."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return value and value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return value and value.replace(tzinfo=UTC)


class KernelDigest(Strict):
    """The digest of a variant's sources. A former digest is read as the current digest of the same code."""

    impl = Digest
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return value and CURRENT.get(value, value)


def _now() -> datetime:
    return datetime.now(UTC)


def _one_of(column: str, allowed: Sequence[str]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(value) for value in allowed)})", name=f"{column}_known")


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012
        datetime: Utc,
        bool: Flag,
        dict[str, Any]: Json,
        dict[str, float]: Json,
        list[str]: Json,
        Samples: Json,
        dict[str, Samples]: Json,
    }


class Meta(Base):
    """Facts about the database itself: its `schema_version`, and the rule of its `digests`."""

    __tablename__ = "autotax_meta"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)


class HardwareRow(Base):
    """`autotax.hardware.Hardware`, field by field."""

    __tablename__ = "autotax_hardware"

    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    backend: Mapped[str] = mapped_column(String(16))
    device: Mapped[str] = mapped_column(Text)
    target: Mapped[str] = mapped_column(String(64))
    count: Mapped[int]
    memory_gib: Mapped[int]
    processors: Mapped[int]
    shared_memory: Mapped[int] = mapped_column(BigInteger)
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    links: Mapped[str] = mapped_column(Text)


class EnvironmentRow(Base):
    """`autotax.software.Environment`, field by field."""

    __tablename__ = "autotax_environment"

    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    python: Mapped[str] = mapped_column(String(64))
    torch: Mapped[str] = mapped_column(String(64))
    triton: Mapped[str] = mapped_column(String(64))
    comm: Mapped[str] = mapped_column(String(200))
    kernels: Mapped[str] = mapped_column(Digest, index=True)


class ProblemRow(Base):
    """`autotax.core.problem.Problem` under its canonical key."""

    __tablename__ = "autotax_problem"

    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    op: Mapped[str] = mapped_column(String(64), index=True)
    fields: Mapped[dict[str, Any]]


class RunRow(Base):
    __tablename__ = "autotax_run"
    __table_args__ = (_one_of("status", RUN_STATUSES),)

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_key: Mapped[str] = mapped_column(ForeignKey(ProblemRow.key), index=True)
    hardware_digest: Mapped[str] = mapped_column(ForeignKey(HardwareRow.digest))
    environment_digest: Mapped[str] = mapped_column(ForeignKey(EnvironmentRow.digest))
    settings: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(String(16), default="running")
    started_at: Mapped[datetime] = mapped_column(default=_now)
    ended_at: Mapped[datetime | None]
    notices: Mapped[list[str] | None]
    accounts: Mapped[dict[str, float] | None]

    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)
    hardware: Mapped[HardwareRow] = relationship(lazy="joined", innerjoin=True)
    environment: Mapped[EnvironmentRow] = relationship(lazy="joined", innerjoin=True)


class TrialRow(Base):
    __tablename__ = "autotax_trial"
    __table_args__ = (
        _one_of("status", TRIAL_STATUSES),
        CheckConstraint("status <> 'ok' OR latency_us IS NOT NULL", name="ok_is_timed"),
        Index(None, "run_id", "number"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey(RunRow.id))
    number: Mapped[int]
    variant: Mapped[str] = mapped_column(String(64))
    config: Mapped[dict[str, Any]]
    config_digest: Mapped[str] = mapped_column(Digest, index=True)
    kernel_digest: Mapped[str] = mapped_column(KernelDigest)
    status: Mapped[str] = mapped_column(String(32))
    latency_us: Mapped[float | None]
    samples: Mapped[Samples | None]
    slowest_rank: Mapped[int | None]
    compile_s: Mapped[float | None]
    verified: Mapped[bool]
    relative_error: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(Text)
    conditions: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=_now)

    run: Mapped[RunRow] = relationship()


class WinnerRow(Base):
    """A winner. Its key contains all facts whose change makes a tuned config stale, so stale winners simply do not match. It also
    contains the conditions (`Conditions.key`), so winners of different conditions never replace each other.
    """

    __tablename__ = "autotax_winner"
    __table_args__ = (CheckConstraint("verified", name="verified"),)

    problem_key: Mapped[str] = mapped_column(ForeignKey(ProblemRow.key), primary_key=True)
    hardware_digest: Mapped[str] = mapped_column(ForeignKey(HardwareRow.digest), primary_key=True)
    kernel_digest: Mapped[str] = mapped_column(KernelDigest, primary_key=True)
    world_size: Mapped[int] = mapped_column(primary_key=True)
    comm: Mapped[str] = mapped_column(String(200), primary_key=True)
    conditions: Mapped[str] = mapped_column(String(64), primary_key=True)
    triton: Mapped[str] = mapped_column(String(64), primary_key=True)

    environment_digest: Mapped[str] = mapped_column(ForeignKey(EnvironmentRow.digest))
    trial_id: Mapped[int] = mapped_column(ForeignKey(TrialRow.id), index=True)
    config: Mapped[dict[str, Any]]
    latency_us: Mapped[float]
    baseline_us: Mapped[float]
    baseline: Mapped[dict[str, Any]]
    speedup: Mapped[float]
    interval_low: Mapped[float]
    interval_high: Mapped[float]
    tie: Mapped[bool]
    verified: Mapped[bool]
    samples: Mapped[dict[str, Samples] | None]
    created_at: Mapped[datetime]

    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)
    hardware: Mapped[HardwareRow] = relationship(lazy="joined", innerjoin=True)
    environment: Mapped[EnvironmentRow] = relationship(lazy="joined", innerjoin=True)


class MissRow(Base):
    """Problems that programs looked up without a winner."""

    __tablename__ = "autotax_miss"

    problem_key: Mapped[str] = mapped_column(ForeignKey(ProblemRow.key), primary_key=True)
    hardware_digest: Mapped[str] = mapped_column(ForeignKey(HardwareRow.digest), primary_key=True)
    conditions: Mapped[str] = mapped_column(String(64), primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    last_asked: Mapped[datetime]

    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)
    hardware: Mapped[HardwareRow] = relationship(lazy="joined", innerjoin=True)
