import importlib.util
import os

import pytest

from jax_agent_rl.utils.startup import ignore_absent_tpus


@pytest.mark.parametrize(
    ("device", "installed", "already", "set_to"),
    [
        (None, True, None, "cpu"),
        (None, False, None, None),
        (None, True, "cuda", "cuda"),
        ("accel0", True, None, None),
        ("vfio/0", True, None, None),
        ("nvidia0", True, None, None),
        ("vfio/vfio", True, None, "cpu"),
        ("nvidiactl", True, None, "cpu"),
    ],
)
def test_jax_is_kept_from_tpus_only_where_there_are_none(device, installed, already, set_to, tmp_path, monkeypatch):
    if device:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setenv("JAX_PLATFORMS", already or "")  # set, so that the test's end puts back what was there
    if not already:
        monkeypatch.delenv("JAX_PLATFORMS")
    ignore_absent_tpus(tmp_path)
    assert os.environ.get("JAX_PLATFORMS") == set_to
