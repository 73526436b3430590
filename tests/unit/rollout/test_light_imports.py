"""The rollout side stays light, and free of jax."""

import subprocess
import sys

import pytest

HEAVY = {"jax", "numpy", "torch", "transformers", "jsonschema", "httpx"}


@pytest.mark.parametrize(
    "module", ["tools", "agents", "rewards", "rollout.client", "collect.collector"]
)
def test_importing_it_loads_no_heavy_library(module):
    program = f"import sys, jax_agent_rl.{module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = sorted(HEAVY & set(loaded))
    assert heavy == []
