"""The tools of the task: every @function_tool function of this file."""

from typing import Literal

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools import function_tool

MINUTES = {
    "Ash": 14,
    "Birch": 27,
    "Cedar": 35,
    "Elm": 48,
    "Fir": 52,
    "Hazel": 63,
    "Larch": 71,
    "Maple": 86,
    "Oak": 95,
    "Pine": 18,
    "Rowan": 33,
    "Willow": 59,
}


# Annotations and docstring become the schema that a model is shown (agent.tool_prompt), and that
# calls are checked by.
@function_tool
def minutes(station: str, trip: Literal["single", "return"]) -> str:
    """Look up how many minutes a train takes to a station.

    Args:
        station: Its name, e.g. "Oak".
        trip: One way, or there and back.
    """
    if station not in MINUTES:
        # A ToolError is for the model, which reads it and may try again. Any other exception is a
        # fault of the tool: the model is told so, and a warning gives you its file and line.
        raise ToolError(f"no station is called {station!r}; there are {', '.join(MINUTES)}")
    single = MINUTES[station]
    return str(single if trip == "single" else 2 * single)
