"""Configs: values that compare, hash and travel as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotax.core.config import Config

values = st.dictionaries(st.text(min_size=1, max_size=8), st.integers() | st.text(max_size=8), max_size=6)


@given(values, st.randoms())
def test_the_order_of_parameters_does_not_matter(params: dict[str, int | str], random: object) -> None:
    shuffled = list(params.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = Config.of("push", params), Config.of("push", dict(shuffled))
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest


@given(values)
def test_a_config_survives_json(params: dict[str, int | str]) -> None:
    config = Config.of("push", params)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(values, values)
def test_digests_tell_configs_apart(one: dict[str, int | str], other: dict[str, int | str]) -> None:
    assert (Config.of("push", one).digest == Config.of("push", other).digest) == (one == other)
    assert Config.of("push", one).digest != Config.of("pull", one).digest


def test_digests_stay_what_they_are() -> None:
    """Databases store the digests, so they must not change."""
    assert Config("bsp").digest == "600db3b8719b9b12"
    assert Config.of("push", block_m=128, order="ring").digest == "e1704d55e80b87b0"


def test_parameters_are_read_by_name() -> None:
    config = Config.of("push", {"block_m": 128}, order="ring")
    assert config["block_m"] == 128
    assert str(config) == "push(block_m=128, order=ring)"
    with pytest.raises(KeyError):
        config["block_n"]
