"""SGLang's own server, on tiny models; the fixtures of models are those of the tests on vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_backend.sglang.settings import DEFAULT_PYTHON, check_python
from jax_agent_rl.errors import ConfigError
from tests.gpu_backend.conftest import model_folder, recipe  # noqa: F401  (fixtures)

_VENV = os.environ.get("JAX_AGENT_RL_SGLANG_VENV")
PYTHON = f"{_VENV}/bin/python" if _VENV else DEFAULT_PYTHON
"""The Python of the environment that launch/sglang_environment.sh makes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    try:
        check_python(PYTHON)
    except ConfigError as error:
        reason = str(error)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
