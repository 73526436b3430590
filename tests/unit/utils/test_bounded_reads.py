"""Files that others left are read within bounds, and nothing waits for them."""

import os

import pytest

from jax_agent_rl.utils.files import read_regular_file
from tests.messages import raises


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular_file(path, 5) == b"12345"
    with raises(ValueError, value="4 bytes"):
        read_regular_file(path, 4)


def test_a_file_without_an_end_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "link", tmp_path):
        with pytest.raises((ValueError, OSError)):
            read_regular_file(path, 100)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a regular file"):
        read_regular_file(tmp_path / "pipe", 100)
