"""``jax-agent-rl doctor``: checks for what would stop or spoil a run, each with what to do about it.

``machine`` how checks run and report, and those that need no configuration · ``run`` checks of one,
which call what ``train`` calls before its first step.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from jax_agent_rl.deploy.doctor import machine
from jax_agent_rl.deploy.doctor.machine import Finding, run_checks

if TYPE_CHECKING:
    from jax_agent_rl.config import Config

TIMEOUT = 120.0
"""Seconds that one check may take."""


async def examine(config: Config | None) -> AsyncIterator[Finding]:
    """Check the machine and, if given, what a configuration needs."""
    async with AsyncExitStack() as stack:
        need, own, find_idle = (
            1,
            [],
            lambda count: (),
        )  # nothing is meant to run on the accelerators
        if config:
            from jax_agent_rl.deploy.doctor.run import RunChecks, count_devices  # these import jax
            from jax_agent_rl.runtime.engine_devices import expect_idle

            need, own = count_devices(config), RunChecks(config=config, stack=stack).all()
            find_idle = functools.partial(expect_idle, config)
        checks = [
            ("python", machine.interpreter),
            ("packages", machine.packages),
            ("processors", machine.processors),
            ("limits", machine.limits),
            ("disk", machine.cache_disk),
            ("ports", machine.ports),
            (
                "accelerators",
                functools.partial(machine.accelerators, need=need, find_idle=find_idle),
            ),
            ("sandbox", machine.sandbox),
            *own,
        ]
        async for finding in run_checks(checks, timeout=TIMEOUT):
            yield finding
