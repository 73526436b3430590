"""An installed vLLM and its engine, as far as a backend sees them before it has a request."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_backend import backend as backend_module
from gpu_backend import settings as settings_module
from gpu_backend.backend import VllmBackend
from gpu_backend.launch import Log, StartedEngine
from gpu_backend.settings import VllmSettings
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.protocol import WeightUpdate
from tests.tiny import TINY, tiny_params


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Let exactly these distributions be installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(settings_module.importlib.metadata, "version", version)


class FakeEngine:
    """Pauses and resumes like ``AsyncLLM``: at once, but the caller waits for the answer.

    Attributes:
        slow: the call whose answer does not come.
        broken: the call that raises, when it has done its work.
        errored: its processes have died.
    """

    model_config = SimpleNamespace(get_vocab_size=lambda: TINY.vocab_size)

    def __init__(self, *, slow: str | None = None, broken: str | None = None) -> None:
        self.paused = False
        self.errored = False
        self.slow = slow
        self.broken = broken
        self.waiting = asyncio.Event()

    async def update_weight_version(self, version: str) -> None:
        return None

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await self._answer("pause")

    async def resume_generation(self) -> None:
        self.paused = False
        await self._answer("resume")

    async def _answer(self, call: str) -> None:
        if call == self.broken:
            raise RuntimeError(f"{call} failed")
        if call == self.slow:
            self.waiting.set()
            await asyncio.Event().wait()


class FakeUpdater:
    """Takes every update but those it is set to lose."""

    loses = False

    def check(self, update: WeightUpdate, *, served: int) -> None:
        return None

    async def load(self, update: WeightUpdate) -> None:
        if self.loses:
            raise WeightUpdateError("half of it is missing")


async def start_backend(
    engine: FakeEngine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    updater: FakeUpdater | None = None,
    log: Log | None = None,
) -> VllmBackend:
    """Start a backend over ``engine``, with a small model below ``folder``."""
    installed(monkeypatch, {"vllm": "0.32.0"})
    monkeypatch.setattr(
        backend_module, "WeightUpdater", lambda *_, **options: updater or FakeUpdater()
    )
    save_hf(folder / "model", TINY, tiny_params())
    started = StartedEngine(engine=engine, platform="cpu", log=log or Log(folder / "vllm.log"))
    settings = VllmSettings(model=str(folder / "model"), max_model_len=60)
    backend = VllmBackend(settings, start=lambda settings: started)
    await backend.start()
    return backend
