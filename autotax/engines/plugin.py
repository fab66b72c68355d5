"""Parts of all plugins that import no torch: contracts with a framework, its batch-invariant mode, and published counts.

Contracts are names and parameters, checked at registration and, by tests, in the published wheels.

In its batch-invariant mode an engine has promised results that do not depend on the rest of the batch, so it keeps its own
functions. With AUTOTAX_BATCH_INVARIANT=1 row-parallel layers run one config for all numbers of tokens, if a winner keeps the bits
of a token; other winners are chosen by the number of tokens. An engine may enter the mode after its plugins are registered, so
layers and calls ask as well. All ranks of an engine must be in the same mode. This module imports no engine: it reads variables
of the environment and modules that the engine has imported.

A thread writes the counts of calls to a file of this user every EVERY_S seconds, if they have changed, for `autotax status`. The
log of the process gets one line at the first call that a tuned kernel ran, and one if there was none for QUIET_S.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from platformdirs import user_cache_path

from autotax.core.decoding import Malformed, from_json
from autotax.core.errors import UsageError
from autotax.core.files import read_bytes, write_whole
from autotax.core.settings import OFF

log = logging.getLogger("autotax")


@dataclass(frozen=True)
class Contract:
    """A function or a method of a module, and the names of its parameters, all of them in order."""

    module: str
    name: str
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, module: str, name: str, parameters: str = "") -> Contract:
        return cls(module, name, tuple(parameters.split()))

    def broken(self) -> str:
        """The difference of the installed framework, in a few words; empty if there is none. Imports the module."""
        member: object = importlib.import_module(self.module)
        for part in self.name.split("."):
            member = inspect.getattr_static(member, part, None)
            if member is None:
                return f"there is no {self.module}.{self.name}"
        function = getattr(member, "__func__", member)
        names = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        return "" if names == self.parameters else f"{self.module}.{self.name} takes {', '.join(names) or 'nothing'}"


@dataclass(frozen=True)
class Part:
    """A replaced part of a framework: its name, its contracts, and a function that installs it or returns why it cannot."""

    name: str
    contracts: tuple[Contract, ...]
    install: Callable[[], str | None]


def first_broken(contracts: Sequence[Contract]) -> str:
    """The first contract that the installed framework breaks; empty if it keeps all."""
    return next((broken for contract in contracts if (broken := contract.broken())), "")


def take(framework: str, parts: Sequence[Part]) -> None:
    """Installs each part whose contracts the framework keeps. Never raises: it logs a line for each other part."""
    try:
        importlib.import_module(framework.lower())
    except Exception as error:
        log.warning("autotax leaves %s as it is: %s", framework, _line(error))
        return
    taken = []
    for part in parts:
        try:
            reason = first_broken(part.contracts) or part.install() or ""
        except Exception as error:
            reason = _line(error)
        if reason:
            log.warning("autotax leaves %s of %s as they are: %s", part.name, framework, reason)
        else:
            taken.append(part.name)
    if taken:
        log.info("autotax takes %s of %s where winners are faster", " and ".join(taken), framework)
        publish(framework)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# The batch-invariant mode of an engine.

# The dictionary inside os.environ: a look-up in os.environ would encode the variable's name at each call.
_environment: Any = getattr(os.environ, "_data", os.environ)

Source = tuple[str, str, Callable[[Any], str]]
"""A module, a name in it, and a function from its value to the reason why the mode is on; empty if it is off."""


class Mode:
    """The mode of one engine. A call of it says whether the mode is on, and logs the cause once.

    Modules are looked up once, and again when the number of imported modules has changed; their values are read at each call. A
    value that a module computes by `__getattr__`, as vLLM computes settings from the environment, is read with the modules only.
    """

    def __init__(self, engine: str, variables: tuple[str, ...], sources: tuple[Source, ...]) -> None:
        encode = getattr(os.environ, "encodekey", str)
        self._engine = engine
        self._variables = {encode(name): name for name in variables}
        self._sources = sources
        self._imported = -1
        self.logged = False
        """Whether the cause was logged."""
        self._present: list[tuple[dict[str, Any], str, Callable[[Any], str]]] = []

    def __call__(self) -> bool:
        if self._imported != len(sys.modules):
            return self._read()
        for variable in self._variables:
            if variable in _environment:
                return self._read()
        for namespace, name, cause_of in self._present:
            if (value := namespace.get(name)) and cause_of(value):
                return self._read()
        return False

    def _read(self) -> bool:
        self._imported = len(sys.modules)
        imported = [source for source in self._sources if source[0] in sys.modules]
        self._present = [(vars(sys.modules[module]), name, cause_of) for module, name, cause_of in imported]
        cause = self._cause()
        if cause and not self.logged:
            self.logged = True
            log.warning(
                "autotax leaves %s as it is, but for row-parallel layers with AUTOTAX_BATCH_INVARIANT=1, which run one config "
                "for all numbers of tokens: %s asks for results that no batch changes", self._engine, cause,
            )  # fmt: skip
        return bool(cause)

    def _cause(self) -> str:
        for name in self._variables.values():
            value = os.environ.get(name)
            if value is not None and value.strip().lower() not in OFF:
                return f"{name}={value}"
        for module, name, cause_of in self._sources:
            try:
                value = getattr(sys.modules.get(module), name, None)
            except Exception:  # a setting that cannot be read leaves the decision to the environment variable
                continue
            if value and (cause := cause_of(value)):
                return cause.replace("{}", f"{module}.{name}")
        return ""


def _is_set(_: Any) -> str:
    return "{}"


def _answers(function: Any) -> str:
    try:
        return "{}()" if function() else ""
    except Exception:  # the engine is not set up yet: the mode counts as off
        return ""


def _in_arguments(holder: Any) -> str:
    """The reason why SGLang's server arguments ask for determinism. `holder` may be a function that returns the arguments."""
    try:
        arguments = holder() if callable(holder) else holder
    except Exception:  # the server has no arguments yet
        return ""
    fields = arguments if isinstance(arguments, dict) else getattr(arguments, "__dict__", {})
    if fields.get("enable_deterministic_inference"):
        return "enable_deterministic_inference"
    target = fields.get("rl_on_policy_target")
    return f"rl_on_policy_target={target}" if target else ""


_VLLM_LAYERS = "vllm.model_executor.layers.batch_invariant"
vllm_is_invariant = Mode(
    "vLLM",
    ("VLLM_BATCH_INVARIANT", "VLLM_TP_INVARIANT"),
    (
        ("vllm.envs", "VLLM_BATCH_INVARIANT", _is_set),
        (_VLLM_LAYERS, "vllm_is_batch_invariant", _answers),
        (_VLLM_LAYERS, "is_batch_invariant_mode_enabled", _answers),
    ),
)
sglang_is_invariant = Mode(
    "SGLang",
    ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE",),
    (
        # Releases of SGLang keep the arguments of the server in different modules.
        ("sglang.srt.server_args", "get_global_server_args", _in_arguments),
        ("sglang.srt.server_args", "_global_server_args", _in_arguments),
        ("sglang.srt.runtime_context", "get_server_args", _in_arguments),
        ("sglang.srt.managers.schedule_batch", "global_server_args_dict", _in_arguments),
        ("sglang.srt.batch_invariant_ops", "is_batch_invariant_mode_enabled", _answers),
    ),
)


# The counts of a process.

EVERY_S = 5.0
QUIET_S = 300.0
CAPTURED = "a call in a captured graph counts once, when it is captured"
_publishing = threading.Lock()
"""Held from the first call of `publish` on."""


class Counted(msgspec.Struct):
    """Calls of one kind, as in autotax.torch.status."""

    operator: str
    call: str
    runs: str
    reason: str
    calls: int


class Published(msgspec.Struct):
    """The counts of one process."""

    pid: int
    framework: str
    taken: int
    left: int
    calls: list[Counted]


def folder() -> Path:
    return user_cache_path("autotax") / "status"


def publish(framework: str) -> None:
    """Begins to publish the counts of this process, once. Never raises: a process without a folder to write to goes on."""
    if _publishing.acquire(blocking=False):
        path = folder() / f"{os.getpid()}.json"
        atexit.register(path.unlink, missing_ok=True)
        threading.Thread(target=_keep, args=(framework, path), name="autotax-status", daemon=True).start()


def _keep(framework: str, path: Path) -> None:
    began, reported, before = time.monotonic(), False, ""
    while True:
        with suppress(UsageError, RuntimeError, OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            now = counts(framework)
            if (text := json.dumps(msgspec.to_builtins(now))) != before:
                write_whole(path, text)
                before = text
            if not reported and (now.taken or time.monotonic() - began > QUIET_S):
                reported = True
                # A warning, because servers show no other lines of loggers that are not theirs.
                log.warning("autotax: %s; `autotax status %d` counts on", summary(now), os.getpid())
        time.sleep(EVERY_S)


def counts(framework: str) -> Published:
    from autotax.torch.plans import status

    now = status()
    return Published(os.getpid(), framework, now.taken, now.left, [Counted(**asdict(call)) for call in now.calls])


def summary(counted: Published) -> str:
    """`12 calls of vLLM ran tuned kernels, 3 were left to it`, or why there are none."""
    whole = counted.taken + counted.left
    if not whole:
        return f"0 calls: {counted.framework} emitted no fused operator, so nothing is taken"
    return f"{counted.taken} of {whole} calls of {counted.framework} ran tuned kernels"


def published(pid: int | None = None) -> list[Published]:
    """The counts of a process, or of all processes of this user that still run. Raises UsageError for a damaged file."""
    servers = []
    for path in sorted(folder().glob("*.json")) if pid is None else [folder() / f"{pid}.json"]:
        if path.stem.isdecimal() and Path(f"/proc/{path.stem}").exists():
            try:
                servers.append(from_json(read_bytes(path), Published))
            except FileNotFoundError:
                continue
            except (OSError, Malformed) as error:
                raise UsageError(f"file {path} holds no counts ({error}): remove it") from None
    return servers
