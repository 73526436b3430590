"""A message test fails if a message lost a part."""

import pytest

from tests.messages import assert_message, raises

TEXT = "rollout.group_size=12: must be below 2.5; set rollout.max_in_flight"


@pytest.mark.parametrize(
    "named",
    [
        {"key": "rollout.group_size", "value": 12, "fix": "set rollout.max_in_flight"},
        {"key": ("rollout.group_size", "rollout.max_in_flight")},
        {"value": "2.5"},
    ],
)
def test_what_a_message_names_is_found(named):
    assert_message(TEXT, **named)


@pytest.mark.parametrize(
    "named",
    [
        {"key": "rollout.group"},
        {"key": "group_siz"},
        {"value": 2},
        {"value": 5},
        {"value": 1},
        {"fix": "trainer.mode"},
        {"key": ("rollout.group_size", "seed")},
    ],
)
def test_a_part_that_is_missing_fails(named):
    with pytest.raises(AssertionError, match=r"rollout\.group_size=12"):
        assert_message(TEXT, **named)


def test_an_error_of_another_class_or_without_its_key_fails():
    with pytest.raises(AssertionError, match="key 'seed'"), raises(ValueError, key="seed"):
        raise ValueError("no")
    with pytest.raises(TypeError), raises(ValueError, key="seed"):
        raise TypeError("seed")
