"""The lines that documents tell users to write, run on all ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import autotax.torch
from autotax.heap.world import World
from autotax.torch.plans import Status
from tests.torch.models import DIM, Mlp


def compiled(world: World, lines: str) -> tuple[Status, int]:
    """A model that torch's styles made parallel, with the documented lines; what was counted, and what the pass emitted."""
    import torch._inductor.config  # as the documented lines need it; only now, for both take seconds

    from tests.torch.compiled import PASSES, _model, micro_pipeline, same

    model, whole, full, _ = _model("mlp", init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",)))
    names: dict[str, Any] = {"torch": torch, "model": model}
    torch.compiler.reset()
    # Inductor's passes without its code, which would take most of the time.
    quick = functools.partial(torch.compile, backend=PASSES)
    with micro_pipeline() as emitted, mock.patch.object(torch, "compile", quick), torch.no_grad():
        exec(lines, names)
        y = names["model"](full.chunk(world.size)[world.rank])
    same(y, whole(full).chunk(world.size)[world.rank])
    status = autotax.torch.status()
    autotax.torch.uninstall()
    return status, emitted[0]


def parallel(world: World, lines: str) -> list[str]:
    """A model that the documented lines make parallel; the classes of its layers."""
    torch.manual_seed(1)
    whole = Mlp()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    exec(lines, {"parallelize_module": parallelize_module, "Shard": Shard, "model": model, "mesh": mesh})
    full = torch.randn(16, DIM, generator=torch.Generator().manual_seed(5))
    right = whole(full).chunk(world.size)[world.rank]
    torch.testing.assert_close(model(full.chunk(world.size)[world.rank]), right, rtol=1e-4, atol=1e-4)
    return [type(layer).__name__ for layer in (model.w1, model.w2)]
