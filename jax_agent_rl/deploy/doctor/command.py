"""``jax-agent-rl doctor``: the checks of the machine and of a configuration, in order."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from jax_agent_rl.deploy.doctor import machine
from jax_agent_rl.deploy.doctor.machine import Check, FindIdle, Finding, run_checks

if TYPE_CHECKING:
    from jax_agent_rl.config import Config

TIMEOUT = 120.0
"""Seconds that one check may take."""


async def examine(config: Config | None) -> AsyncIterator[Finding]:
    """Check the machine and, if given, what a configuration needs."""
    async with AsyncExitStack() as stack:
        devices = 1
        find_idle: FindIdle = _none_idle
        config_checks: list[tuple[str, Check]] = []
        if config:
            from jax_agent_rl.deploy.doctor.run import RunChecks, count_devices  # these import jax
            from jax_agent_rl.runtime.engine_devices import expect_idle

            devices = count_devices(config)
            find_idle = functools.partial(expect_idle, config)
            config_checks = RunChecks(config=config, stack=stack).all()

        accelerators = functools.partial(machine.accelerators, need=devices, find_idle=find_idle)
        checks = [
            ("python", machine.interpreter),
            ("packages", machine.packages),
            ("processors", machine.processors),
            ("limits", machine.limits),
            ("disk", machine.cache_disk),
            ("ports", machine.ports),
            ("accelerators", accelerators),
            ("sandbox", machine.sandbox),
            *config_checks,
        ]
        async for finding in run_checks(checks, timeout=TIMEOUT):
            yield finding


def _none_idle(count: int) -> tuple[str, ...]:
    """Return nothing: without a configuration, nothing is meant to run on the accelerators."""
    return ()
