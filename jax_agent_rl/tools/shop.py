"""The quickstart's tools: what an item of a small shop costs and weighs, and the calculator.

No prompt shows the catalogue, so a policy that does not call the tools can only guess.
"""

from __future__ import annotations

import random

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools.calculator import calculator
from jax_agent_rl.tools.function_tool import function_tool

__all__ = ["PRICES", "WEIGHTS", "calculator", "price", "weight"]

_ITEMS = (
    "bag ball bell book bowl box brush candle chair clock coat cup desk drum fan fork hat jar key"
    " kite knife lamp mat mirror mug pen plate pot ring rope rug shelf shirt shoe sofa spoon table"
    " tent toy vase"
).split()
_DRAWS = random.Random(0)
PRICES = {item: _DRAWS.randint(12, 98) for item in _ITEMS}
WEIGHTS = {item: _DRAWS.randint(12, 98) for item in _ITEMS}


@function_tool
def price(item: str) -> str:
    """Look up the price of one item.

    Args:
        item: Its name, e.g. "mug".
    """
    return _look_up(PRICES, item)


@function_tool
def weight(item: str) -> str:
    """Look up the weight of one item.

    Args:
        item: Its name, e.g. "mug".
    """
    return _look_up(WEIGHTS, item)


def _look_up(catalogue: dict[str, int], item: str) -> str:
    if item not in catalogue:
        raise ToolError(f"no item {item!r:.40}")
    return str(catalogue[item])
