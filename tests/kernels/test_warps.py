"""`push_specialized` of GEMM + Reduce-Scatter. Its kernel runs on Hopper alone; `tests.models.warps` runs its source here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.roles import tile_at
from autotax.kernels.all_gather_gemm.scaled_specialized import multiply_scaled
from autotax.kernels.gemm_reduce_scatter.scatter_roles import scatter_tiles
from autotax.operators.scaled import dequantised, laid_out, scales_shape
from tests.models import warps
from tests.models.warps import Pointer, View, plain, programs_of, together
from tests.volume import volume

K, PROGRAMS = 136, 3
TILES = [(64, 128), (64, 256), (128, 128), (128, 256)]


def place_of(out: np.ndarray, wide: int, epilogue: bool) -> View | Pointer:
    """See `PushSpecialized.place_of`."""
    return View(out[None], (1, 64, wide)) if epilogue else Pointer(out.reshape(-1))


def run(
    world: int, sizes: list[int], n: int, tile: tuple[int, int], stages: int, epilogue: bool,
    *, interleaved: bool, with_addends: bool, ahead: bool = False, everywhere: bool = False,
) -> None:  # fmt: skip
    """Calls of sizes up to the first through the same inboxes and flags, all ranks side by side, compared with NumPy."""
    high, across = tile
    owners = 1 if everywhere else world
    wide, room = min(128, across), ceil_div(sizes[0], owners)
    drawn = np.random.default_rng(world + n)
    boxes = [np.full((2 * world, room, n), np.nan, np.float16) for _ in range(world)]
    flags = [np.zeros(ceil_div(room, high) * ceil_div(n, across) * world, np.int32) for _ in range(world)]
    call = plain(scatter_tiles)

    def normal(*shape: int) -> np.ndarray:
        return drawn.standard_normal(shape).astype(np.float16)

    weights = [normal(n, K) for _ in range(world)]
    inputs = [[normal(m, K) for _ in range(world)] for m in sizes]
    bias = normal(n)
    residuals = [[normal(ceil_div(m, owners), n) for _ in range(world)] for m in sizes]
    outs = [[np.full((ceil_div(m, owners), n), np.nan, np.float16) for _ in range(world)] for m in sizes]

    def calls_of(rank: int) -> None:
        for number, m in enumerate(sizes):
            residual = Pointer(residuals[number][rank].reshape(-1))
            added = (Pointer(bias), residual, 3) if with_addends else (None, None, None)
            views = tuple(View(boxes[(rank + hop) % world], (1, 64, wide)) for hop in range(world))
            out = place_of(outs[number][rank], wide, epilogue)
            args = (
                View(inputs[number][rank], (64, 64)), View(weights[rank], (wide, 64)), views, None, out, *added,
                Pointer(boxes[rank].reshape(-1)), flags, None, None, rank, number + 1, ceil_div(m, owners), K, room, n, m,
                world, everywhere, interleaved, 4, "none", epilogue, ahead, high // 64, across // wide, wide, stages, 1, "cuda",
            )  # fmt: skip
            together(programs_of(rank, PROGRAMS, call, args))

    warps.stopped.clear()
    together([(lambda rank=rank: calls_of(rank)) for rank in range(world)])
    for number, m in enumerate(sizes):
        rows = ceil_div(m, owners)
        pairs = zip(inputs[number], weights, strict=True)
        total = sum((a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16).astype(np.float32) for a, b in pairs)
        for rank, out in enumerate(outs[number]):
            right = total if everywhere else total[rank * rows : (rank + 1) * rows]
            if with_addends:
                right = right + bias + residuals[number][rank][: len(right)]
            np.testing.assert_allclose(out[: len(right)], right, rtol=2e-3, atol=2e-2)
            assert not out[len(right) :].any(), "padding"
        if everywhere and not with_addends:
            assert all((out == outs[number][0]).all() for out in outs[number])


@pytest.mark.sampled(by=lambda stages, adds, **_: {"stages": (stages, adds)})
@pytest.mark.parametrize("adds", ["warps", "epilogue", "warps ahead"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("world", "stages", "sizes"), [(1, 3, [70, 1]), (2, 2, [300, 5, 300]), (3, 3, [280, 7, 7, 280])])
def test_the_warps_compute_the_sum(tile: tuple[int, int], world: int, stages: int, sizes: list[int], adds: str) -> None:
    n, usual = tile[1] + 8, {"interleaved": world == 3, "with_addends": world != 2}
    run(world, sizes, n, tile, stages, adds == "epilogue", ahead=adds == "warps ahead", **usual)


@pytest.mark.sampled(by=lambda ahead, world, **_: {"ahead": (ahead, world)})
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("world", "stages", "sizes"), [(2, 2, [150, 5, 150]), (3, 3, [130, 7, 7, 130])])
def test_all_ranks_get_the_sum_in_one_trip(
    tile: tuple[int, int], world: int, stages: int, sizes: list[int], ahead: bool
) -> None:
    n = tile[1] + 8
    run(world, sizes, n, tile, stages, False, interleaved=False, with_addends=world == 3, ahead=ahead, everywhere=True)


@pytest.mark.parametrize("scales", ["row", *volume("block", "tensor")])
@pytest.mark.parametrize(
    ("tile", "strips", "epilogue", "ahead"),
    [
        ((64, 128), 1, False, True), ((64, 128), 2, True, False), ((64, 256), 0, True, False),
        *volume(((64, 256), 1, False, True), ((128, 128), 2, False, False), ((128, 128), 1, True, False)),
        *volume(((128, 256), 2, True, False), ((128, 128), 0, False, True)),
    ],
    ids=str,
)  # fmt: skip
def test_the_warps_compute_the_sum_of_codes(
    scales: str, tile: tuple[int, int], strips: int, epilogue: bool, ahead: bool
) -> None:
    """Two ranks, sizes that no tile divides, rows of padding; words of A and B are pairs of codes. Zero strips are fast sums."""
    (high, across), world, sizes, n, k, stages = tile, 2, [299, 5, 299], 272, 384 if strips == 1 else 512, max(2, 1 + strips)
    if scales == "block" and (across != 128 or not strips):
        pytest.skip("a strip of a tile has one scale of B")
    wide, room = min(128, across), ceil_div(sizes[0], world)
    draw = torch.Generator().manual_seed(n)
    boxes = [np.full((2 * world, room, n), np.nan, np.float16) for _ in range(world)]
    flags = [np.zeros(ceil_div(room, high) * ceil_div(n, across) * world, np.int32) for _ in range(world)]
    call = plain(scatter_tiles)

    def operand(rows: int, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randn(rows, k, generator=draw).to(torch.float8_e4m3fn)
        factors = torch.rand(scales_shape(scales, rows, k, weight=weight), generator=draw)
        return codes, laid_out(factors, scales, weight=weight)

    weights = [operand(n, True) for _ in range(world)]
    inputs = [[operand(m, False) for _ in range(world)] for m in sizes]
    outs = [[np.full((ceil_div(m, world), n), np.nan, np.float16) for _ in range(world)] for m in sizes]

    def words_of(codes: torch.Tensor, rows: int) -> View:
        return View(codes.view(torch.float16).numpy(), (rows, 64))

    def calls_of(rank: int) -> None:
        for number, m in enumerate(sizes):
            (a, of_a), (b, of_b) = inputs[number][rank], weights[rank]
            strides = of_a.stride() if of_a.dim() == 2 else (0, 0)
            of_all = (Pointer(of_a.t().reshape(-1).numpy()), *strides, Pointer(of_b.reshape(-1).numpy()))
            views = tuple(View(boxes[(rank + hop) % world], (1, 64, wide)) for hop in range(world))
            out = place_of(outs[number][rank], wide, epilogue)
            args = (
                words_of(a, 64), words_of(b, wide), views, of_all, out, None, None, None,
                Pointer(boxes[rank].reshape(-1)), flags, None, None, rank, number + 1, ceil_div(m, world), k // 2, room, n, m,
                world, False, False, 4, scales, epilogue, ahead, high // 64, across // wide, wide, stages, strips, "cuda",
            )  # fmt: skip
            together(programs_of(rank, PROGRAMS, call, args))

    warps.stopped.clear()
    together([(lambda rank=rank: calls_of(rank)) for rank in range(world)])
    for number, m in enumerate(sizes):
        numbers = [
            dequantised(*a, scales, weight=False) @ dequantised(*b, scales, weight=True).t()
            for a, b in zip(inputs[number], weights, strict=True)
        ]
        right = torch.nn.functional.pad(sum(product.half().float() for product in numbers), (0, 0, 0, -m % world)).numpy()
        np.testing.assert_allclose(np.concatenate(outs[number]), right, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("scales", ["row", *volume("block", "tensor")])
@pytest.mark.parametrize(("depth", "strips"), [(2, 1), (1, 2), (1, 0), *volume((2, 2))])
@pytest.mark.parametrize(
    ("x_is_b", "groups", "parts"),
    [(False, 2, (32, 16, 0)), (True, 1, (16, 0, 0)), (False, 1, (64, 0, 0)), (False, 1, (128, 128, 0))],
)
def test_groups_multiply_codes_of_all_shards(
    scales: str, x_is_b: bool, groups: int, parts: tuple[int, int, int], depth: int, strips: int
) -> None:
    """Rank 1 of two, whose own scales lie elsewhere than its peer's. Shards have rows of padding. Two strips share a buffer, or
    are added up by tensor cores, or all of K. Tiles of 256 columns are multiplied part by part, and stored in halves of parts.
    """
    world, rank, rows, shard, n, k, stages = 2, 1, 64, 59, 176, 512, 3
    if sum(parts) == 256 and depth > 1:
        pytest.skip("no such kernel has two strips in a buffer")
    if scales == "block" and strips != 1:
        pytest.skip("strips have scales of their own")
    if scales == "block" and sum(parts) not in (16, 64):
        pytest.skip("such a tile lies in several blocks of B")
    draw = torch.Generator().manual_seed(n)
    a, b = (torch.randn(size, k, generator=draw).to(torch.float8_e4m3fn) for size in (world * shard, n))
    of_a = [torch.rand(scales_shape(scales, shard, k, weight=False), generator=draw) for _ in range(world)]
    of_a = [laid_out(factors, scales, weight=False) for factors in of_a]
    of_b = torch.rand(scales_shape(scales, n, k, weight=True), generator=draw)
    if scales == "tensor":
        of_a[0] = of_a[1]
    room = of_a[0].numel() + 5
    memory = np.full(3 * room, np.nan, np.float32)  # this rank's scales, then those of all ranks but this one
    memory[: of_a[1].numel()], memory[room : room + of_a[0].numel()] = (of_a[source].t().reshape(-1).numpy() for source in (1, 0))
    own, dense = Pointer(memory), Pointer(memory, room)
    own.dtype = memory
    whole = torch.zeros(world * rows, k).to(torch.float8_e4m3fn)
    for source in range(world):
        whole[source * rows : source * rows + shard] = a[source * shard : (source + 1) * shard]
    words_a, words_b = (codes.view(torch.float16).numpy() for codes in (whole, b))
    high, wide = (sum(parts), 64 * groups) if x_is_b else (64 * groups, sum(parts))
    n_tiles, out = ceil_div(n, wide), np.full((world, shard, n), np.nan, np.float16)
    share = (world * rows // high * n_tiles, 0, world * rows, k // 2, n_tiles)
    x = warps.Shared(np.zeros((stages * depth * groups, 64, 64), np.float16))
    y = tuple(warps.Shared(np.zeros((stages * depth, part, 64), np.float16)) for part in parts)
    full, empty = (warps._shared(np.int64, [stages, 1], None) for _ in range(2))
    for stage in range(stages):
        full.index(stage).count, empty.index(stage).count = 1, groups
    flat = np.full((1, world * rows, n), np.nan, np.float16)
    boxes = [(1, part, 64) if x_is_b else (1, 64, min(part, 64)) for part in parts]
    stagings = warps.Shared(np.zeros((groups, *boxes[0][1:]), np.float16))
    where = plain(tile_at)

    def load() -> None:
        turn = 0
        for item in range(share[0]):
            row, col = where(item, 0, world * rows, n_tiles, 1, False, 8, True, high, wide)
            sides = (words_b, col, words_a, row) if x_is_b else (words_a, row, words_b, col)
            for at in range(0, k // 2, depth * 64):
                stage = turn % stages
                empty.index(stage).wait((turn // stages & 1) ^ 1)
                for strip in range(depth):
                    place, first = stage * depth + strip, at + 64 * strip
                    for group in range(groups):
                        begin = sides[1] + 64 * group
                        warps._load_block(View(sides[0], (64, 64)), [begin, first], Quiet(), x.index(place * groups + group))
                    for number, part in enumerate(parts):
                        if part:
                            begin = sides[3] + sum(parts[:number])
                            warps._load_block(View(sides[2], (part, 64)), [begin, first], Quiet(), y[number].index(place))
                full.index(stage).come(1, 0)
                turn += 1

    call = plain(multiply_scaled)
    of_all = ((own, dense, None, None, room), rank, rows, shard, Pointer(of_b.reshape(-1).numpy()))
    outs = tuple(View(flat, box) for box in boxes)
    tile = (scales, x_is_b, groups, *parts, stages, depth, strips, "cuda")
    args = (of_all, n, outs, stagings, (x, y, full, empty), share, 1, False, 8, True, *tile)

    def multiply(group: int) -> None:
        call(group, *args)
        warps._assembly("wait_group 0")  # the end of a program

    calls = [lambda group=group: multiply(group) for group in range(groups)]
    warps.stopped.clear()
    together([lambda role=role: warps._begin((rank, 0, 1), role) for role in (load, *calls)])
    of_whole = torch.cat(of_a) if scales != "tensor" else of_a[0]
    right = dequantised(a, of_whole, scales, weight=False) @ dequantised(b, of_b, scales, weight=True).t()
    out = flat.reshape(world, rows, n)[:, :shard].reshape(-1, n)
    np.testing.assert_allclose(out, right.numpy(), rtol=2e-3, atol=2e-2)


class Quiet:
    """A barrier that does not count bytes."""

    def come(self, _arrivals: int, _more: int) -> None:
        pass


def _late_reader(text: str, *_: object, **__: object) -> int:
    warps._store_wait(0)
    return warps._assembly(text)


@pytest.mark.parametrize("epilogue", [True, *volume(False)])
@pytest.mark.parametrize(
    "fault", ["nobody waits for barriers", "adders do not wait for flags", "a buffer is free before it is read"]
)
def test_the_emulation_finds_what_is_too_early(fault: str, epilogue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warps, "PATIENCE_S", 2.0)
    if fault == "nobody waits for barriers":
        monkeypatch.setattr(warps.FAKES["mbarrier"], "wait", lambda *_: None)
    elif fault == "adders do not wait for flags":
        monkeypatch.setitem(warps.FAKES, "wait_first", lambda _flags, _first, count, *_: count)
    else:
        monkeypatch.setattr(warps.FAKES["tma"], "store_wait", lambda _: None)
        monkeypatch.setattr(warps.gluon_language, "inline_asm_elementwise", _late_reader)
    with pytest.raises((AssertionError, ValueError)):
        run(2, [130, 129], 264, (64, 256), 2, epilogue, interleaved=False, with_addends=False)
