"""push_one_shot and scaled_push_one_shot: GEMM + All-Reduce in one trip, by warps with roles. `scatter_roles` says how.

Every rank sends each tile of its partial sum to all ranks, itself included, and adds up all rows. So no sum travels a second
time, and all tiles but those of the last wave travel while later ones are multiplied. A rank sends (ranks - 1) x m x n elements:
with two ranks as many as in two trips.
"""

from __future__ import annotations

from autotax.kernels.gemm_reduce_scatter.push_specialized import PushSpecialized, ScaledSpecialized


class PushOneShot(PushSpecialized):
    EVERYWHERE = True


class ScaledPushOneShot(ScaledSpecialized):
    EVERYWHERE = True
