"""What pyproject.toml cannot say: the recipes of ``configs/`` are a part of the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithRecipes(build_py):
    """Puts ``configs/`` into a built package as ``jax_agent_rl/recipes/``.

    An editable install reads the folder where it is.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        recipes = sorted((ROOT / "configs").rglob("*.yaml"))
        if not recipes:
            raise FileNotFoundError(f"{ROOT / 'configs'} has no recipes, which the package needs")
        for file in recipes:
            target = (
                Path(self.build_lib)
                / "jax_agent_rl"
                / "recipes"
                / file.relative_to(ROOT / "configs")
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


setup(cmdclass={"build_py": BuildWithRecipes})
