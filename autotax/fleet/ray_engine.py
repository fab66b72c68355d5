"""Ray: one actor a node, in a placement group that spreads them. A node's actor takes all of its GPUs."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotax.core.errors import MachineError, UsageError
from autotax.fleet.messages import MOST_STARTS, EngineOptions, Notice, Order
from autotax.fleet.worker import work

KNOCK_S = 10.0


class Host:
    """The worker on one node."""

    def work(self, order: Order) -> str:
        return work(order)


@dataclass
class _Slot:
    actor: Any
    order: Order
    answer: Any
    starts: int = 1


class RayEngine:
    strategy = "STRICT_SPREAD"
    host: type[Host] = Host

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._slots: dict[int, _Slot] = {}
        self._group: PlacementGroup | None = None
        self._joined = False

    def start(self, order: Order) -> int:
        """See Engine.start. Waits for the nodes, which an autoscaler may have to start."""
        if not ray.is_initialized():
            address = self.options.address or "auto"
            try:
                _knock(address)
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="autotax")
            except (OSError, RayError, ValueError, RuntimeError) as error:
                message = " ".join(str(error).split())[:160]
                raise UsageError(
                    f"no Ray cluster answers at {address!r} ({message}): "
                    "start one by `ray start --head`, or give --on ray:ADDRESS"
                ) from None
            self._joined = True
        bundles = self._bundles()
        self._group = placement_group(bundles, strategy=self.strategy)
        try:
            ray.get(self._group.ready(), timeout=self.options.wait_s)
        except GetTimeoutError:
            count = len(_nodes())
            raise MachineError(
                f"{len(bundles)} nodes with {_spelled(bundles[0])} each were not free within {self.options.wait_s:.0f} s; Ray "
                f"has {count} nodes: give fewer --hosts, or see `ray status`"
            ) from None
        names = Counter(node["NodeManagerHostname"] for node in _nodes())
        several = max(names.values(), default=1) > 1
        for slot, bundle in enumerate(bundles):
            own = replace(order, slot=slot, suffix=f"#{slot}" if several else "")
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot)
            options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
            actor = ray.remote(self.host).options(max_restarts=-1, max_task_retries=0, **options).remote()
            self._slots[slot] = _Slot(actor, own, actor.work.remote(own))
        return len(self._slots)

    def watch(self) -> list[Notice]:
        """See Engine.watch. A dead node is replaced as soon as Ray has another node, for which the actor waits."""
        open_ = {slot.answer: number for number, slot in self._slots.items() if slot.answer is not None}
        if not open_:
            return []
        ready, _ = ray.wait(list(open_), num_returns=len(open_), timeout=0)
        return [self._ended(open_[answer]) for answer in ready]

    def _ended(self, number: int) -> Notice:
        slot = self._slots[number]
        answer, slot.answer = slot.answer, None
        try:
            return Notice(number, False, ray.get(answer))
        except RayActorError as error:
            message = " ".join(str(error).split())[:200]
        except RayError as error:
            return Notice(number, True, " ".join(str(error).split())[-200:])
        if slot.starts < MOST_STARTS:
            slot.starts += 1
            slot.answer = slot.actor.work.remote(slot.order)
        return Notice(number, True, message)

    @property
    def running(self) -> int:
        return sum(slot.answer is not None for slot in self._slots.values())

    def close(self) -> None:
        """See Engine.close."""
        for slot in self._slots.values():
            with suppress(Exception):
                ray.kill(slot.actor)
        self._slots = {}
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)
            self._group = None
        if self._joined:
            self._joined = False
            ray.shutdown()

    def _bundles(self) -> list[dict[str, float]]:
        """The resources of each worker, the largest first: all GPUs of its node, or one CPU for nodes without GPUs."""
        nodes = _nodes()
        gpus = sorted((node["Resources"].get("GPU", 0.0) for node in nodes), reverse=True)
        if self.options.backend not in (None, "cpu") and not any(gpus):
            raise UsageError("Ray has no node with a GPU: see `ray status`, or give --backend cpu")
        if self.options.backend == "cpu" or not any(gpus):
            bundles = [{"CPU": 1.0} for node in nodes if node["Resources"].get("CPU", 0.0) >= 1]
        else:
            bundles = [{"GPU": count} for count in gpus if count]
        hosts = self.options.hosts or len(bundles)
        if not bundles:
            raise UsageError("Ray has no node with a GPU or a CPU to give: see `ray status`, or give --backend cpu")
        return (bundles + [bundles[0]] * hosts)[:hosts]


def _knock(address: str) -> None:
    """Checks that a server listens at the address, because Ray itself would retry for minutes. Raises OSError."""
    host, _, port = address.rpartition("://")[2].partition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _spelled(bundle: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in bundle.items())
