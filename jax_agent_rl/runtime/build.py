"""Everything of a run, built in one process: engine and learner on its devices, agents on one asyncio loop."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from jax_agent_rl.agents import select_agents
from jax_agent_rl.config import Config
from jax_agent_rl.config.conditions import Facts, unused
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.observe.metrics import RunFolder
from jax_agent_rl.observe.sinks.traces import open_tracer
from jax_agent_rl.runtime.engines import backend_factories, check_turns, engine_mesh, one_program, read_model
from jax_agent_rl.runtime.fleet import FleetMetrics
from jax_agent_rl.runtime.learners import make_learner
from jax_agent_rl.runtime.multihost import ControlChannel
from jax_agent_rl.runtime.multihost_engines import join_hosts, make_host_engine, make_weight_buffer, on_every_host
from jax_agent_rl.runtime.placement import first_version, open_places, place_engines, room_for_learning
from jax_agent_rl.runtime.publishers import make_publisher
from jax_agent_rl.runtime.sampling import open_agents, open_manager, prepare
from jax_agent_rl.trainer.components import RunComponents


def require_used(config: Config, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse keys that neither the agents of these rows nor the model use.

    Raises:
        ConfigError: names each of them; or an agent is not known.
        ModelError: the model's ``config.json`` is missing or of another family.
    """
    facts = Facts(agents=select_agents(config, rows), sees=load_config(config.model.path).vision is not None)
    if problems := list(unused(config, facts)):
        raise ConfigError(problems)


@asynccontextmanager
async def build(
    config: Config, *, say: Callable[[str], None], line: ControlChannel | None = None
) -> AsyncIterator[RunComponents]:
    """Loads, compiles and starts everything; closes it in the end.

    Cheap checks come first, so that a wrong path is reported before minutes of loading.

    Args:
        say: takes a line of progress.
        line: to the other processes of the learner, if there are any (``runtime.multihost``).

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: what a user has to fix.
    """
    heldout_source = [(config.data.eval, config.data.eval_limit)] if config.data.eval else []
    async with AsyncExitStack() as stack:
        prepared = await stack.enter_async_context(prepare(config, [(config.data.train, None), *heldout_source]))
        train, heldout = prepared.rows[0], [row for rows in prepared.rows[1:] for row in rows]
        require_used(config, [*train, *heldout])
        refuse_adapters(config, [*train, *heldout])
        codec = prepared.codec
        places = await stack.enter_async_context(open_places(config))
        mesh = make_mesh(config.learner.mesh)  # or a ConfigError, before anything is loaded
        if config.rollout.backend == "jetstream" and config.rollout.placement == "colocated":
            check_turns(config, mesh, engine_mesh(config))
        tracer = await stack.enter_async_context(open_tracer(config.trace, RunFolder(Path(config.run_dir))))
        client, agents = await stack.enter_async_context(open_agents(config, prepared, tracer=tracer))
        agents.collector.require_branching(train)
        await agents.preflight([*train, *heldout])
        say(f"loading {config.model.path}")
        probe_ids = codec.encode_prompt(train[0]["prompt"])
        model = read_model(config, codec, probe_ids)
        shared = one_program(config, model)
        learner = make_learner(config, model, score_by=shared and shared.score, line=line)
        shelf = make_weight_buffer(config) if on_every_host(config) else None
        publisher = make_publisher(config, model, probe_ids=probe_ids, shelf=shelf)
        stack.callback(publisher.close)
        here = backend_factories(
            config,
            codec,
            weights=lambda: (model, learner.params),  # as the learner keeps them: under adapters rounded, perhaps
            say=say,
            version=first_version(config),
            table=shared and shared.table,
        )
        if shelf is not None:
            here = {"host-0": functools.partial(make_host_engine, config, shelf, say=say)}
        manager = await stack.enter_async_context(open_manager(config, client))
        say(f"starting the {config.rollout.backend} engine")
        await manager.start(place_engines(config, places, here))
        beside = [*here, *(await join_hosts(manager) if shelf is not None else [])]
        yield RunComponents(
            config=config,
            codec=codec,
            metrics=FleetMetrics(lambda: manager.backends).read,
            client=client,
            collector=agents.collector,
            evaluator=agents.evaluator,
            learner=learner,
            publisher=publisher,
            cursor=DataCursor(train, seed=config.seed),
            heldout=heldout,
            room_for_learning=room_for_learning(config, client, beside),
        )


def refuse_adapters(config: Config, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to train on what another policy than the learner's samples.

    Raises:
        ConfigError: an adapter is configured, or a row names one.
    """
    named = sorted({row["adapter"] for row in rows if row.get("adapter")})
    if config.rollout.adapters or config.agent.adapter or named:
        raise ConfigError(
            f"rollout.adapters={sorted(config.rollout.adapters)}, agent.adapter={config.agent.adapter}, rows with "
            f"adapter {named}: the learner trains the model without them; remove them to train, or merge an adapter "
            "into the model. eval, rollout and serve sample with adapters"
        )
