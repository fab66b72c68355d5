"""Configs, the points of a search space: a kernel variant and the values of its parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Value = int | str


@dataclass(frozen=True)
class Config:
    """A variant and its parameters, hashable and ordered by name, so that equal configs have equal digests."""

    variant: str
    params: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, variant: str, params: Mapping[str, Value] | None = None, **more: Value) -> Config:
        """Config.of("push", block_m=128, ...): the parameters in any order."""
        return cls(variant, tuple(sorted({**(params or {}), **more}.items())))

    @cached_property
    def values(self) -> dict[str, Value]:
        return dict(self.params)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def to_dict(self) -> dict[str, Any]:
        return {"variant": self.variant, "params": dict(self.params)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        return cls.of(data["variant"], data["params"])

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that name this config in databases and in the ranks' lockstep check."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.variant}({', '.join(f'{name}={value}' for name, value in self.params)})"
