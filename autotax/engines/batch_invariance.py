"""BATCH INVARIANCE in a serving engine: whether it has promised that a result does not depend on the batch around it.

What is tuned is chosen by number of tokens, so an engine in such a mode keeps its own functions. It may enter the mode after the
plugins are registered, so layers and calls ask too. All ranks of an engine must be in the same mode. Nothing is imported here.
"""

from __future__ import annotations

import logging
import os
import sys

VLLM_VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_TP_INVARIANT")
SGLANG_VARIABLES = ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE",)
OFF = ("", "0", "false", "f", "no", "n", "off")
log = logging.getLogger("autotax")
_said: set[str] = set()


def vllm() -> bool:
    """Whether vLLM must be batch-invariant: by its environment, its settings, or kernels that it has put in torch's place."""
    return (
        _variable("vLLM", VLLM_VARIABLES)
        or _value("vLLM", "vllm.envs", "VLLM_BATCH_INVARIANT")
        or _answer("vLLM", "vllm.model_executor.layers.batch_invariant", "vllm_is_batch_invariant")
        or _answer("vLLM", "vllm.model_executor.layers.batch_invariant", "is_batch_invariant_mode_enabled")
    )


def sglang() -> bool:
    """Whether SGLang must be deterministic: by its environment, its server's arguments, or kernels in torch's place."""
    return (
        _variable("SGLang", SGLANG_VARIABLES)
        or any(_arguments(module, name) for module, name in _HOLDERS)
        or _answer("SGLang", "sglang.srt.batch_invariant_ops", "is_batch_invariant_mode_enabled")
    )


def _variable(engine: str, names: tuple[str, ...]) -> bool:
    for name in names:
        value = os.environ.get(name)
        if value is not None and value.strip().lower() not in OFF:
            return _stand_back(engine, f"{name}={value}")
    return False


def _value(engine: str, module: str, name: str) -> bool:
    try:
        on = bool(getattr(sys.modules.get(module), name, False))
    except Exception:  # a value of the engine's that cannot be read: the variable has decided
        return False
    return on and _stand_back(engine, f"{module}.{name}")


def _answer(engine: str, module: str, name: str) -> bool:
    ask = getattr(sys.modules.get(module), name, None)
    try:
        on = ask is not None and bool(ask())
    except Exception:  # an engine that is not set up yet has not decided
        return False
    return on and _stand_back(engine, f"{module}.{name}()")


_HOLDERS = (
    ("sglang.srt.server_args", "get_global_server_args"),
    ("sglang.srt.server_args", "_global_server_args"),
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.managers.schedule_batch", "global_server_args_dict"),
)
"""Where releases of SGLang keep the arguments of the server."""


def _arguments(module: str, name: str) -> bool:
    held = getattr(sys.modules.get(module), name, None)
    try:
        arguments = held() if callable(held) else held
    except Exception:  # asked before the server has them
        return False
    fields = arguments if isinstance(arguments, dict) else getattr(arguments, "__dict__", {})
    if fields.get("enable_deterministic_inference"):
        return _stand_back("SGLang", "enable_deterministic_inference")
    if fields.get("rl_on_policy_target"):
        return _stand_back("SGLang", f"rl_on_policy_target={fields['rl_on_policy_target']}")
    return False


def _stand_back(engine: str, cause: str) -> bool:
    if engine not in _said:
        _said.add(engine)
        log.warning("autotax leaves %s as it is: %s asks for results that no batch changes", engine, cause)
    return True
