"""Prompts go where their beginning was computed, if that is worth an uneven load."""

import random
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.rollout.prefix_index import BLOCK, PrefixIndex
from jax_agent_rl.rollout.routing import MORE, WORTH, Balancer

PROMPT = random.Random(0).choices(range(1000), k=32 * BLOCK)
OTHER = random.Random(1).choices(range(1000), k=32 * BLOCK)
chain = PrefixIndex.chain


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from("xy"), max_size=5)), max_size=12), st.data())
def test_the_longest_beginning_is_found_in_whole_blocks(prompts, data):
    index, last = PrefixIndex(), {}
    for server, blocks in prompts:
        index.add(chain("".join(block * BLOCK for block in blocks)), server)
        for end in range(1, len(blocks) + 1):
            last[tuple(blocks[:end])] = server
    wanted = data.draw(st.lists(st.sampled_from("xy"), max_size=5))
    known = list(takewhile(last.__contains__, (tuple(wanted[:end]) for end in range(1, len(wanted) + 1))))
    expected = (last[known[-1]], len(known) * BLOCK) if known else (None, 0)
    rest = data.draw(st.integers(0, BLOCK - 1))
    assert index.find(chain("".join(block * BLOCK for block in wanted) + "z" * rest)) == expected


def test_memory_is_bounded_and_ends_are_forgotten_before_beginnings():
    index = PrefixIndex(max_blocks=10)
    index.add(chain(PROMPT[: 8 * BLOCK]), "a")
    index.add(chain(OTHER[: 6 * BLOCK]), "b")
    assert len(index) == 10
    assert index.find(chain(PROMPT)) == ("a", 4 * BLOCK) and index.find(chain(OTHER)) == ("b", 6 * BLOCK)


def test_other_adapters_have_other_kv():
    index = PrefixIndex()
    index.add(chain(PROMPT, "adapter"), "a")
    assert index.find(chain(PROMPT)) == (None, 0)


def balancer(*servers):
    made = Balancer()
    for server in servers:
        made.add(server)
    return made


def test_a_group_stays_together_until_its_server_is_clearly_busier():
    b = balancer("a", "b", "c")
    members = [b.acquire(f"s{i}", chain(PROMPT)) for i in range(12)]
    assert members == ["a"] * (MORE + 1) + ["b"] * (MORE + 1) + ["c"] * (MORE + 4)
    for server in "abc" * 20:
        b.take(server)
    b.take("a", None, chain(OTHER))
    more = [b.acquire(f"t{i}", chain(OTHER)) for i in range(4)]
    assert more == ["a"] * 4, "among many, a few more are no matter"


def test_short_and_little_shared_beginnings_leave_the_load_even():
    for first, second in (
        (PROMPT[: WORTH - 1], PROMPT[: WORTH - 1]),
        (PROMPT, PROMPT[:WORTH] + OTHER + OTHER),
    ):
        b = balancer("a", "b")
        assert [b.acquire(None, chain(first)), b.acquire(None, chain(second))] == ["a", "b"]


def test_new_weights_and_lost_servers_leave_nothing_to_share():
    b = balancer("a", "b")
    b.take("b", None, chain(PROMPT))
    b.forget_prefixes()
    assert b.acquire(None, chain(PROMPT)) == "a"
    b.remove("a")
    b.add("a")
    b.release("b")
    assert b.acquire(None, chain(PROMPT)) == "b", "the first of two equals"
