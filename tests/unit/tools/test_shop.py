"""The quickstart's lookups."""

import pytest

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools.shop import PRICES, WEIGHTS, price, weight


def test_every_item_has_a_price_and_a_weight_of_two_digits():
    assert PRICES.keys() == WEIGHTS.keys() and len(PRICES) == 40
    for item in PRICES:
        assert (price(item), weight(item)) == (str(PRICES[item]), str(WEIGHTS[item]))
        assert 10 <= PRICES[item] <= 99 and 10 <= WEIGHTS[item] <= 99


@pytest.mark.parametrize("item", ["mugs", "Mug", "", "12 × mug"])
def test_what_is_not_in_the_catalogue_is_an_error_that_repeats_it(item: str):
    with pytest.raises(ToolError, match="no item"):
        price(item)
