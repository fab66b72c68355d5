"""Device primitives, and a folder or a module of kernels per operator.

Importing kernels imports Triton. Triton decides at import whether kernels are compiled or interpreted, so on CPU ranks
TRITON_INTERPRET=1 must be in the environment before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.operators import registry

if TYPE_CHECKING:
    from autotax.kernels.context import Context
    from autotax.kernels.kernel import Kernel


def prepare(problem: Problem, config: Config, context: Context) -> Kernel[Any]:
    """The kernel of `config`, with its workspaces allocated. Collective; call `context.heap.check()` before the first call."""
    kernel: Kernel[Any] = registry.implementation(registry.of(problem), config.variant).kernel_class()(problem, config, context)
    kernel.config = config  # an alternative may work as its parent does with a config of its own
    return kernel
