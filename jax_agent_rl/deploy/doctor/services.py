"""What a run speaks to, or starts: sandbox, tool servers, engines, the processes of its learner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from jax_agent_rl.deploy.doctor.findings import Finding, Say, UnmetError
from jax_agent_rl.deploy.doctor.inputs import Known
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


async def sandbox(say: Say) -> Iterable[Finding]:
    """Runs a program in it, as a tool server does when it starts."""
    try:
        await open_sandbox("bubblewrap")
    except ConfigError as error:  # not every run needs one; rewards that do say so themselves
        return [say.warn(problem) for problem in error.problems]
    return [say.ok("bubblewrap holds: a program ran in it, behind its limits")]


async def agents(known: Known, say: Say) -> Iterable[Finding]:
    """Every loop the rows name, with the tool server or retrieval server it asks for."""
    made = make_agents(
        known.config,
        client=LLMServerClient(decode_text=known.tokenizer.decode),
        codec=known.tokenizer,
        tools=known.tools or ToolRegistry(),
        score=_nothing_to_score,
    )
    known.stack.push_async_callback(made.close)
    findings = []
    for name, row in {row.get("agent_name"): row for row in known.all_rows}.items():
        try:
            await made.preflight([row])
            made.collector.require_branching([row])
            findings.append(say.ok(f"{name or '(the default)'}: ready"))
        except ConfigError as error:
            findings += [say.fail(f"{name or '(the default)'}: {problem}") for problem in error.problems]
    return findings


async def engine(known: Known, say: Say) -> Iterable[Finding]:
    """The backend's packages, or its servers."""
    rollout = known.config.rollout
    findings = []
    try:
        check_engine(known.config)
        findings.append(say.ok(f"rollout.backend={rollout.backend}, placement {rollout.placement}"))
    except ConfigError as error:
        findings += [say.fail(problem) for problem in error.problems]
    if rollout.placement != "colocated":
        findings.append(require_extra(say, "ray", f"rollout.placement={rollout.placement}"))
    if (lora := known.config.learner.lora) and lora.quantize != "none":
        findings.append(require_extra(say, "qlora", f"learner.lora.quantize={lora.quantize}"))
    return [*findings, *[await _server(say, url, rollout.token_env) for url in rollout.urls]]


async def _server(say: Say, url: str, token_env: str | None) -> Finding:
    token = os.environ.get(token_env) if token_env else None  # that it is missing has been said
    backend = RemoteBackend(url, token=token, start_seconds=_REMOTE_SECONDS)
    try:
        await backend.start()
        health = await backend.health()
    except JaxAgentRLError as error:
        return say.fail(f"{url}: {error}; start it with: jax-agent-rl rollout-server --config CONFIG")
    finally:
        await backend.close()
    if not health.ok:
        return say.fail(f"{url} is not well: {health.detail}")
    if health.policy_version >= 0:
        return say.warn(
            f"{url} serves policy version {health.policy_version} of an earlier run, and would refuse the first "
            "weights of a new one; restart it before that"
        )
    return say.ok(f"{url} is well, with the model's own weights")


async def shared_memory(known: Known, say: Say) -> Iterable[Finding]:
    """Through which weights pass to engines in other processes."""
    rollout = known.config.rollout
    if rollout.weight_dir or (rollout.backend == "jetstream" and rollout.placement == "colocated"):
        return []
    if not _SHARED_MEMORY.is_dir():
        raise UnmetError(f"there is no {_SHARED_MEMORY}")
    need, free = 4 * known.parameters, shutil.disk_usage(_SHARED_MEMORY).free
    if free < need:
        return [
            say.fail(
                f"{_SHARED_MEMORY} has {gib(free)} free, weights take up to {gib(need)}; make it larger (docker: "
                "--shm-size), or set rollout.weight_dir"
            )
        ]
    return [say.ok(f"{_SHARED_MEMORY}: {gib(free)} free")]


async def coordinator(known: Known, say: Say) -> Iterable[Finding]:
    """The address at which the learner's processes meet."""
    multihost = known.config.learner.multihost
    host, colon, port = (multihost.coordinator or "").rpartition(":")
    if not colon:
        return []
    if not port.isdigit():
        return [say.fail(f"learner.multihost.coordinator={multihost.coordinator}: write host:port")]
    if multihost.process_id == 0 and not is_free("", int(port)):
        return [say.fail(f"port {port} of learner.multihost.coordinator={multihost.coordinator} is in use; choose one")]
    return [say.ok(f"{multihost.coordinator}, {multihost.num_processes or '?'} processes")]


async def _nothing_to_score(trajectory: Trajectory) -> Trajectory:
    """No trajectory is run here."""
    raise UnmetError(f"{trajectory.trajectory_id} was to be scored, but the doctor runs none")
