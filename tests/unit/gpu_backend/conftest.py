"""Backends that serve, over engines that are not vLLM's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_backend import backend as backend_module
from gpu_backend.backend import VllmBackend
from gpu_backend.launch import Log, StartedEngine
from gpu_backend.settings import VllmSettings
from jax_agent_rl.models.hf import save_hf
from tests.tiny import TINY, tiny_params


@pytest.fixture
def start_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Awaitable[VllmBackend]]:
    """Return a function that starts a backend over an engine, which writes to a log."""
    monkeypatch.setattr(backend_module, "check_installation", lambda: "0.32.0")
    model = tmp_path / "model"
    save_hf(model, TINY, tiny_params())

    async def start(engine: Any, *, log: Log | None = None) -> VllmBackend:
        started = StartedEngine(engine=engine, platform="cpu", log=log or Log(Path("vllm.log")))
        settings = VllmSettings(model=str(model), max_model_len=60)
        backend = VllmBackend(settings, start=lambda settings: started)
        await backend.start()
        return backend

    return start
