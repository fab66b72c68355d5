"""Rank processes whose look-ups find no database of the user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotax.runner.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTAX_DB", str(tmp_path_factory.mktemp("nobody") / "none.db"))
        with Ranks(2) as two:
            yield two
