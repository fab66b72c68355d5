"""What many ranks import once their tests run: the server that forks the ranks imports it before, once for all of them."""

import torch._dynamo
import torch._functorch.aot_autograd
import torch.distributed.tensor.parallel  # noqa: F401 - only its effect is needed
