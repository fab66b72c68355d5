"""Rank processes whose look-ups find no database of the user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotax.runner.ranks import Ranks


@pytest.fixture(scope="module")
def no_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTAX_DB", str(tmp_path_factory.mktemp("nobody") / "none.db"))
        yield


@pytest.fixture(scope="module")
def ranks(no_database: None) -> Iterator[dict[int, Ranks]]:  # noqa: ARG001 - only its effect is needed
    with Ranks(2) as two, Ranks(3) as three:
        yield {2: two, 3: three}
