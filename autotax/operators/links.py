"""Bandwidth of the links between the devices of a host, for the bounds of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotax.hardware import Hardware

LINK_GBPS = {"NVIDIA H200": 375.0, "NVIDIA H100 80GB HBM3": 375.0}
"""Measured rate at which one device receives from all its peers at once. Other devices are unknown."""

XGMI_GBPS = {"MI300A": 64.0, "MI300X": 64.0, "MI325X": 64.0, "MI350X": 76.8, "MI355X": 76.8}
"""Data-sheet bandwidth, in one direction, of the link between each pair of AMD GPUs of a host. Not measured here."""


def links_us(nbytes: int, peers: int, hardware: Hardware) -> dict[str, float]:
    """The bound `links`: microseconds to receive `nbytes` bytes from `peers` peers; empty where links are unknown."""
    pair = next((rate for name, rate in XGMI_GBPS.items() if name in hardware.device.split()), None)
    rate = pair * max(1, peers) if pair else LINK_GBPS.get(hardware.device)
    return {"links": nbytes / (rate * 1e3)} if rate else {}
