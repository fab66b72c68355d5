"""torchtitan: its `dist_gemm` projections on tuned kernels, by `--override.imports autotax.engines.torchtitan.tuned`.

They call torch's fused operators, so nothing of the model is replaced: the override installs ours when the first such layer is
configured. `autotax.torch.install()` before training does the same.
"""

from __future__ import annotations

from typing import Any

from torchtitan.config.override import override  # type: ignore[import-not-found]
from torchtitan.models.common.dist_gemm import AllGatherFusedFeedForward  # type: ignore[import-not-found]

import autotax.torch
from autotax.engines.plugin import publish


@override(target=AllGatherFusedFeedForward.Config, description="autotax: tuned collective products")
def tuned(config: Any, db: str | None = None) -> Any:
    """Installs the operators, with winners of the database `db` (default: yours), which are proven again where they are stale.
    Returns the config unchanged.
    """
    if not autotax.torch.status().operators:
        autotax.torch.install(db, prove=True)
        publish("torchtitan")
    return config
