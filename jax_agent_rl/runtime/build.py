"""The components of a run in one process: engine and learner on its devices, agents on one asyncio loop."""

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
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.critic import critic_shapes
from jax_agent_rl.learner.learner import Learner, ScoreContexts
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_config, load_hf
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.observe.sinks.traces import open_tracer
from jax_agent_rl.runtime.engines import backend_factories, check_turns, engine_mesh, one_program, read_model
from jax_agent_rl.runtime.multihost import ControlChannel, LeadingCheckpointer, LeadingLearner, follow
from jax_agent_rl.runtime.multihost_engines import (
    host_engine,
    join_hosts,
    make_host_engine,
    make_weight_buffer,
    on_every_host,
)
from jax_agent_rl.runtime.placement import FleetMetrics, first_version, open_places, place_engines, room_for_learning
from jax_agent_rl.runtime.publishers import make_publisher
from jax_agent_rl.runtime.sampling import open_agents, prepare
from jax_agent_rl.trainer.components import RunComponents


def require_used(config: Config, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse keys that neither the agents of these rows nor the model use.

    Raises:
        ConfigError: there are such keys, or an agent is unknown.
        ModelError: the model's ``config.json`` is missing or of an unknown family.
    """
    facts = Facts(agents=select_agents(config, rows), has_vision=load_config(config.model.path).vision is not None)
    if problems := list(unused(config, facts)):
        raise ConfigError(problems)


@asynccontextmanager
async def build(
    config: Config, *, print_line: Callable[[str], None], channel: ControlChannel | None = None
) -> AsyncIterator[RunComponents]:
    """Load, compile and start everything; close it in the end.

    Cheap checks come first, so that a wrong path is reported before minutes of loading.

    Args:
        config: the resolved configuration.
        print_line: takes a line of progress.
        channel: commands the learner's other processes, if any (``runtime.multihost``).

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
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
        tracer = await stack.enter_async_context(open_tracer(config.trace, RunDir(Path(config.run_dir))))
        client, agents = await stack.enter_async_context(open_agents(config, prepared, tracer=tracer))
        agents.collector.require_branching(train)
        await agents.preflight([*train, *heldout])
        print_line(f"loading {config.model.path}")
        probe_ids = codec.encode_prompt(train[0]["prompt"])
        model = read_model(config, codec, probe_ids)
        shared = one_program(config, model)
        learner = make_learner(config, model, score_by=shared and shared.score, channel=channel)
        weight_buffer = make_weight_buffer(config) if on_every_host(config) else None
        publisher = make_publisher(config, model, probe_ids=probe_ids, weight_buffer=weight_buffer)
        stack.callback(publisher.close)
        here = backend_factories(
            config,
            codec,
            weights=lambda: (model, learner.params),  # the learner's copy: with adapters it may be quantized
            print_line=print_line,
            version=first_version(config),
            table=shared and shared.table,
        )
        if weight_buffer is not None:
            here = {"host-0": functools.partial(make_host_engine, config, weight_buffer, print_line=print_line)}
        stack.push_async_callback(client.close)
        print_line(f"starting the {config.rollout.backend} engine")
        await client.start(place_engines(config, places, here))
        beside = [*here, *(await join_hosts(client) if weight_buffer is not None else [])]
        yield RunComponents(
            config=config,
            codec=codec,
            metrics=FleetMetrics(lambda: client.backends).read,
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
    """Refuse to train on samples of other policies than the learner's.

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


def make_learner(
    config: Config,
    model: DecoderConfig,
    *,
    score_by: ScoreContexts | None = None,
    channel: ControlChannel | None = None,
) -> Learner | LeadingLearner:
    """Return the learner of ``model.path``, with a critic if configured.

    Args:
        config: the resolved configuration.
        model: the policy's hyperparameters.
        score_by: computes old log-probs with ``rollout.deterministic``.
        channel: commands the learner's other processes, see ``runtime.multihost``.

    Raises:
        ConfigError: the mesh does not divide the model, or the critic has another architecture.
        ModelError: files are missing or damaged.
    """
    learner = Learner(
        model,
        _read(config.model.path, model, config),
        algorithm=config.algorithm,
        config=config.learner,
        temperature=config.rollout.temperature,
        critic=config.critic,
        critic_init=_critic_init(config, model),
        score_by=score_by,
        total_steps=config.trainer.steps,
        vision_processor=VisionProcessor.of(model, config.model.path, pixels=config.model.pixels),
    )
    return learner if channel is None else LeadingLearner(learner, channel)


def open_checkpointer(
    folder: Path | str, *, keep: int, channel: ControlChannel | None
) -> Checkpointer | LeadingCheckpointer:
    """Open the checkpoints of all processes, in one folder."""
    return (
        Checkpointer(folder, keep=keep) if channel is None else LeadingCheckpointer(folder, keep=keep, channel=channel)
    )


def follow_run(config: Config) -> None:
    """Execute a whole run on a process other than 0: its learner, and the engine on its devices."""
    learner = make_learner(config, load_config(config.model.path))
    assert isinstance(learner, Learner)
    with host_engine(config) as weight_buffer:
        follow(learner, weight_buffer)


def _critic_init(config: Config, policy: DecoderConfig) -> Params | None:
    """Return the weights of ``critic.path``; None if the critic starts from the policy's."""
    if config.critic.path is None:
        return None
    model = load_config(config.critic.path)
    if critic_shapes(model) != critic_shapes(policy):
        raise ConfigError(
            f"critic.path={config.critic.path!r} holds a model of other shapes than {config.model.path!r}; give one of "
            "the same architecture, or leave it out"
        )
    return _read(config.critic.path, model, config)


def _read(path: str, model: DecoderConfig, config: Config) -> Params:
    """Return a model's parameters on the learner's mesh; each device's shard is read separately."""
    mesh = make_mesh(config.learner.mesh)
    return load_hf(path, shardings=parameter_shardings(mesh, model.parameter_shapes()))[1]
