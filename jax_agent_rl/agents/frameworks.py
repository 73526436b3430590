"""Agents of other frameworks: functions with an OpenAI client, and LangGraph graphs.

Any agent that is written against an OpenAI client::

    @openai_agent("my_agent")
    async def run(base_url, api_key, row):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        …                         any framework, any number of turns, tools, sub-agents
        return "what it found"    optional: the reward function's extra_info["agent_output"]

Each trajectory gets a session of its own on an endpoint that this process serves on loopback. What
the policy sampled in the session is trained on, id by id; the function only ever sees text.
Temperature and other sampling settings of its requests are set aside for the run's own,
``max_tokens`` and ``stop`` hold.

Any LangGraph graph; the default one is ReAct: the model calls tools until it answers::

    @register_agent("my_graph")
    class MyGraph(ReactAgentLoop):
        def build_graph(self, model, tools):             a graph of your own over the policy …
            return create_agent(model, tools)

        async def run_graph(self, row, model, tools):    … or anything else that talks to it
            …

``play`` as a whole may be overridden as well. What the model sampled is never tokenized again: the
graph's messages are matched with the turns on record. If a graph edits them, another segment
begins, or the trajectory is dropped (``agent.edited_history``). If an agent fails, its trajectory
is dropped with the reason.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.prompt import openai_prompt
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.request import EpisodeRequest
from jax_agent_rl.agents.session_tree import to_trajectory
from jax_agent_rl.agents.tool_agent import tool_session
from jax_agent_rl.errors import AgentTimeoutError, ConfigError, TrajectoryError
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.failures import user_code_error
from jax_agent_rl.utils.loop_watch import at_work
from jax_agent_rl.utils.network import is_loopback
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.timeouts import DaemonThreads

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable

    from jax_agent_rl.agents.endpoint.sessions import Session, SessionStore
    from jax_agent_rl.agents.langgraph import ChatModel, TrajectoryTool
    from jax_agent_rl.utils.http_server import HttpServer


RunAgent = Callable[[str, str, Mapping[str, Any]], Any | Awaitable[Any]]
"""``run(base_url, api_key, row)``; a function that is not async runs in a thread."""


def openai_agent(name: str = "openai_agent") -> Callable[[RunAgent], RunAgent]:
    """Register a function as the agent loop ``name``; put its file in ``agent.module``.

    Raises:
        ConfigError: the name is taken.
    """

    def register(function: RunAgent) -> RunAgent:
        members = {"function": staticmethod(function), "__module__": __name__}
        register_agent(name)(type(f"OpenAIAgent_{name}", (OpenAIAgentLoop,), members))
        return function

    return register


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAccess:
    """How a program reaches the policy in its session.

    Attributes:
        host_url: the session's address, as Anthropic's clients take it; OpenAI's add ``/v1``.
        api_key: the session's key.
    """

    host_url: str
    api_key: str = field(repr=False)

    @classmethod
    def of_session(cls, session: Session, address: str) -> ModelAccess:
        """Return the way to a session of the endpoint at ``address``, a URL without a path."""
        return cls(
            host_url=f"{address}/sessions/{session.session_id}", api_key=session.api_key or ""
        )

    @property
    def base_url(self) -> str:
        """The session's address, as OpenAI's clients take it."""
        return f"{self.host_url}/v1"

    @property
    def env(self) -> dict[str, str]:
        """The variables in which clients look for it."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.host_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "GOOGLE_GEMINI_BASE_URL": self.host_url,
            "GEMINI_API_KEY": self.api_key,
        }

    def fill_in(self, value: Any) -> Any:
        """Return a value with the places of address and key filled in, at any depth."""
        if isinstance(value, str):
            filled = value.replace("{base_url}", self.base_url)
            filled = filled.replace("{host_url}", self.host_url)
            return filled.replace("{api_key}", self.api_key)
        if isinstance(value, Mapping):
            return {key: self.fill_in(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.fill_in(item) for item in value]
        return value


class OpenAIAgentLoop(AgentLoop):
    """Runs :attr:`function` in a session per trajectory, and collects what the session recorded."""

    name: ClassVar[str] = "openai_agent"
    function: RunAgent
    endpoint_host = "127.0.0.1"
    """Address that the endpoint listens on."""
    endpoint_port = 0
    """Its port; 0 takes a free one."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self._threads = DaemonThreads(kind="agent", error=TrajectoryError)
        self._server: HttpServer | None = None
        self._store: SessionStore | None = None

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """See :class:`AgentLoop`.

        Raises:
            AgentTimeoutError: the function ran past ``agent.run_timeout``.
            TrajectoryError: it raised; for the reason of its last request, if that failed.
        """
        server, _ = self._serve()
        with self._session(request) as session:
            recorder = session.recorder
            access = ModelAccess.of_session(session, server.url)
            agent_row = {**request.row, "prompt": openai_prompt(request.row)}
            work = self._call(access.base_url, access.api_key, agent_row)
            output = await run_user_agent(work, recorder, timeout=self.context.limits.run_timeout)
        return self._trajectory(recorder, request, output)

    def _trajectory(
        self, recorder: ChatRecorder, request: EpisodeRequest, output: Any
    ) -> Trajectory:
        """Return what a session recorded, with what its program returned."""
        return to_trajectory(
            recorder.turns,
            request,
            agent_name=self.name,
            refused=recorder.refused,
            metrics=recorder.metrics,
            output=output,
        )

    async def close(self) -> None:
        """Close the endpoint and all its sessions."""
        server = self._server
        store = self._store
        self._server = None
        self._store = None
        if store is not None:
            store.close()
        if server is not None:
            await self._starting
            await server.close()

    async def _call(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        function = type(self).function
        if inspect.iscoroutinefunction(function):
            return await function(base_url, api_key, row)
        result = await self._threads.run(
            lambda: function(base_url, api_key, row), name=f"agent {self.name!r}"
        )
        if inspect.isawaitable(result):
            return await result
        return result

    @contextmanager
    def _session(self, request: EpisodeRequest) -> Iterator[Session]:
        """Hand out a session, with a key of its own, that ends with the block."""
        from jax_agent_rl.agents.endpoint.sessions import Session

        _, store = self._serve()
        recorder = ChatRecorder(
            self.context.for_request(request),
            session_id=request.trajectory_id,
            adapter=request.row.get("adapter"),
        )
        session = Session(
            session_id=secrets.token_hex(16),
            recorder=recorder,
            sampling=request.sampling,
            api_key=secrets.token_hex(24),
        )
        store.add(session)
        try:
            yield session
        finally:
            store.end(session.session_id)

    def _serve(self) -> tuple[HttpServer, SessionStore]:
        """Return the endpoint, started on first use."""
        if self._server is None or self._store is None:
            from jax_agent_rl.agents.endpoint.app import Endpoint
            from jax_agent_rl.agents.endpoint.sessions import SessionStore

            limits = self.context.limits.endpoint
            self._store = SessionStore(max_sessions=limits.max_sessions, ttl=limits.session_ttl)
            endpoint = Endpoint(
                self._store,
                model="policy",
                limits=limits,
                host=self.endpoint_host,
                port=self.endpoint_port,
                session_keys=not is_loopback(self.endpoint_host),
                failures=self.context.failures,
            )
            self._server = endpoint.server
            self._server.listen()
            self._starting = asyncio.create_task(self._server.start())
        return self._server, self._store


async def run_user_agent(work: Awaitable[Any], recorder: ChatRecorder, *, timeout: float) -> Any:
    """Await a user's agent; an exception drops the trajectory, unless a used-up budget explains it.

    Returns:
        The agent's result; None if it gave up because a budget was used up.

    Raises:
        AgentTimeoutError: it took longer.
        TrajectoryError: it failed.
    """
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            with at_work("the agent"):
                return await work
    except Exception as error:
        if limit.expired():
            raise AgentTimeoutError(
                f"{recorder.session_id}:"
                f" the agent did not end within agent.run_timeout={timeout:g} seconds"
            ) from error
        if recorder.refused is not None and recorder.turns:
            return None  # a limit refused the next turn, so the trajectory ends there
        if isinstance(error, TrajectoryError):
            raise
        # If a request failed, that is why the agent failed, and the reason of the drop.
        error_type = TrajectoryError if recorder.failure is None else type(recorder.failure)
        raise user_code_error(error_type, f"{recorder.session_id}: the agent", error) from error


def graph_messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the row's prompt for LangChain, which requires an id with every tool result.

    Raises:
        DataError: the prompt is not a list of messages.
    """
    messages = []
    for index, message in enumerate(openai_prompt(row)):
        if message["role"] == "tool":
            message = {"tool_call_id": f"prompt_{index}", **message}
        messages.append(message)
    return messages


@register_agent("react_agent")
class ReactAgentLoop(AgentLoop):
    """Runs a LangGraph graph over the policy and the run's tools; needs the extra ``langgraph``."""

    describes_tools = True

    def build_graph(self, model: ChatModel, tools: Sequence[TrajectoryTool]) -> Runnable:
        """Build the graph of one trajectory; its state has ``messages``. The default is ReAct."""
        from langgraph.graph import START, MessagesState, StateGraph

        from jax_agent_rl.agents.langgraph import CallNode, calls_condition

        policy = model.bind_tools(tools) if tools else model

        async def agent(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("tools", CallNode(model.recorder, tools))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", calls_condition)
        graph.add_edge("tools", "agent")
        return graph.compile()

    async def run_graph(
        self, row: Mapping[str, Any], model: ChatModel, tools: Sequence[TrajectoryTool]
    ) -> Any:
        """Run the graph on the row's prompt.

        Returns:
            JSON for the reward function's ``extra_info["agent_output"]``, or None.
        """
        # A turn takes two steps, the model and its tools; the run's own turn limit must come first.
        max_steps = 2 * self.context.limits.max_assistant_turns + 5
        graph = self.build_graph(model, tools)
        await graph.ainvoke({"messages": graph_messages(row)}, {"recursion_limit": max_steps})

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """See :class:`AgentLoop`.

        Raises:
            ConfigError: LangGraph is not installed.
            AgentTimeoutError: the graph ran past ``agent.run_timeout``.
            TrajectoryError: it raised; for the reason of the model's last call, if that failed.
        """
        try:
            from jax_agent_rl.agents.langgraph import ChatModel, TrajectoryTool
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"agent {self.name!r} needs {error.name!r}: {install_command('langgraph')}"
            ) from error
        recorder = ChatRecorder(
            self.context.for_request(request),
            session_id=request.trajectory_id,
            adapter=request.row.get("adapter"),
        )
        extra_info = request.row.get("extra_info") or {}
        selected = self.context.tools.select(extra_info.get("tool_selection"))

        async with tool_session(self.context, selected, request) as session:
            tools = []
            for tool in selected.values():
                tools.append(TrajectoryTool.wrap(tool, session=session, recorder=recorder))
            model = ChatModel(recorder=recorder, sampling=request.sampling)
            work = self.run_graph(request.row, model, tools)
            output = await run_user_agent(work, recorder, timeout=self.context.limits.run_timeout)
            scores = await session.calc_rewards()
        return to_trajectory(
            recorder.turns,
            request,
            agent_name=self.name,
            refused=recorder.refused,
            metrics={**recorder.metrics, **session.metrics},
            output=output,
            tool_scores=scores,
        )
