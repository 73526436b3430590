"""The checks, in the order in which they are shown.

What fails early in a chain (tools, tokenizer, rows) is told once; checks that build on it say what they lack.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.doctor import accelerators, machine
from jax_agent_rl.deploy.doctor.findings import Check, Finding, Reporter, run_checks

if TYPE_CHECKING:
    from jax_agent_rl.runtime.sampling import Source

TIMEOUT = 120.0
"""Seconds one check may take."""


async def examine(config: Config | None) -> AsyncIterator[Finding]:
    """Check the machine and, if given, what a configuration needs."""
    async with AsyncExitStack() as stack:
        own = _of_config(config, stack) if config else []
        devices = functools.partial(accelerators.check, need=devices_needed(config) if config else 1)
        async for finding in run_checks([*_of_machine(devices), *own], timeout=TIMEOUT):
            yield finding


def devices_needed(config: Config) -> int:
    """Return the devices that learner and engine take in one process; several processes share the learner's mesh."""
    if config.learner.multihost.num_processes not in (None, 1):
        return 1
    engine = config.rollout.jetstream
    here = config.rollout.backend == "jetstream" and config.rollout.placement != "separate"
    return max(config.learner.mesh.devices, engine.device_offset + engine.mesh.devices if here else 1)


def _of_machine(devices: Check) -> list[tuple[str, Check]]:
    async def sandbox(report: Reporter) -> Iterable[Finding]:
        from jax_agent_rl.deploy.doctor import services

        return await services.sandbox(report)

    return [
        ("python", machine.interpreter),
        ("packages", machine.packages),
        ("processors", machine.processors),
        ("limits", machine.limits),
        ("disk", machine.cache_disk),
        ("ports", machine.ports),
        ("accelerators", devices),
        ("sandbox", sandbox),
    ]


def _of_config(config: Config, stack: AsyncExitStack) -> list[tuple[str, Check]]:
    from jax_agent_rl.deploy.doctor import inputs, services

    context = inputs.CheckContext(config=config, stack=stack)
    data: dict[str, Source] = {"train": (config.data.train, None)}
    if config.data.eval:
        data["eval"] = (config.data.eval, config.data.eval_limit)
    checks = {
        "user code": inputs.user_code,
        "tools": inputs.tools,
        "model": inputs.model,
        "tokenizer": inputs.tokenizer,
        "other models": inputs.further_models,
        "run folder": inputs.run_folder,
        **{f"data.{name}": functools.partial(inputs.rows, name=name, source=source) for name, source in data.items()},
        "keys": inputs.keys,
        "prompts": inputs.prompts,
        "rewards": inputs.reward_functions,
        "agents": services.agents,
        "engine": services.engine,
        "shared memory": services.shared_memory,
        "learner processes": services.coordinator,
    }
    return [(name, functools.partial(check, context)) for name, check in checks.items()]
