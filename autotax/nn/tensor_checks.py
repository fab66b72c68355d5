"""Checks of all tensors that modules accept: kernels read and write plain memory, and a torch tensor can be more than that.

Two kinds of input tensors are resolved: views that torch negates or conjugates lazily, and results of functional collectives
before a wait. Every other tensor without plain memory is refused in one line, independent of the kernel that would run. A call
of known shapes tests for all of this in one cheap expression, and comes here only if that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter, is_lazy

from autotax.core.errors import UsageError

TENSOR_GUARDS: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
"""A private class of torch; without it calls compare tensors in Python."""
VECTOR_BYTES = 16
"""Kernels rely on this alignment of the first byte of a tensor."""
PLAIN = (Tensor, Parameter)
"""Classes whose tensors have exactly the values in their memory."""
FREED = 1 << 33
"""A tensor whose storage was freed begins at its offset, below this address. Such an address needs a further check."""
IN_OPS = 2
"""Marks calls within torch.ops: their dispatch keys differ from those of eager calls, so FlashDecode keeps tests for both."""
WRITTEN = "out", "merged_lse", "residual_out", "scales_out"
"""Names of tensors that calls write."""
NEEDED = "x", "weight", "q", "k_shard", "v_shard", "kv_lens", "o", "lse"
"""Names of tensors that calls cannot do without."""
NO_TANGENTS = "a tensor has a tangent of forward-mode differentiation, which has no rule here: give unpack_dual(tensor).primal"
TRACED = "is in a call that a tracer records (torch.jit.trace, make_fx), which does not see kernels: use torch.compile or export"
PROXY = torch._C._TorchDispatchModeKey.PROXY
active_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes, such as tracers. Guards do not see modes, so calls within one get the full checks."""
TRANSFORMED = "a transform of torch.func (vmap, jvp ...) calls this, which has no rule for it: call it outside"


def plain(name: str, tensor: Tensor) -> Tensor:
    """A tensor to read, with its values in its own memory.

    Args:
        name: the word for the tensor in a message.
        tensor: of any shape, type and device.

    Returns:
        The tensor itself where that is possible. For a view that torch negates or conjugates lazily, a copy, enqueued on the
        current stream. For an unwaited result of a functional collective, the delivered tensor after a wait.

    Raises:
        UsageError: the values lie elsewhere, or in another form.
    """
    if torch._C._get_tracing_state() is not None or torch._C._get_dispatch_mode(PROXY) is not None:
        raise UsageError(f"{name} {TRACED}")
    if type(tensor) not in PLAIN and isinstance(tensor, Tensor):
        tensor = _unwrapped(tensor)
    if type(tensor) in PLAIN and not _unlike_memory(tensor):
        if tensor._is_zerotensor():
            tensor = tensor.clone()
        tensor = tensor.resolve_conj().resolve_neg()
    require_plain(name, tensor)
    return tensor


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that a collective delivers, or the plain tensor of a class that changes no operator; else the same tensor."""
    if _awaitable(tensor):
        delivered: Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
        return delivered if type(delivered) in PLAIN else _unwrapped(delivered)
    return tensor if _changes_operators(tensor) else tensor.as_subclass(Tensor)


def _awaitable(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a functional collective, which the first operator on it waits for."""
    if not dist.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(tensor, AsyncCollectiveTensor)


def _changes_operators(tensor: Tensor) -> bool:
    """Whether the class of a tensor changes operators, so that its memory alone does not determine its values.

    The weights of serving engines are Parameters with a `__torch_function__`; their values are those in their memory.
    """
    kind = type(tensor)
    if is_lazy(tensor) or getattr_static(kind, "__torch_dispatch__") is not getattr_static(Tensor, "__torch_dispatch__"):
        return True
    defaults = getattr_static(Tensor, "__torch_function__"), torch._C._disabled_torch_function_impl
    return not issubclass(kind, Parameter) and getattr_static(kind, "__torch_function__") not in defaults


def _unlike_memory(tensor: Tensor) -> str:
    """Describes a tensor that is no array in memory, and the tensor to give instead; empty for an array in memory."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return TRANSFORMED
    if torch._is_functional_tensor(tensor):
        return "{name} is functionalized; kernels read memory: give the tensor outside of torch.func.functionalize"
    if tensor.is_nested:
        return "{name} is a nested tensor; kernels read arrays: give nested.to_padded_tensor(0.0), or its values()"
    if tensor.layout is not torch.strided:
        return f"{{name}} is laid out as {tensor.layout}; kernels read dense tensors: give a to_dense()"
    return ""


def require_plain(name: str, tensor: Tensor) -> None:
    """Raises UsageError unless a tensor has exactly the values in its memory: for a tensor to write, and after `plain`."""
    require_values(name, tensor)
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        raise UsageError(
            f"{name} is a view that torch negates or conjugates when it is read; kernels write memory as it is: give a clone()"
        )
    require_memory(name, tensor)


def require_values(name: str, tensor: Tensor) -> None:
    """Raises UsageError unless a tensor has the values in its memory, perhaps lazily negated or conjugated."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor: give one")
    kind = type(tensor)
    if kind not in PLAIN and is_lazy(tensor):
        raise UsageError(f"{name} is {_a(kind.__name__)}, which has no values yet; kernels need them: initialize it first")
    if kind not in PLAIN and _changes_operators(tensor):
        raise UsageError(
            f"{name} is {_a(kind.__name__)}; kernels need a plain torch.Tensor: give what it wraps, of a DTensor to_local()"
        )
    if why := _unlike_memory(tensor):
        raise UsageError(why.replace("{name}", name))


def require_recordable(**tensors: Tensor | None) -> None:
    """Raises UsageError for a tensor of a call that torch records: torch resolves all other tensors itself."""
    for name, tensor in tensors.items():
        if tensor is not None and not _awaitable(tensor):
            require_values(name, tensor)
            if tensor.is_meta:  # torch would run the operator without values, and return memory as it was
                raise UsageError(f"{name} is on the meta device; kernels need values: give a tensor on the module's device")


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def require_memory(name: str, tensor: Tensor) -> None:
    """Raises UsageError if the storage of a tensor is smaller than the tensor, because it was freed."""
    if tensor.is_meta or not tensor.numel():
        return
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size, needed = tensor.untyped_storage().nbytes(), (last + 1) * tensor.itemsize
    if size < needed:
        raise UsageError(
            f"{name} ends at byte {needed} of a storage of {size} bytes; its memory was freed or resized: "
            "bring it back before the call, as FSDP does within the forward of the module that it wraps"
        )


def require_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError unless a tensor passes `require_plain`, has this type and shape, and is contiguous and aligned."""
    require_plain(name, tensor)
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        described = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise UsageError(f"{name} is {described}; it must be {dtype} {list(shape)} on {device}: give such a tensor")
    if not usable(tensor):
        raise UsageError(
            f"{name} is not contiguous or does not begin at a multiple of {VECTOR_BYTES} bytes; kernels need both: "
            "give a clone(memory_format=torch.contiguous_format)"
        )


def usable(tensor: Tensor) -> bool:
    """Whether kernels can use a tensor in its present layout."""
    return tensor.is_contiguous() and not tensor.data_ptr() % VECTOR_BYTES


def ready(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, ordinal: int) -> bool:
    """Whether kernels can use a tensor as it is: the cheap test that a call makes; `ordinal` is `ordinal_of` the device."""
    return (
        tensor.__class__ in PLAIN
        and tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.get_device() == ordinal
        and tensor.is_contiguous()
        and (start := tensor.data_ptr()) > FREED
        and not start % VECTOR_BYTES
        and not tensor.is_neg()
    )


def alike(*tensors: Tensor) -> Callable[..., bool]:
    """Makes a test for tensors like these, which passed the checks of a call; it costs 0.1 to 0.3 us.

    The test belongs to the guards of torch.compile: one call in C++ compares class, type, device, shape, strides and dispatch
    keys of all tensors, and lazily negated, conjugated and zero tensors have keys of their own. It does not look at addresses.
    It aborts the process for tensors without strides: test before that `is_nested` is false and `data_ptr()` raises nothing.

    Returns:
        A function of as many tensors. True means that they are like these. False means nothing: the full checks must decide.
    """
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    if TENSOR_GUARDS is not None and len({id(tensor) for tensor in tensors}) == len(tensors):  # guards refuse one tensor twice
        test: Callable[..., bool] = TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return test
    layouts = [_layout(tensor) for tensor in tensors]
    return lambda *others: [_layout(tensor) for tensor in others] == layouts


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    kind, layout = tensor.__class__, tensor.layout
    if kind not in PLAIN or layout is not torch.strided:
        return kind, layout
    return kind, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg()


class Accepted:
    """The two latest kinds of tensors that a call accepted after full checks.

    Two, because calls within torch.ops, under autocast or in inference mode have other dispatch keys than plain eager calls.
    """

    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first: Callable[..., bool] = never
        self.second: Callable[..., bool] = never

    def add(self, *tensors: Tensor) -> None:
        self.first, self.second = alike(*tensors), self.first


def never(*_: Tensor) -> bool:
    return False


def small(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Converts a small tensor for kernels: under autocast to the module's type, and by a copy to a contiguous layout."""
    tensor = plain(name, tensor)
    if tensor.device != device:
        return tensor
    if tensor.dtype is not dtype and tensor.is_floating_point() and torch.is_autocast_enabled(device.type):
        tensor = tensor.to(dtype)
    return tensor if usable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def addend(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor to add, of any layout, with its values in its own memory. Raises UsageError for another shape, type or device."""
    tensor = plain(name, tensor)
    if tensor.dtype is not like.dtype and torch.is_autocast_enabled(like.device.type):
        tensor = tensor.to(like.dtype)
    if tensor.shape != shape or tensor.dtype is not like.dtype or tensor.device != like.device:
        described = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        allowed = f"{like.dtype} {list(shape)} on {like.device}"
        raise UsageError(f"{name} is {described}; it must be {allowed}: give such a tensor")
    return tensor


def aligned(tensor: Tensor | None) -> Tensor | None:
    """Returns a tensor to add in the layout of kernels. It almost always has that layout already."""
    return tensor if tensor is None or usable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def ordinal_of(device: torch.device) -> int:
    """The value of `get_device` on a device: -1 for a CPU and the meta device. `get_device` costs less than `device`."""
    return -1 if device.index is None else device.index


def require_apart(name: str, written: Tensor, /, **others: Tensor | None) -> None:
    """Raises UsageError if a tensor to write shares memory with another tensor that the same call reads or writes.

    Ranks read each other's inputs at unrelated times, so no order of reads and writes makes this safe.
    """
    start, end = _range_of(written)
    for other, tensor in others.items():
        if tensor is not None and tensor.device == written.device:
            first, last = _range_of(tensor)
            if first < end and start < last:
                raise UsageError(
                    f"{name} shares memory with {other}, and a call writes {name} before it ends: give another {name}"
                )


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last one."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def recorded(*tensors: Tensor | None) -> bool:
    """Whether torch would record a call with these tensors, while recording is on. Raises UsageError for what is no tensor."""
    try:
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)
    except AttributeError:
        others = [type(tensor).__name__ for tensor in tensors if tensor is not None and not hasattr(tensor, "requires_grad")]
        raise UsageError(f"a call has an argument of type {', '.join(others)}; it must be a torch.Tensor: give one") from None


def require_no_tangent(*tensors: Tensor | None) -> None:
    """Raises UsageError for tensors with forward-mode derivatives, which kernels would lose."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UsageError(NO_TANGENTS)


def resolved(error: RuntimeError | AttributeError, **tensors: Tensor | None) -> list[Any]:
    """Resolves the input tensors of a call after torch reported that one has no memory or no shape.

    Raises UsageError for a tensor that cannot be resolved, and `error` if no tensor explains it.
    """
    made: list[Any] = []
    for name, tensor in tensors.items():
        if tensor is None:
            made.append(None)
        elif name in WRITTEN:
            require_plain(name, tensor)
            made.append(tensor)
        else:
            made.append(plain(name, tensor))
    if all(one is other for one, other in zip(made, tensors.values(), strict=True)):
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(TRANSFORMED) from error
        if missing := [name for name, tensor in tensors.items() if tensor is None and name in NEEDED]:
            raise UsageError(f"{', '.join(missing)} is None; the call needs it: give a torch.Tensor") from error
        raise error
    return made
