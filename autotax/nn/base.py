"""The base of all modules: preparing, copying, comparing calls between ranks, and closing."""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import _disable_current_modes

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.settings import is_on
from autotax.hardware import Hardware, detect
from autotax.heap.world import World, all_or_none, together
from autotax.nn import groups
from autotax.nn.consensus import configs_for, deployed_as, require_alike
from autotax.nn.groups import GroupCalls, Watchdog, capturing, on_device, wait_s

if TYPE_CHECKING:
    from autotax.kernels.kernel import Kernel
    from autotax.nn.prepare import Prepared

P = TypeVar("P", bound=Problem)

increment_version: Callable[[tuple[Tensor, ...]], None] = torch._C._increment_version
"""The function behind torch.autograd.graph.increment_version: it informs torch that a kernel has written into tensors."""
NO_KERNELS = "kernels cannot run on these ranks: CPU ranks need TRITON_INTERPRET=1 in the environment, GPUs must not have it"
NO_BACKWARD = (
    "an input, the weight or out requires a gradient; there is no backward: "
    "call this under torch.no_grad(), or give detached tensors"
)
NO_OUT = (
    "an input, the weight, the bias or out requires a gradient, and out is given; torch records no call that writes into out: "
    "call this without out, or under torch.no_grad()"
)

_modules: WeakValueDictionary[int, Module] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class SizeChoice:
    """The config for calls up to the size of `problem`; None means bulk-synchronous."""

    problem: Problem
    config: Config | None


class Request(NamedTuple):
    """A module's look-up: the conditions of winners, a config to use instead, and the sizes to prepare for."""

    conditions: Conditions | None
    config: Config | None
    sizes: Sequence[int] | None = None


class Unknown(Enum):
    """Markers for a group that was not given."""

    KEPT = "the group that the module has"
    UNSAVED = "a group of some ranks, which no file can hold"


Group = dist.ProcessGroup | None | Unknown
NOT_IN: Any = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
"""The value that torch returns for a new group to which this rank does not belong."""


def module_of(handle: int) -> Any:
    """The module with a handle. Raises UsageError if it is gone."""
    module = _modules.get(handle)
    if module is None:
        raise UsageError(f"there is no autotax module number {handle} any more; keep the module as long as what was made from it")
    return module


def world_of(group: dist.ProcessGroup | None, device: torch.device) -> World | None:
    """The ranks of a group; None where there is only this one."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    world = World.of(group, device)
    return world if world.size > 1 else None


def kernels_run_here(world: World, on_gpu: bool) -> bool:
    """Whether all ranks can run kernels: compiled on GPUs, interpreted on CPUs. Collective."""
    try:
        import triton

        here = bool(triton.knobs.runtime.interpret) != on_gpu
    except ImportError:
        here = False
    return all(world.gather(here, bool))


class Module(torch.nn.Module):
    """A module of this package on one rank.

    The collective `prepare` makes it ready. Construction calls `prepare` if the tensors have memory. Otherwise, and for
    copies, the first call does so: all ranks make the same calls. Copies omit the attributes that `_blank` lists, because these
    belong to this process.
    """

    _where: torch.device | None = None
    handle: int
    """Names this module to torch.ops.autotax.*; ranks have equal handles only if they have made the same modules."""
    _ready: bool
    _closed: bool | str
    """Whether no call may follow; a text says why if `close` is not the reason."""
    _choices: tuple[SizeChoice, ...]
    _world: World | None
    _calls_of_group: GroupCalls | None
    _number: int
    _called: int
    _device: torch.device
    _index: int | None
    _guards: tuple[GroupCalls, int | None, bool]
    """The values that each call reads, in one attribute: the group's calls, the index of the GPU, whether to call `_compare`."""
    _prepared: Prepared | None
    _watchdog: Watchdog | None
    _gradient: Any
    """The layer for the backward, once it is ready; this layer if it needs no other."""

    def __init__(
        self, group: dist.ProcessGroup | None, db: Any, check: bool | None, prove: bool | float = False, device: Any = None
    ) -> None:
        super().__init__()
        if not (group is None or group is NOT_IN or isinstance(group, dist.ProcessGroup)):
            raise UsageError(
                f"group is of type {type(group).__name__}; it must be a torch.distributed.ProcessGroup, or None for all ranks: "
                "give one, of a DeviceMesh its get_group()"
            )
        self._where = None if device is None else torch.device(device)
        self._prove = prove
        self._group: Group = group
        self._db = db
        self._check = is_on("AUTOTAX_CHECK") if check is None else bool(check)
        self._revive()

    def _blank(self) -> dict[str, Any]:
        """The state of a module that is not ready."""
        return {
            "_ready": False,
            "_closed": False,
            "_choices": (),
            "_world": None,
            "_calls_of_group": None,
            "_number": 0,
            "_called": 0,
            "_device": torch.device("meta"),
            "_index": None,
            "_guards": (GroupCalls(), None, self._check),
            "_prepared": None,
            "_watchdog": None,
            "_gradient": None,
        }

    def _revive(self) -> None:
        """Initialises the module in this process; it is not ready yet."""
        vars(self).update(self._blank(), handle=next(_numbers))
        _modules[self.handle] = self

    @property
    def choices(self) -> tuple[SizeChoice, ...]:
        """The config of each size, the same on all ranks; empty until the module is ready."""
        return self._choices

    @property
    def world_size(self) -> int:
        if self._world:
            return self._world.size
        if isinstance(self._group, Unknown) or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    # Preparing.

    def prepare(self, group: Group = Unknown.KEPT) -> None:
        """Makes the module ready for its tensors as they are now: looks up, allocates and compiles. Collective over the group.

        `group`: replaces the group. A module that was loaded from a file needs it, unless its group was that of all ranks.
        Graphs that were captured before must not be replayed afterwards. Raises UsageError on all ranks alike.
        """
        self._require_open()
        if group is not Unknown.KEPT:
            self._group = group
        if isinstance(self._group, Unknown):
            raise UsageError(
                f"this {type(self).__name__} was saved with a group of some ranks, which no file can hold: "
                "call prepare(group) on all of them"
            )
        device = self._place()
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            raise UsageError(
                f"this {type(self).__name__} is prepared under FakeTensorMode, whose tensors have no values: "
                "make it on the meta device, or outside"
            )
        if device.type == "meta":
            raise UsageError(
                f"this {type(self).__name__} is on the meta device; it must have values: "
                "call to_empty or load_state_dict(assign=True)"
            )
        if capturing(device):
            raise UsageError(f"this {type(self).__name__} is not ready, and a graph is being captured: call it once before")
        self._release()
        vars(self).update(self._blank())
        self._world, self._device = world_of(self._group, device), device
        if self._world:
            self._calls_of_group = GroupCalls.of(self._world.data)
            self._number, self._calls_of_group.modules = self._calls_of_group.modules, self._calls_of_group.modules + 1
        here = torch.get_default_device()
        if here.type in (device.type, "cpu"):
            self._make()
        else:  # for instance, inside `with torch.device("meta")`
            with device:
                self._make()
        self._index = device.index if device.type == "cuda" else None
        self._guards = self._calls_of_group or GroupCalls(), self._index, self._check
        self._ready = True
        if self._prepared:
            controls = [operator.control for operator in self._prepared.operators if operator]
            self._watchdog = Watchdog(controls, self.failure, self._request_look)

    def _request_look(self, due: bool) -> None:
        """Sets whether the next call passes through `_compare`; with `check` every call does."""
        calls, index, _ = self._guards
        vars(self)["_guards"] = calls, index, due or self._check

    def _hold(self, **tensors: Tensor | None) -> None:
        """Takes tensors as parameters or buffers of these names."""
        for name, tensor in tensors.items():
            if not (isinstance(tensor, Tensor) or (tensor is None and name != "weight")):
                raise UsageError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor: give one")
            if tensor is None or isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def _place(self) -> torch.device:
        """The device of the tensors of calls: the one given at construction, or else the current GPU, or the CPU."""
        here = self._where or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device("cuda", torch.cuda.current_device()) if here.type == "cuda" and here.index is None else here

    def _make(self) -> None:
        """Prepares for the current world and device. Collective."""
        raise NotImplementedError

    def _changed(self) -> bool:
        """Whether a module that was never called has moved to another device since it was prepared."""
        return False

    def _ensure_ready(self) -> None:
        self._require_open()
        if not self._ready or self._changed():
            self.prepare()

    def _besides(self) -> str:
        """Describes options that the problems do not name, and that must be the same on all ranks too."""
        return ""

    def _agreed(self, problems: Callable[[], list[P]], conditions: Conditions | None) -> tuple[list[P], Conditions]:
        """The problems to prepare for and the conditions of calls, after a check that all ranks have the same ones.

        The module is bulk-synchronous until kernels are prepared. Collective.
        """
        on_gpu = self._device.type != "cpu"

        def here() -> tuple[list[P], Conditions]:
            if self._calls_of_group:
                with self._calls_of_group:
                    pass
            prepared_for = problems()
            require_current(self._device)
            wait_s()
            return prepared_for, deployed_as(conditions, on_gpu)

        prepared_for, deployed = all_or_none(self._world, here)
        keys = ", ".join([*(problem.key for problem in prepared_for), *filter(None, [self._besides()])])
        how = f"deployed as {deployed.key}{', checked' * self._check}{f', proven for {self._prove}' if self._prove else ''}"
        require_alike(self._world, type(self).__name__, f"{keys}, {how}")
        self._choices = tuple(SizeChoice(problem, None) for problem in prepared_for)
        return prepared_for, deployed

    def _look_up(self, problems: Sequence[Problem], conditions: Conditions, config: Config | None) -> None:
        """Prepares what all ranks find for these problems, where there are several ranks. Collective."""
        if self._world is not None:
            hardware = detect(self._world.backend)
            self._tune(problems, hardware, *self._configs(self._world, problems, hardware, conditions, config))

    def _configs(
        self, world: World, problems: Sequence[Problem], hardware: Hardware, conditions: Conditions, config: Config | None
    ) -> tuple[list[Config | None], list[str]]:
        """The config that all ranks have for each problem, and messages for the user. Collective."""
        return configs_for(world, problems, hardware, conditions, self._db, config, self._prove)

    def _tune(self, problems: Sequence[Problem], hardware: Hardware, configs: Sequence[Config | None], notes: list[str]) -> None:
        """Prepares the config of each problem, and baselines. `notes` are messages for the user. Collective."""
        pairs: list[tuple[Any, Config | None]] = list(zip(problems, configs, strict=True))
        requested: list[tuple[Problem, Config]] = [(problem, config) for problem, config in pairs if config]
        requested += self._baselines(pairs, hardware)
        operators = self._operators(list(dict.fromkeys(requested)), hardware, notes)
        self._store(operators, notes)
        made = {(operator.problem, operator.config) for operator in operators}
        self._choices = tuple(SizeChoice(problem, config if (problem, config) in made else None) for problem, config in pairs)
        self._warn(notes)

    def _baselines(self, pairs: list[tuple[P, Config | None]], hardware: Hardware) -> list[tuple[P, Config]]:  # noqa: ARG002
        """Bulk-synchronous configs to prepare beside those that the ranks agreed on."""
        return []

    def _store(self, operators: list[Kernel[Any]], notes: list[str]) -> None:
        """Stores the prepared operators for calls. Raises UsageError where the module cannot work without a missing one."""
        raise NotImplementedError

    def _operators(self, requested: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Kernel[Any]]:
        """The operators of `requested` that can be prepared; `notes` name the others. Collective."""
        assert self._world is not None
        if requested and not kernels_run_here(self._world, hardware.on_gpu):
            notes.append(NO_KERNELS)
            requested = []
        if not requested:
            return []
        from autotax.nn.prepare import Prepared

        self._prepared = Prepared(self._world, hardware, requested, self._rehearsals)
        notes += self._prepared.notes
        return [operator for operator in self._prepared.operators if operator]

    def _with_additions(self, kernels: list[Kernel[Any]]) -> list[Kernel[Any]]:
        """Also compiles kernels that add for calls with both addends: a rank must not compile while its peers wait for it."""
        for kernel in kernels:
            if getattr(kernel, "ADDS", False):
                assert self._world is not None
                what = f"compile {kernel.config} for {kernel.problem.key}, with bias and residual"
                with together(self._world, what), kernel.context.rehearsal():
                    for smaller, tensors in self._rehearsals(kernel.problem):
                        out = tensors[-1]
                        if fit := kernel.fitted(smaller):
                            fit(*tensors, bias=out.new_empty(out.shape[-1:]), residual=torch.empty_like(out))
        return kernels

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """One call for every kind of size for which the operator of `problem` may compile a kernel."""
        raise NotImplementedError

    # Calling.

    def use_from_this_thread(self) -> None:
        """Makes the module ready. Any thread may call the module if calls do not overlap, so programs need not name a thread."""
        self._ensure_ready()

    def _record(self, *_: Any) -> Any:
        """A call that torch records for a backward. A module without a backward refuses it."""
        raise UsageError(NO_BACKWARD)

    def _compare(self, describe: Callable[[], str]) -> None:
        """Looks for lost ranks before a call, where `_guards` request it. Raises MachineError if a rank was lost.

        With `check` it also raises UsageError on all ranks unless all ranks make this call and accept it. It is then collective
        and waits for the ranks.
        """
        self._ensure_ready()
        if self._world is None or capturing(self._device):
            return
        if self._watchdog:
            self._watchdog.look()
        if not self._check:
            return
        name = type(self).__name__
        call = f"call {self._called} of {name} {self._number}"
        self._called += 1
        with self._guards[0]:
            description = f"{call}: {all_or_none(self._world, describe)}"
            require_alike(self._world, f"a call of {name}", description)

    def failure(self) -> str | None:
        """Why results since construction cannot be trusted, or None: a wait for a rank exceeded AUTOTAX_WAIT_S seconds.

        Waits for the device. Afterwards the module is unusable, and calls raise MachineError.
        """
        operators = self._prepared.operators if self._prepared else []
        with _disable_current_modes():  # a call may be traced with tensors without values; these have some
            return next((note for operator in operators if operator and (note := operator.failure())), None)

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        """The state for a file: tensors and options. It omits the group, the workspaces and a URL, which may hold a password."""
        state = {name: value for name, value in vars(self).items() if name not in self._blank() and name != "handle"}
        state["_group"] = None if self._group is None else Unknown.UNSAVED
        state["_db"] = None if "://" in str(self._db) else self._db
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._revive()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with the same group and its own tensors. Its first call, or `prepare`, is collective."""
        other = memo[id(self)] = type(self).__new__(type(self))
        kept = {name: vars(self)[name] for name in ("_group", "_db", "_like") if name in vars(self)}
        # A parametrized module refuses __getstate__, as files cannot hold its class; torch's own can be copied nevertheless.
        whole = Module.__getstate__(self) if is_parametrized(self) else self.__getstate__()
        state = {name: value for name, value in whole.items() if name not in kept}
        other.__setstate__(copy.deepcopy(state, memo) | kept)
        return other

    # The end.

    def close(self) -> None:
        """Frees the memory. Collective over the group; no call may follow. A second call is safe, and so is no call at all."""
        if self._closed:
            return
        self._closed = True
        _modules.pop(self.handle, None)
        self._release()
        self._let_go()

    def _let_go(self) -> None:
        """Drops the group, so that torch.distributed can destroy it: the group's threads must not outlive the interpreter.

        A thread of gloo frees the last call's tensors some time after the call has returned. To free a tensor that Python knows,
        it takes the interpreter's lock, which kills the process while Python exits. A destroyed group first waits for
        its threads.
        """
        self._forget()
        self._group = None if self._group is None else Unknown.KEPT

    def _release(self) -> None:
        """Frees the workspaces, also those of the layer for the backward. Collective if there are any."""
        try:
            inner, self._gradient = self._gradient, None
            if inner is not None and inner is not self:
                inner.close()
            if self._world and self._prepared:
                with on_device(self._index):
                    self._world.synchronize()
                    self._world.barrier()
                    self._prepared.heap.close()
        finally:  # calls must also be refused after a close that failed
            self._forget()

    def _forget(self) -> None:
        """Resets the state of this process. How the module was prepared and whether it was closed stay known."""
        vars(self).update({name: value for name, value in self._blank().items() if name not in ("_closed", "_choices")})

    def _require_open(self) -> None:
        if self._closed:
            why = self._closed if isinstance(self._closed, str) else "was closed"
            raise UsageError(f"this {type(self).__name__} {why}: make another")

    def _warn(self, notes: list[str]) -> None:
        if notes:
            name = type(self).__name__
            warnings.warn(f"{name} takes bulk-synchronous there: {'; '.join(notes)}", RuntimeWarning, stacklevel=7)


@atexit.register
def _let_all_go() -> None:
    """Drops the groups of all modules that were not closed."""
    for module in list(_modules.values()):
        if not module._closed:
            module._let_go()


def _disown_all() -> None:
    """Closes all modules in a forked child, which shares their memory and connections with its parent. It frees nothing."""
    for module in list(_modules.values()):
        calls, index, _ = module._guards
        vars(module).update(_closed="belongs to the process that this one is a fork of", _guards=(calls, index, True))


os.register_at_fork(after_in_child=_disown_all)


def require_current(device: torch.device) -> None:
    """Raises UsageError unless `device` is the current one: libraries allocate on the current device."""
    if device.type == "cuda" and device.index != groups.current_device():
        raise UsageError(
            f"the module is for {device} and the current device is cuda:{groups.current_device()}; they must be the same: "
            "call torch.cuda.set_device first"
        )
