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
        for file in sorted((ROOT / "configs").rglob("*.yaml")):
            target = (
                Path(self.build_lib)
                / "jax_agent_rl"
                / "recipes"
                / file.relative_to(ROOT / "configs")
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


setup(cmdclass={"build_py": BuildWithRecipes})
