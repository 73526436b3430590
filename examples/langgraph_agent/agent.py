"""A LangGraph graph of one's own: the model thinks and calls tools until it answers."""

from __future__ import annotations

from typing import Any

from langgraph.graph import START, MessagesState, StateGraph

from jax_agent_rl.agents import ReactAgentLoop, register_agent
from jax_agent_rl.agents.langgraph import CallNode, calls_condition


@register_agent("calculator_graph")
class CalculatorGraph(ReactAgentLoop):
    """ReAct over the run's tools. Any other graph goes here; the trainer only sees what the model
    sampled.
    """

    def build_graph(self, model, tools):
        policy = model.bind_tools(tools)

        async def think(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_node("tools", CallNode(model.recorder, tools))
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", calls_condition)
        graph.add_edge("tools", "think")
        return graph.compile()
