"""Trains any LangGraph graph; the default one is ReAct: the model calls tools until it answers.

::

    @register_agent("my_graph")
    class MyGraph(ReactAgentLoop):
        def build_graph(self, model, tools):             a graph of your own over the policy …
            return create_agent(model, tools)

        async def run_graph(self, row, model, tools):    … or anything else that talks to it
            …

``run`` may be overridden as a whole too. What the model sampled is never tokenized again: the graph's messages are
matched with the turns on record. A graph that edits them opens another segment, or loses the trajectory
(``agent.edited_history``). A graph that fails loses its trajectory with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.openai_loop import run_user_agent
from jax_agent_rl.agents.prompt import openai_prompt
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.session_tree import to_trajectory
from jax_agent_rl.agents.tool_agent import tool_session
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable

    from jax_agent_rl.agents.langgraph import ChatModel, TrajectoryTool


def graph_messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the row's prompt for LangChain, which requires an id with every tool result.

    Raises:
        DataError: the prompt is not a list of messages.
    """
    return [
        {"tool_call_id": f"prompt_{index}", **message} if message["role"] == "tool" else message
        for index, message in enumerate(openai_prompt(row))
    ]


@register_agent("react_agent")
class ReactAgentLoop(AgentLoop):
    """Runs a LangGraph graph over the policy and the run's tools; needs the extra ``langgraph``."""

    def build_graph(self, model: ChatModel, tools: Sequence[TrajectoryTool]) -> Runnable:
        """Build the graph of one trajectory; its state has ``messages``. The default is ReAct."""
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        policy = model.bind_tools(tools) if tools else model

        async def agent(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        return graph.compile()

    async def run_graph(self, row: Mapping[str, Any], model: ChatModel, tools: Sequence[TrajectoryTool]) -> Any:
        """Run the graph on the row's prompt.

        Returns:
            JSON for the reward function's ``extra_info["agent_output"]``, or None.
        """
        steps = 2 * self.context.limits.max_assistant_turns + 5  # the turn limit comes first
        graph = self.build_graph(model, tools)
        await graph.ainvoke({"messages": graph_messages(row)}, {"recursion_limit": steps})

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
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
                f"agent {self.name!r} needs {error.name!r}: pip install 'jax_agent_rl[langgraph]'"
            ) from error
        recorder = ChatRecorder(self.context, session_id=trajectory_id, adapter=row.get("adapter"))
        limits = self.context.limits
        selected = self.context.tools.select((row.get("extra_info") or {}).get("tool_selection"))
        async with tool_session(self.context, selected, row, trajectory_id) as session:
            tools = [
                TrajectoryTool.wrap(
                    tool, session=session, recorder=recorder, max_parallel_calls=limits.max_parallel_calls
                )
                for tool in selected.values()
            ]
            model = ChatModel(recorder=recorder, sampling=sampling)
            output = await run_user_agent(self.run_graph(row, model, tools), recorder, timeout=limits.run_timeout)
            scores = await session.calc_rewards()
        return to_trajectory(
            recorder,
            row=row,
            output=output,
            group_id=group_id,
            agent_name=self.name,
            metrics=session.metrics,
            tool_scores=scores,
        )
