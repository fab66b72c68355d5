"""Search space of `resident`: the attention core, and the number of programs, which all run at once."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.problem import power_of_two
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import (
    attention_constraints,
    attention_parameters,
    attention_seeds,
    by_head,
    head_choices,
    heads_fit,
    heads_together,
    pipeline_fits,
    protocols,
    shared_among,
)


def all_at_once(name: str, problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """The space of `resident` or `compact`. It adds the number of merging programs that share a row, and the programs per
    processor. All programs run at once, so the programs of a processor must fit together; a kernel takes at most 255 registers
    per thread.
    """
    heads: dict[str, tuple[Value, ...]] = {"heads": tuple(head_choices(problem))}
    shared = shared_among(problem, hardware.processors)
    cut = power_of_two(problem.head_dim) == problem.head_dim >= 32
    own: dict[str, tuple[Value, ...]] = {"parts": (1, 2) if cut else (1,), "per_processor": (1, 2) if hardware.on_gpu else (1,)}
    of_heads = Constraint(
        ("attend", "block_s", "num_warps", "num_stages", "per_processor"),
        lambda *shape: heads_fit(problem, hardware, *shape),
        "the pipelines of all heads of a processor's programs do not fit in its shared memory",
    )
    constraints = (
        *attention_constraints(problem, hardware),
        Constraint(
            ("block_s", "num_stages", "per_processor"),
            lambda s, stages, programs: programs == 1 or pipeline_fits(problem, hardware, s, stages, programs),
            "the pipelines of a processor's programs do not fit in its shared memory",
        ),
        *((of_heads,) if by_head(problem, hardware) else ()),
        Constraint(
            ("num_warps", "per_processor"),
            lambda warps, programs: programs * warps <= 8,
            "the programs of a processor do not fit in its registers",
        ),
    )
    alone: dict[str, Value] = shared | {"parts": 1, "per_processor": 1}
    seeds = attention_seeds(problem, hardware)
    values = [seed | alone for seed in seeds[:3]]
    if hardware.on_gpu:  # second seeds: two programs per processor, so that one loads while the other computes
        several = problem.batch * problem.kv_heads // heads_together(seeds[0]) * int(seeds[0]["splits"]) > hardware.processors
        # With more pieces than processors the splits stay, and a program handles several pieces one after the other. Else the
        # splits are doubled: one piece per program, half as long.
        halves = [seed for seed in seeds if int(seed["block_s"]) <= 64 and seed["num_warps"] == (4 if several else 2)][:1]
        parts = own["parts"] if several else own["parts"][-1:]
        more: list[dict[str, Value]] = [{"parts": n, "num_stages": 3, "per_processor": 2} for n in parts]
        pair = [alone | seed | each for seed in halves for each in more]
        blocks = [int(seed["block_s"]) * heads_together(seed) for seed in pair]
        values[1:1] = [seed for seed, block in zip(pair, blocks, strict=True) if pipeline_fits(problem, hardware, block, 3, 2)]
    configs = tuple(dict.fromkeys(Config.of(name, found) for found in values))
    return VariantSpace(name, attention_parameters(problem, hardware) | heads | own, constraints, configs)


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where LL packets are not allowed."""
    return all_at_once("resident", problem, hardware) if "ll" in protocols(problem) else None
