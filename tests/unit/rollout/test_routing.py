"""Routing: sticky per session, else where the prompt's beginning was computed, else least in
flight.
"""

import random
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_agent_rl.rollout.routing import (
    BLOCK,
    BUSY_MARGIN,
    MIN_SHARED_IDS,
    Balancer,
    PrefixIndex,
    RequestCosts,
)


def balancer(*servers, **kwargs):
    new_balancer = Balancer(**kwargs)
    for server in servers:
        new_balancer.add(server)
    return new_balancer


def test_requests_go_where_the_least_is_in_flight():
    b = balancer("a", "b")
    assert [b.acquire(), b.acquire(), b.acquire()] == ["a", "b", "a"]
    b.release("a")
    b.release("a")
    assert b.acquire() == "a"


def test_a_session_stays_where_it_is_even_when_others_are_idle():
    b = balancer("a", "b")
    assert [b.acquire("s") for _ in range(3)] == ["a"] * 3
    assert b.acquire("other") == "b"


def test_a_session_moves_when_its_server_is_gone_and_stays_there():
    b = balancer("a", "b")
    assert b.acquire("s") == "a"
    b.remove("a")
    b.add("a")
    assert [b.acquire("s") for _ in range(3)] == ["b"] * 3


def test_an_ended_session_is_free_again():
    b = balancer("a", "b")
    b.acquire("s")
    b.end_session("s")
    assert b.acquire("s") == "b"


def test_a_forked_session_begins_where_its_parent_is():
    b = balancer("a", "b")
    b.acquire("parent")
    b.fork_session("parent", "child")
    b.fork_session("nobody", "stranger")
    assert [b.acquire("stranger"), b.acquire("child"), b.acquire("child")] == ["b", "a", "a"]
    b.end_session("parent")
    assert b.acquire("child") == "a", "its end is its own"
    b.remove("a")
    assert b.acquire("child") == "b"


def test_sessions_that_began_first_go_first_whatever_comes_between():
    b = balancer("a")
    first = b.priority("first")
    second = b.priority("second")
    alone = b.priority()
    assert first < second < alone
    assert (b.priority("second"), b.priority("first")) == (second, first)
    b.fork_session("first", "branch")
    assert b.priority("branch") == first, "a branch is as old as its parent"
    b.end_session("first")
    assert b.priority("first") > alone, "one of the same name is another session"


def test_the_session_used_longest_ago_is_forgotten():
    b = balancer("a", "b", max_sessions=2)
    for session in ("s1", "s2", "s1", "s3"):  # s2 is the oldest when s3 comes
        b.acquire(session)
    assert [b.in_flight("a"), b.in_flight("b")] == [2, 2]
    assert b.acquire("s2") == "a", (
        "it was on b, and goes to the first of two equals as if it were new"
    )


def test_without_servers_there_is_nothing_to_choose():
    assert Balancer().acquire("s") is None


def test_a_name_is_used_once():
    with pytest.raises(ValueError, match="'a'"):
        balancer("a", "a")


PROMPT = random.Random(0).choices(range(1000), k=32 * BLOCK)
OTHER = random.Random(1).choices(range(1000), k=32 * BLOCK)
chain = PrefixIndex.block_hashes


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from("xy"), max_size=5)), max_size=12
    ),
    st.data(),
)
def test_the_longest_beginning_is_found_in_whole_blocks(prompts, data):
    index = PrefixIndex()
    last = {}
    for server, blocks in prompts:
        index.add(chain("".join(block * BLOCK for block in blocks)), server)
        for end in range(1, len(blocks) + 1):
            last[tuple(blocks[:end])] = server
    wanted = data.draw(st.lists(st.sampled_from("xy"), max_size=5))
    known = list(
        takewhile(last.__contains__, (tuple(wanted[:end]) for end in range(1, len(wanted) + 1)))
    )
    expected = (last[known[-1]], len(known) * BLOCK) if known else (None, 0)
    num_extra = data.draw(st.integers(0, BLOCK - 1))
    assert (
        index.find(chain("".join(block * BLOCK for block in wanted) + "z" * num_extra)) == expected
    )


def test_memory_is_bounded_and_ends_are_forgotten_before_beginnings():
    index = PrefixIndex(max_blocks=10)
    index.add(chain(PROMPT[: 8 * BLOCK]), "a")
    index.add(chain(OTHER[: 6 * BLOCK]), "b")
    assert len(index) == 10
    assert index.find(chain(PROMPT)) == ("a", 4 * BLOCK)
    assert index.find(chain(OTHER)) == (
        "b",
        6 * BLOCK,
    )


def test_other_adapters_have_other_kv():
    index = PrefixIndex()
    index.add(chain(PROMPT, "adapter"), "a")
    assert index.find(chain(PROMPT)) == (None, 0)


def test_a_group_stays_together_until_its_server_is_clearly_busier():
    b = balancer("a", "b", "c")
    members = [b.acquire(f"s{i}", chain(PROMPT)) for i in range(12)]
    assert members == ["a"] * (BUSY_MARGIN + 1) + ["b"] * (BUSY_MARGIN + 1) + ["c"] * (
        BUSY_MARGIN + 4
    )
    for server in "abc" * 20:
        b.assign(server)
    b.assign("a", None, chain(OTHER))
    servers = [b.acquire(f"t{i}", chain(OTHER)) for i in range(4)]
    assert servers == ["a"] * 4, "among many, a few more are no matter"


def test_short_and_little_shared_beginnings_leave_the_load_even():
    for first, second in (
        (PROMPT[: MIN_SHARED_IDS - 1], PROMPT[: MIN_SHARED_IDS - 1]),
        (PROMPT, PROMPT[:MIN_SHARED_IDS] + OTHER + OTHER),
    ):
        b = balancer("a", "b")
        assert [b.acquire(None, chain(first)), b.acquire(None, chain(second))] == ["a", "b"]


def test_new_weights_and_lost_servers_leave_nothing_to_share():
    b = balancer("a", "b")
    b.assign("b", None, chain(PROMPT))
    b.forget_prefixes()
    assert b.acquire(None, chain(PROMPT)) == "a"
    b.remove("a")
    b.add("a")
    b.release("b")
    assert b.acquire(None, chain(PROMPT)) == "b", "the first of two equals"


class BalancerMachine(RuleBasedStateMachine):
    """Any order of events keeps the counts right and sessions on their servers."""

    def __init__(self):
        super().__init__()
        self.balancer = Balancer()
        self.taken: list[str] = []
        self.homes: dict[str, str] = {}

    @rule(server=st.sampled_from("abc"))
    def add(self, server):
        if server not in self.balancer.servers:
            self.balancer.add(server)

    @rule(server=st.sampled_from("abc"))
    def remove(self, server):
        self.balancer.remove(server)
        self.taken = [s for s in self.taken if s != server]
        self.homes = {session: home for session, home in self.homes.items() if home != server}

    @precondition(lambda self: self.balancer.servers)
    @rule(session=st.sampled_from(["s1", "s2", None]))
    def acquire(self, session):
        loads = {s: self.balancer.in_flight(s) for s in self.balancer.servers}
        server = self.balancer.acquire(session)
        expected = self.homes.get(session)
        assert server == expected if expected else loads[server] == min(loads.values())
        self.taken.append(server)
        if session:
            self.homes[session] = server

    @precondition(lambda self: self.taken)
    @rule()
    def release(self):
        self.balancer.release(self.taken.pop())

    @invariant()
    def counts_are_right(self):
        for server in self.balancer.servers:
            assert self.balancer.in_flight(server) == self.taken.count(server)


TestBalancerMachine = BalancerMachine.TestCase


@given(st.floats(1e-6, 1e-2), st.floats(1e-3, 1.0), st.integers(0, 2**32))
def test_the_costs_of_requests_are_found_by_their_ids(prefill: float, decode: float, seed: int):
    draws = random.Random(seed)
    costs = RequestCosts()
    assert costs.prefill_seconds(1000) == costs.request_seconds == 0, "nothing is known yet"
    requests = [(draws.randrange(1, 4000), draws.randrange(1, 500)) for _ in range(50)]
    for computed, sampled in requests:
        costs.add(prefill * computed + decode * sampled, computed=computed, sampled=sampled)
    assert costs.prefill_seconds(1000) == pytest.approx(1000 * prefill, rel=0.02, abs=1e-4)
    mean = sum(prefill * c + decode * s for c, s in requests) / 50
    assert costs.request_seconds == pytest.approx(mean, rel=0.2), "later ones count more"


def test_requests_that_are_all_alike_do_not_tell_what_their_prompts_cost():
    costs = RequestCosts()
    for _ in range(10):
        costs.add(3.0, computed=100, sampled=50)
    assert costs.prefill_seconds(100) == 0
    assert costs.request_seconds == pytest.approx(3)
