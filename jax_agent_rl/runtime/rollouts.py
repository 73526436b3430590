"""The part of a run that samples: rows, tools, rewards, agents, engines.

Training adds a learner (:mod:`~jax_agent_rl.runtime.build`); evaluation and collection need none
(:func:`open_rollouts`).

::

    prepare ─────► reserve_actors ──► open_agents ──► preflight ──► engines start
    cheap checks   Ray                judge, users    servers
"""

from __future__ import annotations

import functools
import logging
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from jax_agent_rl.agents import (
    AgentContext,
    EnvironmentAgent,
    FrozenModel,
    agent_names,
    get_agent,
    load_agents,
)
from jax_agent_rl.agents.prompt import codec_of_row, encode_prompt
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.collect.collector import RolloutCollector, Score
from jax_agent_rl.collect.groups import TimeLimits
from jax_agent_rl.collect.strategies import make_strategy
from jax_agent_rl.config import Config, DataSource
from jax_agent_rl.config.default_agent import report_idle_tools
from jax_agent_rl.data.dataset import Dataset, RowsWithoutPrompts, open_dataset
from jax_agent_rl.data.reader import LocatedRow, Row, located
from jax_agent_rl.data.rows import RowChecks
from jax_agent_rl.environments import EnvironmentPools, load_environments, require_environment
from jax_agent_rl.environments.users import EngineChat, InteractionRegistry
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.engines import (
    backend_factories,
    check_engine,
    load_model,
    make_client,
    read_model,
)
from jax_agent_rl.runtime.placement import place_engines, reserve_actors
from jax_agent_rl.runtime.scoring import (
    needed_services,
    open_role_models,
    open_scorer,
    reward_server,
)
from jax_agent_rl.tools.registry import ToolRegistry, open_tools
from jax_agent_rl.tracing import Tracer
from jax_agent_rl.utils.failures import FailureLog
from jax_agent_rl.utils.loop_watch import watch_loop
from jax_agent_rl.utils.media import text_content

logger = logging.getLogger(__name__)
_NO_MODELS: Mapping[str, FrozenModel] = MappingProxyType({})

Source = tuple[tuple[DataSource, ...], int | None]
"""Files of rows, and how many of the rows are used from the start (None: all)."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of the cheap checks of a configuration.

    Attributes:
        tools: the open tools of the ``tools`` section.
        rows: the rows of each source.
        services: the services that the rows' reward functions need.
        codec: converts messages to token ids and back.
    """

    tools: ToolRegistry
    rows: list[Dataset]
    services: set[str]
    codec: ChatCodec


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Everything that samples, started.

    Attributes:
        client: generates with all engines.
        codec: converts messages to token ids and back.
        rows: the rows to sample for.
    """

    config: Config
    client: LLMServerClient
    agents: AgentSide
    codec: ChatCodec
    rows: Dataset


@dataclass(frozen=True, kw_only=True)
class AgentSide:
    """The collectors of training and held-out rollouts, and what their agents share.

    Attributes:
        collector: training rollouts, with the run's accounting.
        evaluator: held-out rollouts with the ``agent.val_`` settings, counted separately.
        interactions: the simulated users.
        environments: pools for ``environment_agent``.
        failures: reports failures of tools, rewards, environments, users and agents.
    """

    collector: RolloutCollector
    evaluator: RolloutCollector
    interactions: InteractionRegistry
    environments: EnvironmentPools
    failures: FailureLog

    async def preflight(self, rows: Iterable[LocatedRow]) -> None:
        """Check, before a run, what these rows need: simulated users and their agents' servers.

        Raises:
            ConfigError: a server or setting is missing or wrong.
            DataError: a row names an unknown interaction.
        """
        await self.collector.preflight(_require_known_users(rows, self.interactions))

    async def close(self) -> None:
        """Close connections, after the last trajectory."""
        await self.collector.close()
        await self.evaluator.close()
        await self.interactions.close()
        await self.environments.close()
        self.failures.flush()


@asynccontextmanager
async def prepare(config: Config, sources: Sequence[Source]) -> AsyncIterator[Prepared]:
    """Import what the configuration names and read the rows.

    Tools and reward server are closed in the end.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
    """
    async with open_tools(config.tools) as tools, reward_server(config):
        load_agents(config.agent.module)
        load_environments(config.environments.path)

        datasets = [read_rows(config, tools, source) for source in sources]
        for (files, _), dataset in zip(sources, datasets, strict=True):
            warn_of_idle_tools(config, files, RowsWithoutPrompts(dataset))
        services = needed_services(config, RowsWithoutPrompts(*datasets))

        codec = open_codec(config)
        _require_modalities(config, codec, datasets)
        check_engine(config)
        yield Prepared(tools=tools, rows=datasets, services=services, codec=codec)


def training_sources(config: Config) -> list[Source]:
    """Return the sources of ``data.train`` that are shuffled by themselves.

    With weights, each is a source of its own; without, all are one.
    """
    if config.data.train[0].weight is None:
        return [(config.data.train, None)]
    return [((source,), None) for source in config.data.train]


def warn_of_idle_tools(config: Config, files: Sequence[DataSource], rows: Collection[Row]) -> None:
    """Log a warning if these rows of ``files`` use none of the configured tools."""
    report = report_idle_tools(config, rows)
    if report:
        names = ", ".join(str(file) for file in files)
        problem, fix = report
        logger.warning(
            "TOOLS ARE CONFIGURED BUT NOT USED: %s: %s. What to do: %s", names, problem, fix
        )


def open_codec(config: Config) -> ChatCodec:
    """Return the model's tokenizer and chat template as the run uses them.

    Raises:
        ModelError: they cannot be read.
    """
    return ChatCodec.from_pretrained(
        config.model.path,
        tool_format=config.agent.tool_format,
        tool_prompt=config.agent.tool_prompt,
        pixels=config.model.pixels,
        template_kwargs=config.agent.chat_template_kwargs,
    )


@asynccontextmanager
async def open_agents(
    config: Config, prepared: Prepared, *, tracer: Tracer | None = None
) -> AsyncIterator[tuple[LLMServerClient, AgentSide]]:
    """Yield the client, still without engines, and its agents; close them in the end.

    Raises:
        ConfigError, ModelError: a service, the default agent or an interaction is missing or wrong.
    """
    client = make_client(config, prepared.codec)
    async with (
        open_scorer(config, prepared.services, client=client, codec=prepared.codec) as score,
        open_role_models(config) as frozen,
    ):
        agents = make_agents(
            config,
            client=client,
            codec=prepared.codec,
            tools=prepared.tools,
            score=score,
            tracer=tracer,
            frozen=frozen,
        )
        try:
            with watch_loop(agents.failures.report):
                yield client, agents
        finally:
            await agents.close()


def make_agents(
    config: Config,
    *,
    client: LLMServerClient,
    codec: ChatCodec,
    tools: ToolRegistry,
    score: Score,
    tracer: Tracer | None = None,
    frozen: Mapping[str, FrozenModel] = _NO_MODELS,
) -> AgentSide:
    """Build the collectors; the client's engines may be added later.

    Raises:
        ConfigError: the default agent or an interaction is missing or wrong.
    """
    if config.agent.default_agent:
        get_agent(config.agent.default_agent)  # raises if there is none

    interactions = InteractionRegistry.from_path(
        config.interactions.interaction_config_path, timeout=config.interactions.timeout
    )
    interactions.attach(EngineChat(client, codec, max_model_len=config.rollout.max_model_len))

    failures = FailureLog()
    environments = EnvironmentPools(
        **config.environments.model_dump(exclude={"path"}), failures=failures
    )
    context = AgentContext(
        client=client,
        codec=codec,
        tools=tools,
        limits=config.agent,
        max_model_len=config.rollout.max_model_len,
        tool_config=config.tool_config,
        search=config.search,
        interactions=interactions,
        environments=environments,
        in_checkpoints=config.trainer.mode != "sync",
        failures=failures,
        frozen=frozen,
    )

    rollout = config.rollout
    collector = RolloutCollector(
        context,
        strategy=make_strategy(rollout.strategy),
        limits=TimeLimits(
            trajectory_timeout=rollout.trajectory_timeout,
            min_group_size=rollout.min_group_size,
            group_timeout=rollout.group_timeout,
        ),
        score=score,
        seed=config.seed,
        tracer=tracer,
        max_in_flight=rollout.max_in_flight,
    )
    # Held-out groups are never cut short.
    evaluator = RolloutCollector(
        replace(context, limits=config.agent.for_validation(), in_checkpoints=False),
        limits=TimeLimits(trajectory_timeout=rollout.trajectory_timeout),
        validate=True,
        score=score,
        seed=config.seed,
        tracer=tracer,
        max_in_flight=rollout.max_in_flight,
    )
    return AgentSide(
        collector=collector,
        evaluator=evaluator,
        interactions=interactions,
        environments=environments,
        failures=failures,
    )


@asynccontextmanager
async def open_rollouts(
    config: Config, source: Source, *, version: int, print_line: Callable[[str], None]
) -> AsyncIterator[Rollouts]:
    """Load, compile and start everything that samples from the model's files; close it in the end.

    Args:
        source: the rows to sample for.
        version: policy version of the model's files, for an engine in this process.
        print_line: prints a line of progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
    """
    async with AsyncExitStack() as stack:
        prepared = await stack.enter_async_context(prepare(config, [source]))
        (dataset,) = prepared.rows
        codec = prepared.codec
        actor_options = await stack.enter_async_context(reserve_actors(config, learner=False))
        client, agents = await stack.enter_async_context(open_agents(config, prepared))
        await agents.preflight(RowsWithoutPrompts(dataset).located())

        print_line(f"loading {config.model.path}")
        if config.rollout.backend != "remote":
            # Only the check that tokenizer and model belong together.
            read_model(config, codec, encode_text_of(codec, dataset[0]))
        local_engines = backend_factories(
            config,
            codec,
            weights=functools.partial(load_model, config, codec),
            print_line=print_line,
            version=version,
        )
        stack.push_async_callback(client.pool.close)
        print_line(f"starting the {config.rollout.backend} engine")
        client.pool.check_server = functools.partial(require_grammars, config)
        await client.pool.start(place_engines(config, actor_options, local_engines))
        yield Rollouts(config=config, client=client, agents=agents, codec=codec, rows=dataset)


def require_grammars(config: Config, server: AsyncServer) -> None:
    """Refuse ``agent.constrain_tool_calls`` with an engine that cannot follow grammars.

    Raises:
        ConfigError: the engine cannot, and should.
    """
    if config.agent.constrain_tool_calls and not server.backend.capabilities.grammars:
        raise ConfigError(
            f"agent.constrain_tool_calls=true, but {server.name} cannot follow grammars; set it to"
            " false, or sample with the built-in jetstream engine (without rollout.deterministic)"
            " or vllm"
        )


def encode_text_of(codec: ChatCodec, row: Row) -> list[int]:
    """Return the token ids of a row's prompt without its images and videos.

    There are none if the row's environment writes the prompt.
    """
    if not row["prompt"]:
        return []
    messages = [{**message, "content": text_content(message)} for message in row["prompt"]]
    ids, _ = encode_prompt(codec_of_row(codec, row), messages, ())
    return list(ids)


def read_rows(config: Config, tools: ToolRegistry | None, source: Source) -> Dataset:
    """Open the rows of a source, and check the names in them.

    Args:
        tools: the tools that rows may name; None: any.

    Raises:
        ConfigError, DataError: the file is missing, or a row is malformed or names something
            unknown.
    """
    files, limit = source
    adapters = None  # of remote engines, only their servers know the adapters
    if config.rollout.backend != "remote":
        adapters = list(config.rollout.adapters)
    tool_names = None if tools is None else list(tools)
    checks = RowChecks(agents=agent_names(), tools=tool_names, adapters=adapters)
    dataset = open_dataset(files, checks, limit=limit, row_groups=config.data.shuffle_row_groups)

    for location, row in RowsWithoutPrompts(dataset).located():
        agent_name = row.get("agent_name") or config.agent.default_agent
        if agent_name == EnvironmentAgent.name:
            with located(location):
                require_environment(row)
    return dataset


def _require_modalities(config: Config, codec: ChatCodec, datasets: Sequence[Dataset]) -> None:
    """Refuse images and videos that the model's chat template cannot show."""
    modalities: set[str] = set()
    for dataset in datasets:
        modalities |= dataset.modalities
    if not modalities:
        return

    unsupported = sorted(modalities - codec.modalities)
    if unsupported:
        kinds = " and ".join(f"{kind}s" for kind in unsupported)
        raise ConfigError(
            f"prompts of data.train or data.eval show {kinds}, which the chat template of"
            f" model.path={config.model.path!r} does not; choose a model that reads them"
            " (Qwen2.5-VL; images alone: Qwen3-VL, Qwen3.5), or other data"
        )


def _require_known_users(
    rows: Iterable[LocatedRow], interactions: InteractionRegistry
) -> Iterator[Row]:
    """Yield rows; raise DataError at one that names an unknown simulated user."""
    for location, row in rows:
        extra_info = row.get("extra_info") or {}
        interaction_kwargs = extra_info.get("interaction_kwargs") or {}
        name = interaction_kwargs.get("name")
        if name is not None and name not in interactions:
            raise DataError(
                f"{location}: extra_info.interaction_kwargs.name={name!r} is not known; there are"
                f" {sorted(interactions)} (interactions.interaction_config_path)"
            )
        yield row
