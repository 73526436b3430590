"""Recipes: the configurations that come with the package.

Every command and the key ``base`` find them by name.
In a checkout they are the files of ``configs/``; a wheel carries them as ``jax_agent_rl/recipes/``
(see ``setup.py``).
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent / "configs")


def recipe_files() -> dict[str, Path]:
    """Return the recipes by name: ``quickstart``, ``supervised/sft``."""
    for folder in _FOLDERS:
        if not (folder / "quickstart.yaml").is_file():
            continue
        recipes = {}
        for file in sorted(folder.rglob("*.yaml")):
            name = file.relative_to(folder).with_suffix("").as_posix()
            recipes[name] = file
        return recipes
    return {}


def find_config(path: Path) -> Path:
    """Return the file that a path, or a recipe's name, stands for.

    A file goes before a recipe of the same name. A path that is neither is returned as it is.

    >>> find_config(Path("dapo")).name
    'dapo.yaml'
    """
    if os.path.isfile(path) or path.is_absolute():
        return path
    name = path.with_suffix("") if path.suffix == ".yaml" else path
    return recipe_files().get(name.as_posix(), path)
