"""The ranks of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autotax.commands.saying import Failed

if TYPE_CHECKING:
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner


@contextmanager
def ranks(hardware: Hardware, world_size: int, seed: int = 0) -> Iterator[LiveRunner]:
    """Ranks that start when first used and are gone at the end."""
    from autotax.runner import LiveRunner
    from autotax.runner.pool import GroupLost

    runner = LiveRunner(hardware, world_size, seed=seed)
    try:
        yield runner
    except GroupLost as loss:
        raise Failed(f"{world_size} ranks on {hardware} do not start ({loss}): run `autotax doctor`") from loss
    finally:
        runner.close()
