"""``import jax_agent_rl`` and the command line start at once: heavy libraries load where they are
used.
"""

import subprocess
import sys

import pytest

HEAVY = {
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "matplotlib",
}


@pytest.mark.parametrize("module", ["jax_agent_rl", "jax_agent_rl.cli", "jax_agent_rl.config"])
def test_importing_it_loads_no_heavy_library(module: str):
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert module in loaded and not HEAVY & set(loaded)


def test_the_package_itself_needs_nothing_but_the_standard_library():
    program = (
        "import sys; before = set(sys.modules);"
        " import jax_agent_rl; print(*set(sys.modules) - before)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"jax_agent_rl"}
