"""Every variant compiles for every known GPU, within its shared memory, to the instructions that it relies on.

The compiler may end its process on a fatal error, so it runs in processes of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Compiled, Context
from autotax.kernels.offline import (
    META,
    TARGETS,
    MetaHeap,
    compile_offline,
    fix_cache_keys,
    known_hardware,
    pretend,
    resources_offline,
)
from autotax.operators import named
from autotax.operators.problems import (
    AllGatherGemm,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    GemmReduceScatter,
    HeadGather,
)
from autotax.operators.verification import make_inputs
from autotax.software import triton_version
from autotax.spaces import space_for
from autotax.spaces.gemm_roles import shared_bytes
from tests.kernels.compilers import Compilers
from tests.kernels.compilers import compilers as pool_of_compilers
from tests.spaces.drawing import drawn, ways_to_exchange
from tests.volume import volume

GEMMS: dict[str, Problem] = {
    "cuda:90": AllGatherGemm(2048, 7168, 8192, "bf16", "m", 4),
    "cuda:100": AllGatherGemm(2048, 7168, 8192, "fp16", "k", 4),
    "hip:gfx942": AllGatherGemm(300, 1000, 4096, "fp16", "m", 8),
    "hip:gfx950": AllGatherGemm(77, 301, 2304, "bf16", "k", 4),
}
DECODES: dict[str, Problem] = {
    "cuda:90": FlashDecode(1, 64, 8, 128, 131072, "bf16", 4),
    "cuda:100": FlashDecode(3, 5, 1, 80, 9001, "fp32", 2),
    "hip:gfx942": FlashDecode(1, 64, 8, 128, 131072, "fp16", 8),
    "hip:gfx950": FlashDecode(16, 96, 12, 64, 4096, "bf16", 8),
}
REDUCTIONS: dict[str, Problem] = {
    "cuda:90": GemmReduceScatter(2048, 8192, 7168, "bf16", "scattered", 4),
    "cuda:100": GemmReduceScatter(512, 4096, 1536, "fp16", "replicated", 4),
    "hip:gfx942": GemmReduceScatter(300, 1000, 4096, "fp16", "replicated", 8),
    "hip:gfx950": GemmReduceScatter(77, 301, 2304, "bf16", "scattered", 4, "kn"),
}
MERGES: dict[str, Problem] = {
    "cuda:90": DecodeMerge(16, 128, 512, "bf16", 4, "head_scatter"),
    "cuda:100": DecodeMerge(64, 64, 128, "fp16", 8, "replicated", "2"),
    "hip:gfx942": DecodeMerge(256, 128, 512, "bf16", 8, "head_scatter"),
    "hip:gfx950": DecodeMerge(3, 12, 80, "fp32", 4, "replicated", "2"),
}
GATHERS: dict[str, Problem] = {
    "cuda:90": HeadGather(16, 128, 576, "bf16", 4),
    "cuda:100": HeadGather(64, 64, 128, "fp16", 8),
    "hip:gfx942": HeadGather(256, 128, 576, "bf16", 8),
    "hip:gfx950": HeadGather(3, 12, 79, "fp32", 4),
}
NORMS: dict[str, Problem] = {
    "cuda:90": AllReduceNorm(16, 7168, "bf16", 4, quant="block"),
    "cuda:100": AllReduceNorm(256, 4096, "fp16", 8, "none"),
    "hip:gfx942": AllReduceNorm(64, 8192, "bf16", 8, quant="row"),
    "hip:gfx950": AllReduceNorm(3, 264, "fp32", 4, quant="tensor", offset=1),
}
ATTENTIONS: dict[str, Problem] = {
    "cuda:90": GatherAttention(1, 64, 8, 128, 8192, "bf16", 2, layout="zigzag"),
    "cuda:100": GatherAttention(1, 16, 16, 64, 4096, "fp16", 4),
    "hip:gfx942": GatherAttention(1, 64, 8, 128, 8192, "bf16", 8, layout="zigzag"),
    "hip:gfx950": GatherAttention(2, 8, 8, 128, 4096, "fp16", 8, "none"),
}
BEHIND: dict[str, Problem] = {
    "cuda:90": AllReduceNorm(16, 8192, "bf16", 2, quant="block", k=4096),
    "cuda:100": AllReduceNorm(3, 264, "fp16", 4, "none", k=72),
    "hip:gfx942": AllReduceNorm(64, 5120, "bf16", 8, quant="row", k=2560),
}
"""Norms behind a product."""
BEHIND_CODES: dict[str, Problem] = {
    "cuda:90": AllReduceNorm(16, 8192, "bf16", 2, quant="row", k=4096, scales="row", quantize="row"),
    "cuda:100": AllReduceNorm(3, 272, "fp16", 4, "none", k=80, scales="tensor"),
    "hip:gfx942": AllReduceNorm(64, 5120, "bf16", 8, quant="block", k=2560, scales="block", quantize="block"),
}
"""Norms behind a product of e4m3."""
FEW_ROWS: dict[str, Problem] = {
    "cuda:90": GemmReduceScatter(64, 8192, 2560, "bf16", "replicated", 4, "kn"),
    "cuda:100": GemmReduceScatter(16, 7168, 768, "fp32", "scattered", 8),
}
# Each rank its own heads, of a cache in pages: what differs is how results are stored and how keys are addressed.
OPTIONS: dict[str, Problem] = {
    "cuda:90": FlashDecode(1, 64, 8, 128, 131072, "bf16", 4, "head_scatter", 16),
    "cuda:100": FlashDecode(3, 8, 1, 80, 9001, "fp32", 2, "head_scatter", 64),
    "hip:gfx942": FlashDecode(1, 64, 8, 128, 131072, "fp16", 8, "head_scatter", 16),
    "hip:gfx950": FlashDecode(16, 96, 12, 64, 4096, "bf16", 8, "head_scatter", 64),
}
# The other features of a cache and its query tokens.
FEATURES: dict[str, Problem] = {
    target: replace(OPTIONS[target], kv_dtype=kind, sinks="learned", window=1000, queries=3)
    for target, kind in zip(TARGETS, ("e4m3", "e4m3", "e4m3fnuz", "e4m3"), strict=True)
}


def some_configs(target: str, problem: Problem, variant: str) -> list[Config]:
    """The default, the last way to exchange results if there are several, and for one target a vendor one drawn at random."""
    space = space_for(problem, known_hardware(target))
    if variant in ("gather", "fine_grained"):  # but for the push, what `bsp` and `fused` are made of
        return [space.default(variant)]
    ways = [way for way in ways_to_exchange(space) if way.variant == variant]
    more = [drawn(space, variant, f"{target} {problem} {variant}")] if target in ("cuda:90", "hip:gfx942") else []
    return list(dict.fromkeys([space.default(variant), *more, *ways[-1:]]))


Job = tuple[str, Problem, Config]
JOBS: list[Job] = [
    (target, problems[target], config)
    for target in TARGETS
    for problems in (GEMMS, DECODES, REDUCTIONS, MERGES, GATHERS, NORMS, ATTENTIONS)
    for variant in space_for(problems[target], known_hardware(target)).variants
    for config in some_configs(target, problems[target], variant)
    if problems in (DECODES, MERGES, NORMS) or variant not in ("bsp", "heads", *named(problems[target].op).peers)  # none of ours
]
JOBS += [
    (target, problem, seed)
    for target, problem in FEW_ROWS.items()
    for seed in dict.fromkeys(
        next(seed for seed in space_for(problem, known_hardware(target)).variants["words"].seeds if seed["shots"] == shots)
        for shots in (("one", "two") if target == "cuda:90" else ("one",))
    )
]
JOBS += [
    (target, problem, config)
    for target, problem in BEHIND.items()
    for config in some_configs(target, problem, "fused")
]
JOBS += [
    (target, problem, config)
    for target, problem in BEHIND_CODES.items()
    for variant in (("scaled_fused", "scaled_one_shot") if target == "cuda:90" else ("scaled_fused",))
    if variant in space_for(problem, known_hardware(target)).variants
    for config in some_configs(target, problem, variant)
]
ONE_ROW = AllReduceNorm(1, 8192, "bf16", 2, k=4096, scales="block", quantize="block")
"""A norm behind a product of e4m3 for which every program quantises the row for itself."""
JOBS += [
    (target, ONE_ROW, next(seed for seed in space.seeds if seed["quantised"] == "within"))
    for target in ("cuda:90", "hip:gfx942")
    for space in (space_for(ONE_ROW, known_hardware(target)).variants["scaled_fused"],)
]
PACKETS = AllGatherGemm(64, 7168, 8192, "bf16", "m", 8)
"""A problem of `push_packets`. It also compiles on targets where the search uses `push_words` instead."""
JOBS += [
    (target, PACKETS, space_for(PACKETS, known_hardware(known)).default("push_packets"))
    for target, known in (("cuda:90", "cuda:100"), ("cuda:100", "cuda:100"), ("hip:gfx942", "hip:gfx942"))
]
BIG = AllGatherGemm(2048, 7168, 8192, "bf16", "m", 8)
"""A problem whose tiles fill an AMD GPU."""
JOBS += [(target, BIG, space_for(BIG, known_hardware(target)).default("push")) for target in TARGETS if target.startswith("hip")]
TWO: dict[str, Value] = {"block_m": 128, "block_n": 320, "num_warps": 8, "num_stages": 3, "splits": 1}
ONE_WAVE = AllGatherGemm(2048, 2560, 8192, "bf16", "m", 4)
"""A problem with tiles of two products."""
JOBS += [
    (target, ONE_WAVE, Config.of("push", space_for(ONE_WAVE, known_hardware(target)).default("push").values | TWO))
    for target in ("cuda:90", "hip:gfx950")
]
JOBS += [
    (target, problem, space_for(problem, known_hardware(target)).default(variant))
    for problems in (OPTIONS, FEATURES)
    for target, problem in problems.items()
    for variant in ("bsp", "resident" if target.startswith("cuda") else "fused")
]
JOBS += [
    (target, replace(DECODES["cuda:90"], kv_dtype=kind), Config.of("bsp", values | {"attend": attend}))
    for target, kind in (("cuda:90", "e4m3"), ("hip:gfx942", "e4m3fnuz"), ("hip:gfx950", "e4m3"))
    for values in (space_for(DECODES["cuda:90"], known_hardware(target)).default("bsp").values | {"block_s": 64},)
    for attend in ("by_block", "by_warp")
]
# Not for float32, which is what Blackwell has above.
JOBS += [
    (target, problem, space_for(problem, known_hardware(target)).default("compact"))
    for target, problem in (("cuda:90", OPTIONS["cuda:90"]), ("cuda:100", DECODES["hip:gfx950"]))
]


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    with pool_of_compilers() as pool:
        yield pool


@pytest.fixture(scope="module")
def compiling(compilers: Compilers, request: pytest.FixtureRequest) -> dict[Job, Future[list[Compiled]]]:
    """Starts the jobs of all selected tests at once."""
    selected = (getattr(item, "callspec", None) for item in request.session.items)
    jobs = (call.params["job"] for call in selected if call and "job" in call.params)
    return {job: compilers.submit(_compile, *job) for job in jobs}


def _kernels_of(job: Job) -> dict[str, tuple[str, str]]:
    """Each name of a variant for one target, and each operator for each vendor."""
    target, problem, config = job
    return {"variant": config.variant, "target": (problem.op, target.partition(":")[0]), "cache": problem.to_dict().get("sinks")}


@pytest.mark.sampled(by=_kernels_of)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-{job[2]}")
def test_compiles_within_shared_memory(compiling: dict[Job, Future[list[Compiled]]], job: Job) -> None:
    kernels = compiling[job].result()
    assert kernels
    for kernel in kernels:
        assert kernel.shared <= known_hardware(job[0]).shared_memory, kernel


@pytest.mark.volume
def test_attention_that_sends_spills_nothing_on_amd(compilers: Compilers) -> None:
    problem, hardware = ATTENTIONS["hip:gfx942"], known_hardware("hip:gfx942")
    config = space_for(problem, hardware).default("push")
    (kernel,) = compilers.submit(resources_offline, problem, config, hardware).result()
    assert (kernel.local, config["dies"]) == (0, 8)
    assert kernel.shared <= hardware.shared_memory


@pytest.mark.parametrize("mask", ["causal", "none"])
def test_keys_of_192_elements_fit_beside_values_of_128_and_hardly_spill(compilers: Compilers, mask: str) -> None:
    """The few words that spill are numbers of a tile, not accumulators: 80 to 152 bytes by Triton 3.6 to 3.9."""
    problem, hardware = GatherAttention(1, 16, 16, 192, 8192, "bf16", 2, mask, v_dim=128), known_hardware("cuda:90")
    config = space_for(problem, hardware).default("copy_engine")
    *_, kernel = compilers.submit(resources_offline, problem, config, hardware).result()
    assert kernel.kernel == "attend_kernel"
    assert kernel.shared <= hardware.shared_memory
    assert (kernel.local or 0) <= 160


@pytest.mark.volume
@pytest.mark.parametrize("target", ["cuda:90", *volume("hip:gfx942")])
def test_attention_with_windows_or_smaller_heads_of_v_spills_little(compilers: Compilers, target: str) -> None:
    usual, hardware = ATTENTIONS[target], known_hardware(target)
    for problem in (replace(usual, window=1024), replace(usual, head_dim=192, v_dim=128)):
        config = space_for(problem, hardware).default("push")
        (kernel,) = compilers.submit(resources_offline, problem, config, hardware).result()
        assert (kernel.local or 0) <= 96
        assert kernel.shared <= hardware.shared_memory


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942", *volume("cuda:100", "hip:gfx950")])
def test_a_binary_tells_what_it_takes_of_the_target(compilers: Compilers, target: str) -> None:
    problem = GEMMS[target]
    config = space_for(problem, known_hardware(target)).default("push")
    (kernel,) = compilers.submit(resources_offline, problem, config, known_hardware(target)).result()
    assert (kernel.kernel, kernel.shared > 0) == ("push_kernel", True)
    assert 32 < (kernel.registers or 0) <= (255 if target.startswith("cuda") else 512)
    assert kernel.local is not None


@pytest.mark.parametrize("variant", ["push_specialized", "push_one_shot", *volume("push", "pull_reduce", "words", "decomposed")])
def test_the_first_seeds_of_sums_spill_nothing_on_hopper(compilers: Compilers, variant: str) -> None:
    problem = FEW_ROWS["cuda:90"] if variant == "words" else REDUCTIONS["cuda:90"]
    if variant == "push_one_shot":
        problem = replace(problem, output="replicated", world_size=2)
    config = space_for(problem, known_hardware("cuda:90")).default(variant)
    kernels = compilers.submit(resources_offline, problem, config, known_hardware("cuda:90")).result()
    assert kernels
    most = 8 if variant == "push_one_shot" else 0  # two numbers that its adders read once a piece
    assert all((kernel.local or 0) <= most for kernel in kernels), kernels


@pytest.mark.parametrize("variant", ["words", *volume("compact")])
def test_the_first_seeds_of_merges_spill_nothing_on_hopper(compilers: Compilers, variant: str) -> None:
    for problem in (MERGES["cuda:90"], DecodeMerge(16, 64, 128, "bf16", 4)):
        config = space_for(problem, known_hardware("cuda:90")).default(variant)
        (kernel,) = compilers.submit(resources_offline, problem, config, known_hardware("cuda:90")).result()
        assert kernel.local == 0, (config, kernel)


@pytest.mark.timeout(900)  # it waits for what other tests have compiled
@pytest.mark.parametrize("attend", ["by_warp", pytest.param("by_block", marks=pytest.mark.volume)])
def test_a_cache_of_8_bits_is_copied_ahead_and_converted_once(compilers: Compilers, attend: str) -> None:
    """As many copies are in flight as for 16 bits, one instruction converts two numbers, and no register spills."""
    usual = DECODES["cuda:90"]
    problem = replace(usual, kv_dtype="e4m3")
    values = space_for(problem, known_hardware("cuda:90")).default("bsp").values | {"block_s": 64, "attend": attend}
    config = Config.of("bsp", values)
    wide, narrow = (compilers.submit(_listings, "cuda:90", case, config).result()["split_kernel"] for case in (usual, problem))
    waits = [re.findall(r"cp\.async\.wait_group\s+(\d+)", listing) for listing in (wide, narrow)]
    assert waits[0] == waits[1]
    assert waits[0][0] >= "2"
    once = 64 * 128 // 128 // 2  # of K or V, by 128 threads
    # Triton 3.8 keeps each number of one of them in two threads.
    times = 3 if attend == "by_warp" and str(triton_version()).startswith("3.8.") else 2
    assert narrow.count("cvt.rn.f16x2.e4m3x2") == times * once
    resources = compilers.submit(resources_offline, problem, config, known_hardware("cuda:90")).result()
    assert all(kernel.local == 0 for kernel in resources), resources


def test_merges_read_and_write_16_bytes_at_a_time(compilers: Compilers) -> None:
    """Narrower accesses would reach only a fraction of the bandwidth of memory and links."""
    problem = MERGES["cuda:90"]
    config = space_for(problem, known_hardware("cuda:90")).default("compact")
    listing = compilers.submit(_listings, "cuda:90", problem, config).result()["compact_merge_kernel"]
    assert "ld.global.v4.b32" in listing  # O
    assert "st.global.v2.b64" in listing  # words to the ranks
    assert "ld.volatile.global.v2.b64" in listing  # words that are polled
    assert re.search(r"st\.global\.v[24]\.b32", listing)  # the merged O
    assert "fence.acq_rel" not in listing


@pytest.fixture(scope="module")
def sending(compilers: Compilers) -> str:
    """PTX of `push` of GEMM + Reduce-Scatter for an H200."""
    problem = REDUCTIONS["cuda:90"]
    config = space_for(problem, known_hardware("cuda:90")).default("push")
    return compilers.submit(_listings, "cuda:90", problem, config).result()["push_kernel"]


def test_tiles_are_stored_at_their_owner_16_bytes_at_a_time(sending: str) -> None:
    widths = Counter(re.findall(r"st\.global\S*", sending))
    assert widths["st.global.v4.b32"] >= 16  # 128 x 256 elements of 16 bits by 256 threads
    assert set(widths) == {"st.global.v4.b32", "st.global.b32"}  # words: of notes, and of the control block
    assert "ld.global.v4.b32" in sending or "ld.global.v2.b64" in sending


def test_a_flat_loop_that_sends_is_pipelined_and_has_a_barrier_before_each_release(compilers: Compilers) -> None:
    """All threads have stored a tile before one of them raises its flag, though the source has no barrier there."""
    problem = REDUCTIONS["cuda:90"]
    space = space_for(problem, known_hardware("cuda:90"))
    config = Config.of("push", space.default("push").values | {"flat": 1, "signals": "late", "flag_tiles": 1, "splits": 1})
    assert config in space
    (kernel,) = compilers.submit(_compile, "cuda:90", problem, config).result()
    stage = (config["block_m"] + config["block_n"]) * config["block_k"] * problem.item_size
    assert kernel.shared >= config["num_stages"] * stage
    listing = compilers.submit(_listings, "cuda:90", problem, config).result()["push_kernel"]
    instructions = re.findall(r"st\.global\.v4|bar\.sync|\.exch\.b32|\.sys\.release\.add", listing)
    releases = [at for at, what in enumerate(instructions) if what == ".sys.release.add"]
    assert releases
    for at in releases:
        exchange = max(before for before in range(at) if instructions[before] == ".exch.b32")
        assert "bar.sync" in instructions[exchange:at]
        assert "st.global.v4" not in instructions[exchange:at]


def test_the_gemm_that_sends_is_pipelined(compilers: Compilers, sending: str) -> None:
    """All stages are in shared memory, and the kernel waits for products one after the other."""
    problem = REDUCTIONS["cuda:90"]
    config = space_for(problem, known_hardware("cuda:90")).default("push")
    (kernel,) = compilers.submit(_compile, "cuda:90", problem, config).result()
    stage = (config["block_m"] + config["block_n"]) * config["block_k"] * problem.item_size
    assert kernel.shared >= config["num_stages"] * stage
    assert "wgmma.mma_async" in sending


@pytest.fixture(scope="module")
def listing_of_sums(compilers: Compilers) -> Callable[[str], str]:
    """The PTX of warps with roles that send partial sums, by who adds them up."""
    problem = REDUCTIONS["cuda:90"]
    usual = space_for(problem, known_hardware("cuda:90")).default("push_specialized").values

    def listing(adds: str) -> str:
        config = Config.of("push_specialized", usual | {"adds": adds})
        return str(compilers.submit(_listings, "cuda:90", problem, config).result()["push_specialized_kernel"])

    return listing


@pytest.mark.parametrize("adds", ["warps", "epilogue"])
def test_warps_that_send_tell_of_a_tile_when_it_is_written(listing_of_sums: Callable[[str], str], adds: str) -> None:
    problem, listing = REDUCTIONS["cuda:90"], listing_of_sums(adds)
    instructions = re.findall(
        r"cp\.async\.bulk\.wait_group(?!\.read)|fence\.proxy\.async;|fence\.acq_rel\.sys|atom\.global\.sys\.relaxed\.exch",
        listing,
    )
    wait = instructions.index("cp.async.bulk.wait_group")
    assert instructions[wait + 1 : wait + 4] == ["fence.proxy.async;", "fence.acq_rel.sys", "atom.global.sys.relaxed.exch"]
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.global\.shared", listing)) == 2 * problem.world_size  # of 64 columns


def test_an_epilogue_that_adds_finds_what_peers_have_sent_in_shared_memory(listing_of_sums: Callable[[str], str]) -> None:
    problem, listing = REDUCTIONS["cuda:90"], listing_of_sums("epilogue")
    assert not re.findall(r"ld\.global\.cg", listing)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared::\w+\.global", listing)
    config = space_for(problem, known_hardware("cuda:90")).default("push_specialized")
    parts, groups = config["block_n"] // 128, config["block_m"] // 64
    assert len(loads) == 2 * parts * groups * (problem.world_size - 1)


def test_warps_that_add_read_16_bytes_at_a_time(listing_of_sums: Callable[[str], str]) -> None:
    problem, listing = REDUCTIONS["cuda:90"], listing_of_sums("warps")
    # Adders bypass the L1, which misses the stores of peers. All of them have seen a phase before the poller may end the next.
    reads = re.findall(r"ld\.global\.cg\.\S+", listing)
    assert set(reads) == {"ld.global.cg.v4.b32"}
    assert len(reads) == 4 * problem.world_size
    adders = listing[: listing.index("ld.global.cg")]
    steps = re.findall(r"bar\.sync|mbarrier\.\w+", adders)
    last = len(steps) - 1 - steps[::-1].index("mbarrier.try_wait")
    assert set(steps[last + 1 : -1]) == {"bar.sync"}  # from Triton 3.8 on an arrival brings one of its own
    assert steps[-1] == "mbarrier.arrive"
    assert len(re.findall(r"st\.global\.v4\.b32", listing)) == 4


@pytest.mark.parametrize(("target", "variant"), [("cuda:90", "push_specialized"), ("hip:gfx942", "decomposed")])
def test_a_bias_and_a_residual_are_arguments_where_they_are_added_alone(
    compilers: Compilers, target: str, variant: str
) -> None:
    without, added = compilers.submit(_addends_of, target, REDUCTIONS[target], variant).result()
    assert without == set()
    assert added == {"bias", "residual", "added"}


def _compile_smaller(problem: Problem, variant: str, smaller: Problem, sizes: dict[str, tuple[int, ...]]) -> list[Compiled]:
    """Rehearses a call of a smaller problem with addends of these sizes, by the kernel of a problem."""
    fix_cache_keys()
    hardware, nobody = known_hardware("cuda:90"), None
    world = World(0, problem.world_size, "meta", META, nobody, nobody, nobody)  # type: ignore[arg-type]
    config = Config(variant) if variant.startswith("nccl") else space_for(problem, hardware).default(variant)
    kernel = prepare(problem, config, Context(world, MetaHeap(world, 1 << 40), hardware))
    call, fit = make_inputs(smaller, 0, 0, META), kernel.fitted(smaller)
    assert fit is not None
    with pretend(hardware.target), kernel.context.rehearsal() as compiled:
        fit(*call.tensors, call.out, **{name: call.out.new_empty(size) for name, size in sizes.items()})
    return compiled


@pytest.mark.parametrize("variant", ["copy_engine", "decomposed"])
def test_fewer_sequences_and_tokens_are_attended_by_the_kernel_of_more(compilers: Compilers, variant: str) -> None:
    """The second slot of an inbox begins where it does for all tokens, which no box of both slots can tell."""
    usual = GatherAttention(2, 8, 2, 128, 2048, "bf16", 2, layout="zigzag")
    for problem in (usual, replace(usual, head_dim=192, v_dim=128)):
        for smaller in (replace(problem, batch=1), replace(problem, seq_len=1024)):
            assert compilers.submit(_compile_smaller, problem, variant, smaller, {}).result()


@pytest.mark.parametrize("variant", ["nccl_ll", "nccl_ll128"])
def test_a_baseline_with_a_protocol_adds_what_calls_bring(compilers: Compilers, variant: str) -> None:
    problem = GemmReduceScatter(64, 256, 512, "bf16", "replicated", 2)
    compilers.submit(_compile_smaller, problem, variant, problem, {"bias": (256,), "residual": (64, 256)}).result()


@pytest.fixture(scope="module")
def push(compilers: Compilers) -> str:
    """PTX of `push` for an H200."""
    problem = GEMMS["cuda:90"]
    config = space_for(problem, known_hardware("cuda:90")).default("push")
    return compilers.submit(_listings, "cuda:90", problem, config).result()["push_kernel"]


def test_remote_copies_are_16_bytes_wide(push: str) -> None:
    """Narrower copies would reach a fraction of the links' bandwidth."""
    widths = Counter(re.findall(r"st\.global\S*", push))
    assert widths["st.global.v4.b32"] >= 4
    # Words only: four of the note of a wait that gave up, once for each pipeline stage; the control block at the end of a
    # call; the count of a tile's parts.
    assert set(widths) == {"st.global.v4.b32", "st.global.b32"}
    assert widths["st.global.b32"] <= 17


def test_flags_are_signalled_and_polled_across_the_system(push: str) -> None:
    assert re.search(r"(atom|red)\.global\.sys\.release\.add\.u32", push)  # from Triton 3.9 on what returns nothing is a `red`
    assert "ld.global.sys.acquire.b32" in push or "atom.global.sys.acquire.add.u32" in push
    assert not re.search(r"global\.(gpu|cta)\.acquire", push)


def test_a_wait_polls_in_a_loop(push: str) -> None:
    """A compiler that treated the poll as an ordinary load would move it out of its loop."""
    lines = push.splitlines()
    polls = [number for number, line in enumerate(lines) if ".global.sys.acquire." in line]
    tight = [(first, last) for first, last in _loops(lines) if 0 < last - first < 80]
    assert any(first < poll < last for poll in polls for first, last in tight)


@pytest.fixture(scope="module")
def specialized(compilers: Compilers) -> str:
    """PTX of `push_specialized` for an H200, with tiles of three parts that lie across shards."""
    problem = AllGatherGemm(256, 7168, 8192, "bf16", "m", 4)
    usual = space_for(problem, known_hardware("cuda:90")).default("push_specialized").values
    config = Config.of("push_specialized", usual | {"block_m": 128, "block_n": 224, "num_stages": 4})
    assert config in space_for(problem, known_hardware("cuda:90"))
    return compilers.submit(_listings, "cuda:90", problem, config).result()["push_specialized_kernel"]


def test_a_box_is_counted_when_it_is_written_at_every_peer_and_the_last_one_signalled(specialized: str) -> None:
    """A wait for what has been read (`.read`) is not enough, and counts and signals belong to the other proxy."""
    instructions = re.findall(
        r"cp\.async\.bulk\.tensor\.2d\.global|cp\.async\.bulk\.wait_group(?!\.read)|fence\.proxy\.async;|fence\.acq_rel\.sys"
        r"|atom\.global\.gpu\.acq_rel\.add|atom\.global\.sys\.relaxed",
        specialized,
    )
    first = next(at for at, what in enumerate(instructions) if what == "cp.async.bulk.wait_group")
    written = [*["cp.async.bulk.tensor.2d.global"] * 3, "cp.async.bulk.wait_group", "fence.proxy.async;"]
    signals = ["atom.global.gpu.acq_rel.add", "fence.acq_rel.sys", *["atom.global.sys.relaxed"] * 3]
    assert instructions[first - 3 : first + 7] == [*written, *signals]


def test_a_poller_polls_in_loops_and_fences_what_is_then_read_by_the_other_proxy(specialized: str) -> None:
    lines = specialized.splitlines()
    polls = [number for number, line in enumerate(lines) if "ld.acquire.sys.global" in line]
    tight = [(first, last) for first, last in _loops(lines) if 0 < last - first < 120]
    assert sum(any(first < poll < last for first, last in tight) for poll in polls) >= 2  # of two shards
    assert len(re.findall(r"fence\.proxy\.async;", specialized)) == 4  # words, two shards, the sender


def test_words_are_whole_and_polled_in_a_loop(specialized: str) -> None:
    """A thread issues the loads of its four words before it tests any of them."""
    lines = [line.strip() for line in specialized.splitlines()]
    polls = [number for number, line in enumerate(lines) if "ld.relaxed.sys.global.v2.b64" in line]
    begin, end = lines.index("AGAIN:"), next(number for number, line in enumerate(lines) if line.endswith("bra AGAIN;"))
    first_look = next(number for number, line in enumerate(lines) if number > begin and line.startswith("setp.ne.b64"))
    assert len(polls) == 4
    assert begin < polls[0] <= polls[-1] < first_look < end
    assert len([line for line in lines if "st.relaxed.sys.global.v2.b64" in line]) == 3 + 4  # to peers; and what is left


def test_warps_with_roles_take_no_more_shared_memory_than_is_counted(compilers: Compilers) -> None:
    """Uses the greatest number of barriers: one or two for each K group and stage."""
    problem = AllGatherGemm(256, 2560, 8192, "bf16", "m", 4)
    usual = space_for(problem, known_hardware("cuda:90")).default("push_specialized").values
    config = Config.of("push_specialized", usual | {"block_m": 64, "block_n": 80, "num_stages": 8, "k_groups": 32})
    assert config in space_for(problem, known_hardware("cuda:90"))
    (kernel,) = compilers.submit(_compile, "cuda:90", problem, config).result()
    assert kernel.shared <= shared_bytes(64, 80, 8, boxes=1)


def test_the_widest_tile_of_codes_has_room_for_four_stages_and_two_boxes(compilers: Compilers) -> None:
    problem, hardware = AllGatherGemm(2048, 28672, 8192, "e4m3", "m", 2, scales="row"), known_hardware("cuda:90")
    widest = {"block_m": 128, "block_n": 256, "num_stages": 4, "strip": 256, "boxes": 2, "k_groups": 32}
    config = Config.of("scaled_specialized", space_for(problem, hardware).default("scaled_specialized").values | widest)
    assert config in space_for(problem, hardware)
    (kernel,) = compilers.submit(_compile, "cuda:90", problem, config).result()
    assert kernel.shared <= shared_bytes(128, 256, 4, boxes=2, staged=64) <= hardware.shared_memory


def test_few_rows_take_no_more_shared_memory_than_is_counted(compilers: Compilers) -> None:
    problem = AllGatherGemm(16, 7168, 8192, "bf16", "m", 4)
    config = Config.of("push_words", block_m=16, block_n=64, block_k=64, num_stages=20, k_groups=8)
    assert config in space_for(problem, known_hardware("cuda:90"))
    (kernel,) = compilers.submit(_compile, "cuda:90", problem, config).result()
    assert kernel.shared <= shared_bytes(16, 64, 20, block_k=64)


@pytest.fixture(scope="module", params=["resident", "compact"])
def resident(compilers: Compilers, request: pytest.FixtureRequest) -> str:
    """PTX for an H200 of each variant whose programs must all run at the same time."""
    problem = DECODES["cuda:90"]
    config = space_for(problem, known_hardware("cuda:90")).default(request.param)
    return compilers.submit(_listings, "cuda:90", problem, config).result()[f"{request.param}_kernel"]


def test_words_are_polled_in_loops_that_vote(resident: str) -> None:
    """Each poll loads its words anew, and all warps take the same decision on them."""
    lines = resident.splitlines()
    loops = [(first, last) for first, last in _loops(lines) if 0 < last - first < 250]
    polling = [lines[first:last] for first, last in loops if any("ld.volatile.global" in line for line in lines[first:last])]
    assert len(polling) >= 2  # for the splits and for the ranks
    assert all(any("bar.red.or.pred" in line for line in loop) for loop in polling)


def test_keys_of_a_paged_cache_are_asked_for_as_far_ahead_as_others(compilers: Compilers) -> None:
    """If their addresses came from a load of the same step, the pipeline would be half as deep: a wait would leave none open."""
    usual = DECODES["cuda:90"]
    config = space_for(usual, known_hardware("cuda:90")).default("bsp")
    open_copies = []
    for problem in (usual, OPTIONS["cuda:90"]):
        listing = compilers.submit(_listings, "cuda:90", problem, config).result()["split_kernel"]
        open_copies.append((re.findall(r"cp\.async\.wait_group\s+(\d+)", listing), listing.count("cp.async.cg")))
    assert open_copies[0] == open_copies[1]
    assert open_copies[0][0][0] >= "2"


def test_a_block_of_a_page_takes_one_page_number_and_no_load_of_a_byte(compilers: Compilers) -> None:
    """In an 8-bit cache all keys and values are copied in advance, and V is read from shared memory two columns at a time."""
    problem = FlashDecode(64, 64, 8, 128, 8192, "bf16", 1, page=16, kv_dtype="e4m3")
    config = space_for(problem, known_hardware("cuda:90")).default("bsp")
    assert config["attend"] == "by_head"
    lines = compilers.submit(_listings, "cuda:90", problem, config).result()["split_kernel"].splitlines()
    (step,) = [lines[first:last] for first, last in _loops(lines) if any("mma.sync" in line for line in lines[first:last])]
    assert sum("ld.global" in line for line in step) == 1
    assert sum("cp.async.cg" in line for line in step) == 2 * 4 * 16 * 128 // 16 // 128  # K and V of four heads, 128 threads
    assert not any(re.search(r"ld\.shared\.[bu]8", line) for line in step)
    resources = compilers.submit(resources_offline, problem, config, known_hardware("cuda:90")).result()
    assert all(kernel.local == 0 for kernel in resources), resources


def test_words_need_no_fence_and_are_stored_whole(resident: str) -> None:
    assert "fence.acq_rel" not in resident
    assert not re.search(r"(atom|red)\.global\.sys", resident)
    assert "st.global.v2.b64" in resident or "st.global.b64" in resident


def test_a_launch_that_overlaps_touches_no_memory_before_the_kernel_ahead_is_done(resident: str) -> None:
    before, waits, after = resident.partition("griddepcontrol.wait")
    memory = re.compile(r"^[^/]*(\b(ld|st|atom|red)\.(volatile\.)?global|\bcp\.async|\bprefetch)", re.MULTILINE)
    assert waits
    assert "bra" not in before.partition(".entry")[2], "every program waits"
    assert not memory.search(before)
    assert memory.search(after)


def test_launches_before_hopper_do_not_overlap() -> None:
    hardware = replace(known_hardware("cuda:90"), target="cuda:80")
    assert not hardware.launches_overlap
    assert known_hardware("cuda:100").launches_overlap
    assert not any(known_hardware(target).launches_overlap for target in TARGETS if target.startswith("hip"))


AT_ONCE = ("resident", "compact", "words", "two_kernel_words")
SMALL = (
    DecodeMerge(1, 16, 128, "bf16", 2, "head_scatter"),
    DecodeMerge(3, 12, 80, "bf16", 3),
    FlashDecode(1, 64, 8, 128, 8192, "bf16", 2),
    FlashDecode(3, 12, 4, 80, 1001, "bf16", 2, "head_scatter"),
    FlashDecode(2, 6, 2, 16, 1001, "fp32", 3),
    GemmReduceScatter(64, 1024, 256, "bf16", "replicated", 4),
)


@pytest.mark.parametrize(
    ("problem", "every"), [(SMALL[0], False), (SMALL[-1], False), *volume(*((problem, True) for problem in SMALL))], ids=str
)
def test_words_that_are_voted_on_are_the_ones_that_are_used(
    compilers: Compilers, problem: Problem, every: bool
) -> None:
    """Triton 3.6 makes two loads of one, each of another moment, of tiles with fewer words than there are threads: none has."""
    space = space_for(problem, known_hardware("cuda:90"))
    ways = {*map(space.default, space.variants), *(ways_to_exchange(space) if every else ())}
    ways = {way for way in ways if way.values.get("protocol", "ll" if way.variant in AT_ONCE else "flags") == "ll"}
    wide = {Config.of(way.variant, way.values | {"num_warps": 8}) for way in ways if way.variant in AT_ONCE}
    compiled = [compilers.submit(_polled, "cuda:90", problem, way) for way in ways | wide if way in space]
    assert len(compiled) >= 2
    config = space_for(PACKETS, known_hardware("cuda:100")).default("push_packets")
    if problem == SMALL[0]:
        most = Config.of(config.variant, config.values | {"num_warps": 8})
        compiled.append(compilers.submit(_polled, "cuda:90", PACKETS, most))
    for future in compiled:
        written, made, slack = future.result()
        assert made == written > 0
        assert slack >= 0


# Functions that the compiler processes run.


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """The first and last line of each backward jump."""
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(r"(\$\S+):", line))}
    jumps = [(number, match[1]) for number, line in enumerate(lines) if (match := re.search(r"\bbra\S*\s+(\$\S+);", line))]
    return [(labels[label], number) for number, label in jumps]


def _compile(target: str, problem: Problem, config: Config) -> list[Compiled]:
    return compile_offline(problem, config, known_hardware(target))


def _polled(target: str, problem: Problem, config: Config) -> tuple[int, int, int]:
    """Counts polling loads in TTIR and in TTGIR; also returns the least surplus of words over threads."""
    load = re.compile(r"tt\.load .*isVolatile = true.*tensor<((?:\d+x)+)")
    counts, slack = [0, 0], []

    class Counting(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            for place, stage in enumerate(("ttir", "ttgir")):
                tiles = [math.prod(map(int, shape.split("x")[:-1])) for shape in load.findall(binary.asm[stage])]
                counts[place] += len(tiles)
                slack.extend(words - 32 * binary.metadata.num_warps for words in tiles)

    compile_offline(problem, config, known_hardware(target), Counting)
    return counts[0], counts[1], min(slack)


def _addends_of(target: str, problem: Problem, variant: str) -> tuple[set[str], set[str]]:
    """The kernel arguments among bias, residual and `added`: of a call without addends, and of a call with them."""
    nobody: Any = None
    signatures: list[str] = []

    class Listing(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            signatures.extend(re.findall(r"tt\.func public @.*", binary.asm["ttgir"]))

    fix_cache_keys()
    hardware, world = known_hardware(target), World(0, problem.world_size, "meta", META, nobody, nobody, nobody)
    context = Listing(world, MetaHeap(world, 1 << 40), hardware)
    kernel = prepare(problem, space_for(problem, hardware).default(variant), context)
    call = make_inputs(problem, 0, 0, META)
    counts = []
    for more in ((), (call.out.new_empty(call.out.shape[1:]), torch.empty_like(call.out))):
        signatures.clear()
        with pretend(target), context.rehearsal():
            kernel(*call.tensors, call.out, *more)
        counts.append(set(re.findall(r"%(bias|residual|added)\b", " ".join(signatures))))
    return counts[0], counts[1]


def _listings(target: str, problem: Problem, config: Config) -> dict[str, str]:
    """The PTX of each kernel."""
    listings: dict[str, str] = {}

    class Listing(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            listings[kernel.__name__] = binary.asm["ptx"]

    compile_offline(problem, config, known_hardware(target), Listing)
    return listings
