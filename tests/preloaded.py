"""What many ranks import once their tests run: the server that forks the ranks imports it before, once for all of them."""

import gc

import functorch.compile  # noqa: F401 - only its effect is needed
import torch
import torch.distributed.tensor.parallel

torch.compiler.reset()  # imports the compiler

gc.collect()
gc.freeze()  # what all forks share is never garbage: a collection of a heap that closes took a quarter of a second to say so
