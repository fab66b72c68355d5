"""Whether a serving engine has promised results that do not depend on the rest of the batch.

In such a mode the engine keeps its own functions. With AUTOTAX_BATCH_INVARIANT=1 row-parallel layers run one config for all
numbers of tokens, if a winner keeps the bits of a token; other winners are chosen by the number of tokens. An engine may enter
the mode after its plugins are registered, so layers and calls ask as well. All ranks of an engine must be in the same mode. This
module imports no engine: it reads variables of the environment and modules that the engine has imported.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from autotax.core.settings import OFF

log = logging.getLogger("autotax")
_said: set[str] = set()
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
        if cause and self._engine not in _said:
            _said.add(self._engine)
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


def _is_set(value: Any) -> str:
    return "{}" if value else ""


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
vllm = Mode(
    "vLLM",
    ("VLLM_BATCH_INVARIANT", "VLLM_TP_INVARIANT"),
    (
        ("vllm.envs", "VLLM_BATCH_INVARIANT", _is_set),
        (_VLLM_LAYERS, "vllm_is_batch_invariant", _answers),
        (_VLLM_LAYERS, "is_batch_invariant_mode_enabled", _answers),
    ),
)
sglang = Mode(
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
