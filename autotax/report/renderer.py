"""Draws charts in a process of its own, because the library that draws aborts where address space is short."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from autotax.runner.processes import Child, bound_sending, die_with_parent

DRAWING_S = 120.0
"""Timeout for one chart; the first waits for the imports of the process."""
MOST_LOSSES = 2
"""Processes that may be lost before the other charts are left out, too."""


class Undrawn(Exception):
    """A chart that cannot be drawn; the message is the reason."""


class Renderer:
    """A process that draws charts, started with the first of them and again after a loss."""

    def __init__(self) -> None:
        self.child: Child | None = None
        """The process, while it runs."""
        self._losses = 0
        self.undrawn: list[str] = []
        """The reason for each chart that is left out."""

    def svg(self, chart: Mapping[str, Any]) -> str:
        """The picture of a chart of Vega-Lite. Raises Undrawn."""
        try:
            return self._drawn(json.dumps(chart).encode())
        except Undrawn as why:
            self.undrawn.append(str(why))
            raise

    def close(self) -> None:
        """Ends the process. Safe to call twice; the next chart starts another."""
        if self.child:
            self.child.kill()
        self.child = None

    def _drawn(self, chart: bytes) -> str:
        if self._losses >= MOST_LOSSES:
            raise Undrawn(self.undrawn[-1])
        try:
            if self.child is None:
                self.child = Child.start(__name__, (), {})
                bound_sending(self.child.pipe, DRAWING_S)
            self.child.pipe.send_bytes(chart)
            answered = self.child.pipe.poll(DRAWING_S)
            answer = self.child.pipe.recv_bytes() if answered else b""
        except (EOFError, OSError) as error:
            raise Undrawn(self._loss(error)) from None
        if not answered:
            raise Undrawn(self._loss(TimeoutError(f"does not answer within {DRAWING_S:.0f} s")))
        if answer[:1] != b"<":
            raise Undrawn(answer.decode())
        return answer.decode()

    def _loss(self, error: Exception) -> str:
        """The reason why the process is lost, in a few words: its last line may be a frame of a stack."""
        reason = self.child.last_words().partition(":")[0] if self.child and not isinstance(error, TimeoutError) else str(error)
        self._losses += 1
        self.close()
        return f"the process that draws {reason}"


def main() -> None:
    die_with_parent("autotax-draw")
    pipe = Connection(int(sys.argv[1]))
    import vl_convert

    while True:
        try:
            chart = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = vl_convert.vegalite_to_svg(chart)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        pipe.send_bytes(answer.encode())


if __name__ == "__main__":
    main()
