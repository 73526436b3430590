"""The components of a run in one process: engine, learner and agents on one asyncio loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from jax_agent_rl.agents import select_agents
from jax_agent_rl.config import Config
from jax_agent_rl.config.base import Facts, unused
from jax_agent_rl.data.cursor import DataCursor, Mixture
from jax_agent_rl.data.dataset import RowsWithoutPrompts
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages.registry import find_estimator
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.critic import critic_shapes
from jax_agent_rl.learner.learner import Learner, ScoreContexts
from jax_agent_rl.learner.losses.policy import find_policy_loss
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner
from jax_agent_rl.learner.observations import IsText
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_config, load_hf
from jax_agent_rl.models.parameters import rounded_params
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.observe.sinks.traces import open_tracer
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.fleet_metrics import FleetMetrics
from jax_agent_rl.rollout.http.membership import MembershipServer
from jax_agent_rl.rollout.pool import BackendFactory
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.transport import WeightTransport
from jax_agent_rl.runtime.engine_devices import (
    check_turns,
    engine_mesh,
    idle_device_warnings,
    of_this_host,
)
from jax_agent_rl.runtime.engines import backend_factories, one_program, parameter_dtype, read_model
from jax_agent_rl.runtime.identity import RunIdentity, run_identity
from jax_agent_rl.runtime.multihost import (
    ControlChannel,
    LeadingCheckpointer,
    LeadingLearner,
    follow,
)
from jax_agent_rl.runtime.multihost_engines import (
    HostTransport,
    host_engine,
    join_hosts,
    make_host_engine,
    make_host_transport,
    on_every_host,
    publish_own_models,
    require_equal_models,
)
from jax_agent_rl.runtime.placement import (
    first_version,
    open_engine,
    place_engines,
    reserve_actors,
    room_for_learning,
)
from jax_agent_rl.runtime.rollouts import (
    encode_text_of,
    open_agents,
    open_codec,
    prepare,
    require_grammars,
    training_sources,
)
from jax_agent_rl.runtime.served_teachers import open_served_teachers
from jax_agent_rl.runtime.teachers import check_teachers, make_teachers, require_teachers
from jax_agent_rl.runtime.transports import make_transport
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

logger = logging.getLogger(__name__)


def require_used(config: Config, rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse keys that neither the agents of these rows nor the model use.

    Raises:
        ConfigError: there are such keys, or an agent is unknown.
        ModelError: the model's ``config.json`` is missing or of an unknown family.
    """
    model = load_config(config.model.path)
    facts = Facts(
        agents=select_agents(config, rows),
        has_vision=model.vision is not None,
        is_recurrent=model.delta_net is not None,
    )
    problems = list(unused(config, facts))
    if problems:
        raise ConfigError(problems)


@asynccontextmanager
async def build(
    config: Config,
    *,
    print_line: Callable[[str], None],
    channel: ControlChannel | None = None,
    folder: RunDir | None = None,
    check_identity: Callable[[RunIdentity], None] | None = None,
) -> AsyncIterator[RunComponents]:
    """Load, compile and start everything; close it in the end.

    Cheap checks come first, so that a wrong path is reported before minutes of loading.

    Args:
        print_line: prints a line of progress.
        channel: commands the learner's other processes, if any (``runtime.multihost``).
        folder: where traces go; None: the folder of ``run_dir``.
        check_identity: called with the run's identity before anything is loaded; raises if the run
            must not go on.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
    """
    training = training_sources(config)
    sources = list(training)
    if config.data.eval:
        sources.append((config.data.eval, config.data.eval_limit))

    async with AsyncExitStack() as stack:
        # Checks that need only the configuration and the rows.
        prepared = await stack.enter_async_context(prepare(config, sources))
        codec = prepared.codec
        training_datasets = prepared.rows[: len(training)]
        heldout_datasets = prepared.rows[len(training) :]
        training_rows = RowsWithoutPrompts(*training_datasets)
        all_rows = RowsWithoutPrompts(*prepared.rows)

        require_used(config, all_rows)
        # An installed package that registers them is imported now, not after minutes of loading.
        find_policy_loss(config.algorithm.policy_loss.loss_mode)
        find_estimator(config.algorithm.adv_estimator)
        refuse_adapters(config, all_rows)
        require_teachers(config, training_rows)
        check_teachers(config)

        print_line("reading what the run is of")
        identity = run_identity(config, [dataset.fingerprint for dataset in training_datasets])
        if check_identity is not None:
            check_identity(identity)
        if channel is not None:
            await require_equal_models(identity.content)

        # Devices, before anything is loaded onto them.
        actor_options = await stack.enter_async_context(reserve_actors(config))
        learner_mesh = make_mesh(config.learner.mesh)
        sampling_mesh = None
        if config.rollout.backend == "jetstream" and config.rollout.placement != "separate":
            sampling_mesh = engine_mesh(of_this_host(config))
            check_turns(config, learner_mesh, sampling_mesh)
        for line in idle_device_warnings(config, sampling_mesh, learner_mesh):
            logger.warning(line)

        # Agents, which ask tool servers and sandboxes whether they are up.
        folder = folder or RunDir(Path(config.run_dir))
        tracer = await stack.enter_async_context(open_tracer(config.trace, folder))
        client, agents = await stack.enter_async_context(
            open_agents(config, prepared, tracer=tracer)
        )
        agents.collector.require_branching(training_rows)
        await agents.preflight(all_rows.located())

        # The learner.
        print_line(f"loading {config.model.path}")
        probe_ids = encode_text_of(codec, training_datasets[0][0])
        model = read_model(config, codec, probe_ids)
        program_table, score_by = one_program(config, model) or (None, None)
        teach = await stack.enter_async_context(
            open_served_teachers(config, model, probe_ids=probe_ids, print_line=print_line)
        )
        learner = make_learner(config, model, score_by=score_by, channel=channel)
        transport: WeightTransport
        if on_every_host(config):
            transport = make_host_transport(config)
        else:
            transport = make_transport(config, model, client.pool, probe_ids=probe_ids)
        stack.callback(transport.release)

        # The engines: of this process, in Ray actors, on the learner's other hosts.
        local_engines: dict[str, BackendFactory]
        if isinstance(transport, HostTransport):
            make_engine = functools.partial(
                make_host_engine, config, transport, print_line=print_line
            )
            local_engines = {"host-0": make_engine}
        else:
            local_engines = backend_factories(
                config,
                codec,
                weights=lambda: (model, initial_weights(config, learner.params)),
                print_line=print_line,
                version=first_version(config),
                program_table=program_table,
            )
        # Entered before the client's close is pushed, so that what engines that joined later run in
        # is released after they are closed.
        later_reservations = await stack.enter_async_context(AsyncExitStack())
        stack.push_async_callback(client.pool.close)
        print_line(f"starting the {config.rollout.backend} engine")
        client.pool.check_server = functools.partial(check_server, config, client)
        await client.pool.start(place_engines(config, actor_options, local_engines))
        colocated_names = list(local_engines)
        if isinstance(transport, HostTransport):
            colocated_names += await join_hosts(client)

        membership = MembershipServer(
            client.pool,
            Path(config.run_dir),
            open_engine=functools.partial(open_engine, config),
            reservations=later_reservations,
        )
        stack.push_async_callback(membership.close)
        await membership.start()

        weights = [source.weight or 1.0 for source in config.data.train[: len(training_datasets)]]
        mixture = Mixture(training_datasets, weights)
        yield RunComponents(
            config=config,
            codec=codec,
            metrics=FleetMetrics(lambda: client.pool.backends).read,
            client=client,
            collector=agents.collector,
            evaluator=agents.evaluator,
            learner=learner,
            transport=transport,
            cursor=DataCursor(
                mixture,
                seed=config.seed,
                shuffle=config.data.shuffle,
                curriculum=config.data.curriculum,
            ),
            heldout=heldout_datasets[0] if heldout_datasets else [],
            training_rows=training_rows,
            teach=teach,
            room_for_learning=room_for_learning(config, client, colocated_names),
            identity=identity.to_json(),
        )


def initial_weights(config: Config, params: Params) -> Params:
    """Return the learner's weights in the dtype of the updates that follow.

    An engine of this process that takes its updates from the object store gets them rounded. With
    adapters, the model may be quantized.
    """
    dtype = AS_THEY_ARE
    if config.rollout.placement == "hybrid":
        dtype = parameter_dtype(config)
    return rounded_params(params, dtype)


def refuse_adapters(config: Config, rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse to train on samples of other policies than the learner's.

    Raises:
        ConfigError: an adapter is configured, or a row names one.
    """
    row_adapters = set()
    for row in rows:
        if row.get("adapter"):
            row_adapters.add(row["adapter"])
    if config.rollout.adapters or config.agent.adapter or row_adapters:
        raise ConfigError(
            f"rollout.adapters={sorted(config.rollout.adapters)},"
            f" agent.adapter={config.agent.adapter}, rows with adapter {sorted(row_adapters)}: the"
            " learner trains the model without them; remove them to train, or merge an adapter into"
            " the model. eval, rollout and serve sample with adapters"
        )


def require_replay(config: Config, server: AsyncServer) -> None:
    """Refuse to train on draws from a part of the vocabulary that the engine does not report.

    Raises:
        ConfigError: the configuration restricts sampling, and the engine cannot replay it.
    """
    rollout = config.rollout
    settings = []
    if rollout.restricts_sampling:
        settings.append(
            f"rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k}, min_p={rollout.min_p:g}"
        )
    if config.agent.constrain_tool_calls:
        settings.append("agent.constrain_tool_calls=true")
    if settings and not server.backend.capabilities.sampling_replay:
        raise ConfigError(
            f"{' and '.join(settings)}: {server.name} (rollout.backend={rollout.backend}) does not"
            " report which ids its draws were made from, so the learner cannot score them; leave"
            " them out, or sample with the built-in jetstream engine"
        )


def check_server(config: Config, client: LLMServerClient, server: AsyncServer) -> None:
    """Check that an engine can serve a training run, also one that joins or comes back.

    Raises:
        ConfigError: it lacks an ability that the configuration uses, or input that the other
            engines take.
    """
    require_replay(config, server)
    require_grammars(config, server)
    missing_modalities = client.modalities - server.backend.capabilities.multi_modal
    if missing_modalities:
        raise ConfigError(
            f"{server.name} takes no {' and '.join(sorted(missing_modalities))} input, as the other"
            " engines of the run do; start it with the run's configuration"
        )


def make_learner(
    config: Config,
    model: DecoderConfig,
    *,
    score_by: ScoreContexts | None = None,
    channel: ControlChannel | None = None,
) -> Learner | LeadingLearner | MultiAdapterLearner:
    """Return the learner of ``model.path``, with a critic or several adapters if configured.

    Args:
        score_by: computes old log-probs with ``rollout.deterministic``.
        channel: commands the learner's other processes, see ``runtime.multihost``.

    Raises:
        ConfigError: the mesh does not divide the model, or the critic has another architecture.
        ModelError: files of the policy, the critic or a teacher are missing or damaged.
    """
    learner = Learner(
        model,
        _load_params(config.model.path, model, config),
        algorithm=config.algorithm,
        config=config.learner,
        temperature=config.rollout.temperature,
        critic=config.critic,
        critic_init=_load_critic(config, model),
        score_by=score_by,
        teachers=make_teachers(config, model),
        is_text=_observed_text(config),
        total_steps=config.trainer.steps,
        vision_processor=VisionProcessor.of(model, config.model.path, pixels=config.model.pixels),
    )

    adapters = sorted(set(config.agent.role_adapters.values()))
    if adapters and config.learner.lora is not None:
        if channel is not None:
            raise ConfigError(
                f"agent.role_adapters trains {adapters} on one host; remove learner.multihost, or"
                " agent.role_adapters"
            )
        return MultiAdapterLearner(learner, config.learner.lora, adapters)

    if channel is not None:
        return LeadingLearner(learner, channel)
    return learner


def _observed_text(config: Config) -> IsText | None:
    """Return what tells observations from the chat template's ids; None: nothing has to."""
    loss = config.algorithm.observation_loss
    if not loss.coef or loss.template:
        return None
    return open_codec(config).append_markup().is_text


def open_checkpointer(
    folder: Path | str, *, keep: int, channel: ControlChannel | None
) -> Checkpointer:
    """Open the checkpoints of all processes, in one folder."""
    if channel is None:
        return Checkpointer(folder, keep=keep)
    return LeadingCheckpointer(folder, keep=keep, channel=channel)


def follow_run(config: Config) -> None:
    """Execute a whole run on a process other than 0: its learner, and the engine on its devices.

    Raises:
        ModelError: a model cannot be read.
    """
    publish_own_models(config)
    learner = make_learner(config, load_config(config.model.path, weights=True))
    assert isinstance(learner, Learner)
    with host_engine(config) as put_weights:
        follow(learner, put_weights)


def _load_critic(config: Config, policy: DecoderConfig) -> Params | None:
    """Return the weights of ``critic.path``; None if the critic starts from the policy's."""
    if config.critic.path is None:
        return None

    model = load_config(config.critic.path, weights=True)
    if critic_shapes(model) != critic_shapes(policy):
        raise ConfigError(
            f"critic.path={config.critic.path!r} holds a model of other shapes than"
            f" {config.model.path!r}; give one of the same architecture, or leave it out"
        )
    return _load_params(config.critic.path, model, config)


def _load_params(path: str, model: DecoderConfig, config: Config) -> Params:
    """Return a model's parameters on the learner's mesh; each device's shard is read separately."""
    mesh = make_mesh(config.learner.mesh)
    shardings = parameter_shardings(mesh, model.parameter_shapes())
    _, params = load_hf(path, shardings=shardings)
    return params
