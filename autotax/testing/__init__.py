"""PROVING: the conformance suites of operators, heaps, stores and runners, for this project and for whoever extends it.

`check_operator(declaration)` is where an operator of one's own begins. The suites of heaps, stores and runners are lists of
checks (`autotax.testing.heap`, `.store`, `.runner`); that of heaps needs pytest.
"""

from __future__ import annotations

from autotax.testing.operators import Checked, check_operator

__all__ = ["Checked", "check_operator"]
