"""Lines of messages on a terminal."""

from __future__ import annotations

import pytest

from autotax.cli.messages import folded

STORED = "autotax: stored in my.db; next: autotax lookup all-gather-gemm --m 512 --n 7168 --k 8192 --pin"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_terminal_gets_whole_words(width: int) -> None:
    lines = folded(STORED, width)
    assert max(map(len, lines)) <= width and " ".join(" ".join(lines).replace("\\", "").split()) == STORED


def test_a_command_can_be_copied() -> None:
    lines = folded(STORED, 40)
    assert [line.endswith(" \\") for line in lines] == [False, True, False] and lines[1].startswith("  autotax lookup ")
    quoted = folded("run `autotax trials all-gather-gemm --m 64` and look again", 24)
    assert quoted == ["run `autotax trials \\", "  all-gather-gemm --m \\", "  64` and look again"]
