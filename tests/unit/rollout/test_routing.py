"""Routing: sticky per session, else least in flight."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_agent_rl.rollout.routing import Balancer


def balancer(*servers, **kwargs):
    made = Balancer(**kwargs)
    for server in servers:
        made.add(server)
    return made


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
    first, second = b.priority("first"), b.priority("second")
    alone = b.priority()
    assert first < second < alone and (b.priority("second"), b.priority("first")) == (second, first)
    b.fork_session("first", "branch")
    assert b.priority("branch") == first, "a branch is as old as its parent"
    b.end_session("first")
    assert b.priority("first") > alone, "one of the same name is another session"


def test_the_session_used_longest_ago_is_forgotten():
    b = balancer("a", "b", max_sessions=2)
    for session in ("s1", "s2", "s1", "s3"):  # s2 is the oldest when s3 comes
        b.acquire(session)
    assert [b.in_flight("a"), b.in_flight("b")] == [2, 2]
    assert b.acquire("s2") == "a", "it was on b, and goes to the first of two equals as if it were new"


def test_without_servers_there_is_nothing_to_choose():
    assert Balancer().acquire("s") is None


def test_a_name_is_used_once():
    with pytest.raises(ValueError, match="'a'"):
        balancer("a", "a")


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
