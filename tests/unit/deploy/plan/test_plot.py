"""Names of pictures; what is drawn, ``test_plan_command`` looks for."""

import pytest
from rich.console import Console

from jax_agent_rl.deploy.plan.command import check_image, run_command
from jax_agent_rl.errors import ConfigError
from tests.messages import raises
from tests.unit.deploy.plan.test_compile_subprocess import TASK


@pytest.mark.parametrize("name", ["memory.png", "memory.SVG", "memory.pdf"])
def test_a_picture_may_be_drawn_to_a_new_file(name, tmp_path):
    check_image(tmp_path / name)
    assert not list(tmp_path.iterdir()), "looking at the name writes nothing"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("x.xyz", {"value": "'xyz'", "fix": ".png"}),
        ("x", {"value": "''", "fix": ".png"}),
        ("nowhere/x.png", {"value": "nowhere", "fix": "make it"}),
        ("folder.png", {"key": "folder.png", "value": "cannot be written"}),
    ],
)
def test_one_that_cannot_be_drawn_is_refused_before_anything_is_looked_at(name, named, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with raises(ConfigError, **named):
        run_command(TASK, Console(), budget=None, picture=tmp_path / name, as_json=True)
