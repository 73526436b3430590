"""Optional packages: whether one is installed, and its import.

Python takes any folder of that name on its path for a package without content, and W&B, for one,
makes a folder ``wandb`` in the working directory. Such a folder is no installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from types import ModuleType

from jax_agent_rl.utils.failures import is_user_file


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
