"""The part of a run that samples: rows, tools, rewards, agents, engines.

Training adds a learner (:mod:`~jax_agent_rl.runtime.build`); evaluation and collection need none
(:func:`open_rollouts`).

::

    prepare ──► open_places ──► open_agents ──► preflight ──► its engines start
    (cheap checks)  (Ray)       (judge, too)    (servers)
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
from jax_agent_rl.config.run import report_idle_tools
from jax_agent_rl.data.dataset import Dataset, RowOutlines, open_dataset
from jax_agent_rl.data.reader import PlacedRow, Row, located
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
from jax_agent_rl.runtime.placement import open_places, place_engines
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
        codec: converts messages to ids and back.
    """

    tools: ToolRegistry
    rows: list[Dataset]
    services: set[str]
    codec: ChatCodec


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Everything that samples, started.

    Attributes:
        config: the resolved configuration.
        client: generates with all engines.
        agents: the collectors.
        codec: converts messages to ids and back.
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
        failures: where failures of tools, rewards, environments, users and agents are told of.
    """

    collector: RolloutCollector
    evaluator: RolloutCollector
    interactions: InteractionRegistry
    environments: EnvironmentPools
    failures: FailureLog

    async def preflight(self, rows: Iterable[PlacedRow]) -> None:
        """Check, before a run, what these rows need: simulated users and the servers of their agents.

        Raises:
            ConfigError: a server or setting is missing or wrong.
            DataError: a row names an unknown interaction.
        """
        await self.collector.preflight(_with_known_users(rows, self.interactions))

    async def close(self) -> None:
        """Close connections, after the last trajectory."""
        for part in (self.collector, self.evaluator, self.interactions, self.environments):
            await part.close()
        self.failures.flush()


@asynccontextmanager
async def prepare(config: Config, sources: Sequence[Source]) -> AsyncIterator[Prepared]:
    """Import what the configuration names and read the rows; close tools and reward server in the end.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
    """
    async with open_tools(config.tools) as tools, reward_server(config):
        load_agents(config.agent.module)
        load_environments(config.environments.path)
        rows = [read_rows(config, tools, source) for source in sources]
        for (files, _), part in zip(sources, rows, strict=True):
            warn_of_idle_tools(config, files, RowOutlines(part))
        services = needed_services(config, RowOutlines(*rows))
        codec = open_codec(config)
        _require_modalities(config, codec, rows)
        check_engine(config)
        yield Prepared(tools=tools, rows=rows, services=services, codec=codec)


def training_sources(config: Config) -> list[Source]:
    """Return the sources of ``data.train`` that are shuffled by themselves: each one that has a weight, else all."""
    if config.data.train[0].weight is None:
        return [(config.data.train, None)]
    return [((source,), None) for source in config.data.train]


def warn_of_idle_tools(config: Config, files: Sequence[DataSource], rows: Collection[Row]) -> None:
    """Log a warning if these rows of ``files`` use none of the configured tools."""
    if idle := report_idle_tools(config, rows):
        named = ", ".join(map(str, files))
        logger.warning("TOOLS ARE CONFIGURED BUT NOT USED: %s: %s. What to do: %s", named, *idle)


def open_codec(config: Config) -> ChatCodec:
    """Return the model's tokenizer and chat template as the run uses them; raises ModelError if unreadable."""
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

    Args:
        config: the resolved configuration.
        prepared: see :func:`prepare`.
        tracer: takes the spans of trajectories.

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
        get_agent(config.agent.default_agent)
    users = config.interactions
    interactions = InteractionRegistry.from_path(
        users.interaction_config_path, timeout=users.timeout
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
        failures=failures,
        frozen=frozen,
    )
    rollout, parts = config.rollout, {"score": score, "seed": config.seed, "tracer": tracer}
    parts["max_in_flight"] = rollout.max_in_flight
    limits = TimeLimits(
        trajectory_timeout=rollout.trajectory_timeout,
        min_group_size=rollout.min_group_size,
        group_timeout=rollout.group_timeout,
    )
    return AgentSide(
        collector=RolloutCollector(
            context, strategy=make_strategy(rollout.strategy), limits=limits, **parts
        ),
        evaluator=RolloutCollector(
            replace(context, limits=config.agent.for_validation()),
            limits=TimeLimits(trajectory_timeout=rollout.trajectory_timeout),
            validate=True,
            **parts,
        ),
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
        config: the resolved configuration.
        source: the rows to sample for.
        version: policy version of the model's files, for an engine in this process.
        print_line: takes a line of progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
    """
    async with AsyncExitStack() as stack:
        prepared = await stack.enter_async_context(prepare(config, [source]))
        (rows,), codec = prepared.rows, prepared.codec
        places = await stack.enter_async_context(open_places(config, learner=False))
        client, agents = await stack.enter_async_context(open_agents(config, prepared))
        await agents.preflight(RowOutlines(rows).placed())
        print_line(f"loading {config.model.path}")
        if config.rollout.backend != "remote":
            read_model(config, codec, encode_text_of(codec, rows[0]))
        here = backend_factories(
            config,
            codec,
            weights=functools.partial(load_model, config, codec),
            print_line=print_line,
            version=version,
        )
        stack.push_async_callback(client.close)
        print_line(f"starting the {config.rollout.backend} engine")
        client.check_server = functools.partial(require_grammars, config)
        await client.start(place_engines(config, places, here))
        yield Rollouts(config=config, client=client, agents=agents, codec=codec, rows=rows)


def require_grammars(config: Config, server: AsyncServer) -> None:
    """Raise ConfigError if ``agent.constrain_tool_calls`` needs grammars that the engine cannot follow."""
    if config.agent.constrain_tool_calls and not server.backend.capabilities.grammars:
        raise ConfigError(
            f"agent.constrain_tool_calls=true, but {server.name} cannot follow grammars; set it to"
            " false, or sample with the built-in jetstream engine (without rollout.deterministic)"
            " or vllm"
        )


def encode_text_of(codec: ChatCodec, row: Row) -> list[int]:
    """Return ids of a row's prompt without its images and videos; none if its environment writes the prompt."""
    if not row["prompt"]:
        return []
    ids, _ = encode_prompt(
        codec_of_row(codec, row),
        [{**message, "content": text_content(message)} for message in row["prompt"]],
        (),
    )
    return list(ids)


def read_rows(config: Config, tools: ToolRegistry | None, source: Source) -> Dataset:
    """Open the rows of a source, and check the names in them.

    Args:
        config: the resolved configuration.
        tools: the tools that rows may name; None: any.
        source: files and count.

    Raises:
        ConfigError, DataError: the file is missing, or a row is malformed or names something
            unknown.
    """
    files, limit = source
    adapters = (
        None if config.rollout.backend == "remote" else list(config.rollout.adapters)
    )  # only its servers know
    names = None if tools is None else list(tools)
    checks = RowChecks(agents=agent_names(), tools=names, adapters=adapters)
    rows = open_dataset(files, checks, limit=limit, row_groups=config.data.shuffle_row_groups)
    default = config.agent.default_agent
    for place, row in RowOutlines(rows).placed():
        if (row.get("agent_name") or default) == EnvironmentAgent.name:
            with located(place):
                require_environment(row)
    return rows


def _require_modalities(config: Config, codec: ChatCodec, datasets: Sequence[Dataset]) -> None:
    """Refuse images and videos that the model's chat template cannot show."""
    shown = frozenset[str]().union(*(rows.modalities for rows in datasets))
    if shown and (unseen := sorted(shown - codec.modalities)):
        raise ConfigError(
            "prompts of data.train or data.eval show"
            f" {' and '.join(f'{kind}s' for kind in unseen)}, which the chat template of"
            f" model.path={config.model.path!r} does not; choose a model that reads them (Qwen2-VL,"
            " Qwen2.5-VL), or other data"
        )


def _with_known_users(rows: Iterable[PlacedRow], known: InteractionRegistry) -> Iterator[Row]:
    """Yield rows; raise DataError at one that names an unknown simulated user."""
    for place, row in rows:
        name = ((row.get("extra_info") or {}).get("interaction_kwargs") or {}).get("name")
        if name is not None and name not in known:
            raise DataError(
                f"{place}: extra_info.interaction_kwargs.name={name!r} is not known; there are"
                f" {sorted(known)} (interactions.interaction_config_path)"
            )
        yield row
