"""Benches of tests: `python -m tests.fleet.tuner_process FD` has slots of two kinds and real CPU ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing.connection import Connection

from autotax.fleet.messages import Order
from autotax.fleet.tuner_process import serve
from autotax.hardware import Hardware, detect
from autotax.runner.processes import die_with_parent


def two_kinds(order: Order) -> Hardware:
    """Even slots are of one kind, odd ones of another."""
    return replace(detect("cpu"), device=f"CPU of kind {order.slot % 2}")


if __name__ == "__main__":
    die_with_parent("autotax-bench")
    serve(Connection(int(sys.argv[1])), find=two_kinds)
