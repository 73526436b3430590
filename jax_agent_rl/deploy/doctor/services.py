"""Checks of what a run connects to or starts: sandbox, tool servers, engines, learner processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from jax_agent_rl.deploy.doctor.findings import Finding, Reporter, UnmetError
from jax_agent_rl.deploy.doctor.inputs import CheckContext
from jax_agent_rl.deploy.doctor.machine import gib, is_free, require_extra
from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.runtime.engines import check_engine
from jax_agent_rl.runtime.sampling import make_agents
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.types import Trajectory

_SHARED_MEMORY = Path("/dev/shm")
_REMOTE_SECONDS = 3.0


async def sandbox(report: Reporter) -> Iterable[Finding]:
    """Run a program in the sandbox, as a tool server does when it starts."""
    try:
        await open_sandbox("bubblewrap")
    except ConfigError as error:  # not every run needs one; rewards that do say so themselves
        return [report.warn(problem) for problem in error.problems]
    return [report.ok("bubblewrap holds: a program ran in it, behind its limits")]


async def agents(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check every agent the rows name, with its tool server or retrieval server."""
    made = make_agents(
        context.config,
        client=LLMServerClient(decode_text=context.tokenizer.decode),
        codec=context.tokenizer,
        tools=context.tools or ToolRegistry(),
        score=_nothing_to_score,
    )
    context.stack.push_async_callback(made.close)
    findings = []
    for name, row in {row.get("agent_name"): row for row in context.all_rows}.items():
        try:
            await made.preflight([row])
            made.collector.require_branching([row])
            findings.append(report.ok(f"{name or '(the default)'}: ready"))
        except ConfigError as error:
            findings += [report.fail(f"{name or '(the default)'}: {problem}") for problem in error.problems]
    return findings


async def engine(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check the backend's packages, or its servers."""
    rollout = context.config.rollout
    findings = []
    try:
        check_engine(context.config)
        findings.append(report.ok(f"rollout.backend={rollout.backend}, placement {rollout.placement}"))
    except ConfigError as error:
        findings += [report.fail(problem) for problem in error.problems]
    if rollout.placement != "colocated":
        findings.append(require_extra(report, "ray", f"rollout.placement={rollout.placement}"))
    if (lora := context.config.learner.lora) and lora.quantize != "none":
        findings.append(require_extra(report, "qlora", f"learner.lora.quantize={lora.quantize}"))
    return [*findings, *[await _server(report, url, rollout.token_env) for url in rollout.urls]]


async def _server(report: Reporter, url: str, token_env: str | None) -> Finding:
    token = os.environ.get(token_env) if token_env else None  # that it is missing has been said
    backend = RemoteBackend(url, token=token, start_seconds=_REMOTE_SECONDS)
    try:
        await backend.start()
        health = await backend.health()
    except JaxAgentRLError as error:
        return report.fail(f"{url}: {error}; start it with: jax-agent-rl rollout-server --config CONFIG")
    finally:
        await backend.close()
    if not health.ok:
        return report.fail(f"{url} is not well: {health.detail}")
    if health.policy_version >= 0:
        return report.warn(
            f"{url} serves policy version {health.policy_version} of an earlier run, and would refuse the first "
            "weights of a new one; restart it before that"
        )
    return report.ok(f"{url} is well, with the model's own weights")


async def shared_memory(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check the shared memory through which weights pass to engines in other processes."""
    rollout = context.config.rollout
    if rollout.weight_dir or (rollout.backend == "jetstream" and rollout.placement == "colocated"):
        return []
    if not _SHARED_MEMORY.is_dir():
        raise UnmetError(f"there is no {_SHARED_MEMORY}")
    need, free = 4 * context.parameters, shutil.disk_usage(_SHARED_MEMORY).free
    if free < need:
        return [
            report.fail(
                f"{_SHARED_MEMORY} has {gib(free)} free, weights take up to {gib(need)}; make it larger (docker: "
                "--shm-size), or set rollout.weight_dir"
            )
        ]
    return [report.ok(f"{_SHARED_MEMORY}: {gib(free)} free")]


async def coordinator(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check the address at which the learner's processes meet."""
    multihost = context.config.learner.multihost
    host, colon, port = (multihost.coordinator or "").rpartition(":")
    if not colon:
        return []
    if not port.isdigit():
        return [report.fail(f"learner.multihost.coordinator={multihost.coordinator}: write host:port")]
    if multihost.process_id == 0 and not is_free("", int(port)):
        return [
            report.fail(f"port {port} of learner.multihost.coordinator={multihost.coordinator} is in use; choose one")
        ]
    return [report.ok(f"{multihost.coordinator}, {multihost.num_processes or '?'} processes")]


async def _nothing_to_score(trajectory: Trajectory) -> Trajectory:
    """Refuse: the doctor runs no trajectory."""
    raise UnmetError(f"{trajectory.trajectory_id} was to be scored, but the doctor runs none")
