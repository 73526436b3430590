"""Optional packages: whether one is installed, its import, and the command that installs it.

Python takes any folder of that name on its path for a package without content, and W&B, for one,
makes a folder ``wandb`` in the working directory. Such a folder is not an installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from jax_agent_rl.utils.failures import is_user_file

DISTRIBUTION = "jax_agent_rl"
"""This package's name for pip."""
_ROOT = Path(__file__).resolve().parents[2]
_OWN_ENVIRONMENTS = {
    "cuda": "cuda_environment.sh",
    "gpu": "gpu_environment.sh cuda",
    "vllm-cpu": "gpu_environment.sh cpu",
    "tpu": "tpu_environment.sh",
}
"""Extras for which a launcher makes an environment beside the project's own."""


def is_installed(name: str) -> bool:
    """Return whether a package or module can be imported.

    A mere folder of that name does not count.
    """
    return _real_spec(name) is not None


def package_folder(name: str) -> str | None:
    """Return the folder of an installed package, without importing it.

    Returns:
        None if it is not installed, or a module without a folder.
    """
    spec = _real_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return list(spec.submodule_search_locations)[0]


def import_installed(name: str) -> ModuleType:
    """Import a package.

    Raises:
        ImportError: it is not installed, or something that it needs is not.
    """
    if not is_installed(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return importlib.import_module(name)


def install_command(*extras: str) -> str:
    """Return the command that installs extras of this package; without any, what it lacks itself.

    In an environment that a launcher made, a launcher does it, with the versions that are tested;
    in any other one, the installer that this package came by.
    """
    scripts = _ROOT / "launch"
    is_made_by_launcher = scripts.is_dir() and any(Path(sys.prefix).glob(".jax_agent_rl.*.stamp"))
    if not is_made_by_launcher:
        return _installer_command(extras)
    if len(extras) == 1 and extras[0] in _OWN_ENVIRONMENTS:
        return f"{shlex.quote(str(scripts))}/{_OWN_ENVIRONMENTS[extras[0]]}"

    script = shlex.quote(str(scripts / "install.sh"))
    environment = ""
    if Path(sys.prefix) != _ROOT / ".venv":
        environment = f"JAX_AGENT_RL_VENV={shlex.quote(sys.prefix)} "
    return environment + " ".join([script, *extras])


def _installer_command(extras: tuple[str, ...]) -> str:
    """Return the command of the installer that this package came by; of pip if that is unknown.

    A checkout that is not installed is installed as it is: no index may have the package.
    """
    brackets = f"[{','.join(extras)}]" if extras else ""
    try:
        installer = metadata.distribution(DISTRIBUTION).read_text("INSTALLER")
    except metadata.PackageNotFoundError:
        if (_ROOT / "pyproject.toml").is_file():
            return f"pip install -e {shlex.quote(f'{_ROOT}{brackets}')}"
        installer = None
    command = "uv pip install" if installer and installer.strip() == "uv" else "pip install"
    return f"{command} {shlex.quote(f'{DISTRIBUTION}{brackets}')}"


def _real_spec(name: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: imported by hand, without a spec
        return None
    if spec is None or spec.origin is not None:
        return spec

    # A package without an __init__.py: an installed one, or any folder of the user's.
    folders = spec.submodule_search_locations or ()
    if all(is_user_file(f"{folder}/") for folder in folders):
        return None
    return spec
