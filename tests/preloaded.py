"""Imports that many ranks need once their tests run. The server that forks the ranks makes them once for all."""
# ruff: noqa: F401 - of most modules only the effect is needed

import gc
from contextlib import suppress

import functorch.compile
import hypothesis
import pytest
import sqlalchemy.orm
import torch
import torch.distributed.tensor.parallel

import autotax.db
from autotax.digests import kernel_digest
from autotax.heap import triton_interpreter
from autotax.nn import prepare
from autotax.operators.registry import declared, load_built_in

torch.compiler.reset()  # imports the compiler
load_built_in()
for operator in declared.values():
    for variant in operator.variants.values():
        with suppress(ImportError):  # a Triton for ROCm may lack modules that variants for NVIDIA import
            variant.kernel_class()
kernel_digest()

# Ranks are more than cores here, so one that waits should leave them to the others sooner and for longer than users want.
triton_interpreter.AT_ONCE, triton_interpreter.PAUSE_S = 8, 5e-4
triton_interpreter.CPU_POLLS_PER_S = prepare.CPU_POLLS_PER_S = 1600

gc.collect()
gc.freeze()  # objects that all forks share are never garbage; scanning them when a heap closes took a quarter of a second
