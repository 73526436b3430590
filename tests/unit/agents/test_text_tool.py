"""Tools by markers in the text: <tool> over the ToolClient, <search> over a retrieval server."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.agents import SearchAgent, TextToolAgent
from jax_agent_rl.config import SearchConfig, ToolClientConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.types import FinishReason, Fork, SamplingParams
from tests.agent_testbed import ROW, AgentHarness, assert_token_exact, branch_request
from tests.fakes import FakeCodec
from tests.http_service import ToolServer, serve
from tests.messages import raises
from tests.ports import free_port

ASK = "let me see <tool> print(3) </tool> junk"


@pytest.fixture
async def server():
    async with ToolServer(lambda action: "\n<result>\n3\n</result>\n") as running:
        yield running


def stage(server, script, *, limits=None, codec=None, **config):
    config = ToolClientConfig(server_url=server.url, request_interval=0, retry_delay=0, **config)
    return AgentHarness(
        TextToolAgent, script, shared={"tool_config": config}, codec=codec, **(limits or {})
    )


async def test_code_between_the_markers_is_run_and_its_result_inserted(server):
    it = stage(server, [ASK, "so 3"])
    trajectory = await it.run({**ROW, "extra_info": {"stdin": "7"}})
    (payload,) = server.requests
    assert payload["actions"] == ["<python>print(3) </python>"]
    assert payload["extra_fields"] == [{"stdin": "7"}]
    assert it.codec.decode(trajectory.turns[0].appended_ids) == "\n<result>\n3\n</result>\n"
    assert [(c.name, c.arguments, c.observation) for c in trajectory.tool_calls] == [
        ("tool", {"text": " print(3) "}, "3")
    ]
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert_token_exact(trajectory, it.backend.requests)
    assert server.closed == {"t": 1}


async def test_max_tool_turns_bounds_the_calls(server):
    trajectory = await stage(server, [ASK], max_tool_turns=2).run()
    assert len(server.requests) == 2
    assert trajectory.num_turns == 3
    assert trajectory.finish_reason is FinishReason.MAX_USER_TURNS


async def test_the_server_may_end_it():
    async with ToolServer(lambda action: ("right", True, True)) as server:
        trajectory = await stage(server, [ASK]).run()
    assert trajectory.finish_reason is FinishReason.TOOL_DONE
    assert trajectory.turns[-1].appended_ids == ()
    assert server.closed == {"t": 1}


async def test_what_a_tool_measures_is_summed_over_the_trajectory():
    async with ToolServer(lambda action: {"obs": "3", "metrics": {"rows": 2}}) as server:
        trajectory = await stage(server, [ASK, ASK, "so 3"]).run()
    assert trajectory.metrics["tool_server/rows"] == 4


async def test_a_closing_marker_alone_is_told_and_runs_nothing(server):
    trajectory = await stage(server, ["oops </tool>", "so 3"]).run()
    assert trajectory.tool_calls[0].error == "malformed"
    assert not server.requests
    assert not server.closed


THOUGHTS = [
    "<think> maybe <tool> print(2) </tool> no </think> <tool> print(3) </tool> junk",
    "<think> a </tool> b <tool> c </tool> d </think> so <tool> print(3) </tool> junk",
    "<think> <tool> print(2) </think> <tool> print(3) </tool> junk",
]


@pytest.mark.parametrize("said", THOUGHTS)
async def test_markers_in_a_think_block_are_text_and_the_turn_goes_on(server, said):
    it = stage(server, [said, "so 3"])
    trajectory = await it.run()
    assert [payload["actions"] for payload in server.requests] == [["<python>print(3) </python>"]]
    assert [call.arguments for call in trajectory.tool_calls] == [{"text": " print(3) "}]
    assert it.codec.decode(trajectory.turns[0].output.token_ids) == said.removesuffix(" junk"), (
        "one turn, all of it"
    )
    assert (trajectory.num_turns, trajectory.finish_reason) == (2, FinishReason.ANSWER)
    assert_token_exact(trajectory, it.backend.requests)


class OpensThinking(FakeCodec):
    """Its generation prompts open a think block, as those of some reasoning models do."""

    def encode_prompt(self, messages, tools=()):
        return [*super().encode_prompt(messages, tools), *self.encode_text(" <think>\n")]


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("maybe <tool> print(2) </tool> and so on", []),
        (
            "maybe <tool> print(2) </tool> no </think> <tool> print(3) </tool>",
            [{"text": " print(3) "}],
        ),
    ],
)
async def test_a_think_block_may_begin_in_the_prompt(server, said, calls):
    it = stage(server, [said, "so </think> 3"], codec=OpensThinking())
    trajectory = await it.run()
    assert [call.arguments for call in trajectory.tool_calls] == calls
    assert len(server.requests) == len(calls)
    assert trajectory.finish_reason is FinishReason.ANSWER


@pytest.mark.parametrize("budget", [4, 5, 6])
async def test_a_budget_that_ends_in_a_thought_cuts_the_turn(server, budget):
    limits = {"max_response_length": budget}
    trajectory = await stage(server, ["<think> a <tool> b </tool> c d e f"], limits=limits).run()
    assert trajectory.finish_reason is FinishReason.RESPONSE_LENGTH
    assert not trajectory.tool_calls
    assert (trajectory.num_turns, len(trajectory.response_ids)) == (1, budget)


async def test_an_opening_marker_alone_is_an_answer(server):
    assert (await stage(server, ["<tool> print(3)"]).run()).finish_reason is FinishReason.ANSWER


async def test_a_result_that_is_too_long_is_cut_inside_its_tags():
    async with ToolServer(lambda action: "w " * 500) as server:
        it = stage(server, [ASK, "so 3"], limits={"max_tool_response_length": 6})
        trajectory = await it.run()
    inserted = it.codec.decode(trajectory.turns[0].appended_ids)
    assert inserted.startswith("\n<result>\n")
    assert inserted.endswith("\n</result>\n")
    assert len(trajectory.turns[0].appended_ids) <= 9


async def test_calls_of_many_trajectories_run_side_by_side_and_map_back():
    async with ToolServer() as server:
        arrived = []
        everybody = asyncio.Event()

        async def answer(payload):
            arrived.append(payload)
            if len(arrived) == 3:
                everybody.set()
            await everybody.wait()
            return JSONResponse(
                {"observations": payload["trajectory_ids"], "dones": [False], "valids": [True]}
            )

        server.respond = answer
        it = stage(server, [ASK, "so 3"])
        trajectories = await asyncio.gather(*(it.run(trajectory_id=name) for name in "abc"))
    assert [t.tool_calls[0].observation for t in trajectories] == ["a", "b", "c"]


async def test_a_slow_tool_is_told_to_the_model_and_counted(server):
    never = asyncio.Event()

    async def hang(payload):
        await never.wait()

    server.respond = hang
    trajectory = await stage(server, [ASK, "so 3"], timeout=0.2, max_retries=0).run()
    never.set()
    assert trajectory.tool_calls[0].error == "timeout"
    assert trajectory.metrics["tool_errors"] == 1
    assert trajectory.finish_reason is FinishReason.ANSWER


async def test_preflight_names_the_server_that_is_not_there():
    config = ToolClientConfig(server_url=f"http://127.0.0.1:{free_port()}", max_retries=0)
    it = AgentHarness(TextToolAgent, [ASK], shared={"tool_config": config})
    with raises(ConfigError, key="tool_config.server_url", value="not ready"):
        await it.agent.preflight()
    with raises(ToolServerError, value="cannot be reached"):
        await it.run()


# --- search ---------------------------------------------------------------------------------------


def retriever(*answers, asked):
    queue = list(answers)

    async def retrieve(request):
        asked.append(await request.json())
        return JSONResponse(queue.pop(0) if len(queue) > 1 else queue[0])

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


async def search(answer, script=("who <search> a b </search> x", "them"), **config):
    asked = []
    async with serve(retriever(answer, asked=asked)) as url:
        config = SearchConfig(server_url=f"{url}/retrieve", retry_delay=0, **config)
        it = AgentHarness(SearchAgent, list(script), shared={"search": config})
        trajectory = await it.run()
        await it.agent.close()
    assert_token_exact(trajectory, it.backend.requests)
    return trajectory, asked, it


async def test_a_query_is_looked_up_and_its_passages_inserted():
    passages = {
        "result": [
            [
                {"document": {"contents": "A b."}, "score": 2.0},
                {"document": "C d."},
                {"contents": "E."},
            ]
        ]
    }
    trajectory, asked, it = await search(passages, topk=2)
    assert asked == [{"queries": ["a b"], "topk": 2, "return_scores": True}]
    assert (
        it.codec.decode(trajectory.turns[0].appended_ids)
        == "\n<information>\n[1] A b.\n[2] C d.\n</information>\n"
    )
    assert trajectory.finish_reason is FinishReason.ANSWER


async def test_queries_in_a_think_block_are_not_looked_up():
    thought = "<think> <search> a </search> or </think> <search> b </search> x"
    trajectory, asked, _ = await search({"result": [["B"]]}, script=[thought, "them"])
    assert [payload["queries"] for payload in asked] == [["b"]]
    assert trajectory.num_turns == 2


async def test_finding_nothing_is_said():
    trajectory, _, _ = await search({"result": [[]]})
    assert trajectory.tool_calls[0].observation == "No results found."


async def test_search_max_turns_bounds_the_queries():
    trajectory, asked, _ = await search(
        {"result": [["x"]]}, script=["<search> a </search>"], max_turns=2
    )
    assert len(asked) == 2
    assert trajectory.finish_reason is FinishReason.MAX_USER_TURNS


async def test_a_branch_repeats_no_query_and_counts_those_of_its_parent():
    asked = []
    async with serve(retriever({"result": [["x"]]}, asked=asked)) as url:
        config = SearchConfig(server_url=f"{url}/retrieve", retry_delay=0, max_turns=2)
        it = AgentHarness(SearchAgent, ["<search> a </search>"], shared={"search": config})
        parent = await it.run()
        assert it.agent.can_branch()
        assert len(asked) == 2
        it.backend.requests.clear()
        fork = Fork(tree_id="t", parent_id="t", turns=1, tokens=2)
        branch = await it.agent.play(branch_request(parent, fork, SamplingParams(max_tokens=1000)))
        await it.agent.close()
    first = it.backend.requests[0]
    prefix_ids = parent.turns[1].output.token_ids[:2]
    assert (
        first.prompt_ids
        == parent.prompt_ids
        + parent.turns[0].output.token_ids
        + parent.turns[0].appended_ids
        + prefix_ids
    )
    assert branch.fork == fork
    assert branch.turns[0] == parent.turns[0]
    assert branch.turns[1].output.token_ids[:2] == prefix_ids
    assert len(asked) == 3
    assert branch.num_turns == 3
    assert branch.finish_reason is FinishReason.MAX_USER_TURNS


async def test_a_branch_stops_at_a_marker_that_began_before_its_fork():
    """The engine sees only the rest of it."""
    asked = []
    async with serve(retriever({"result": [["x"]]}, asked=asked)) as url:
        config = SearchConfig(server_url=f"{url}/retrieve", retry_delay=0, max_turns=1)
        begin = "<search> a"
        middle = " </sea"
        end = "rch>"
        it = AgentHarness(SearchAgent, lambda request: scripted_ids, shared={"search": config})
        ids = tuple(token for part in (begin, middle, end) for token in it.codec.encode_text(part))
        scripted_ids = [*ids, *it.codec.reply_ids(" and much more")]
        parent = await it.run()
        assert parent.turns[0].output.token_ids == ids
        scripted_ids = scripted_ids[len(ids) - 1 :]
        fork = Fork(tree_id="t", parent_id="t", turns=0, tokens=len(ids) - 1)
        branch = await it.agent.play(branch_request(parent, fork, SamplingParams(max_tokens=1000)))
        await it.agent.close()
    assert branch.turns[0].output.token_ids == ids
    assert branch.turns[0].output.stop_match == "</search>"


@pytest.mark.parametrize(
    "answer", [{}, [], {"result": []}, {"result": [[3]]}, {"result": [[{"document": {}}]]}]
)
async def test_a_wrong_answer_of_the_retriever_is_named(answer):
    with raises(ToolServerError, key="/retrieve", value="a wrong answer"):
        await search(answer)


async def test_preflight_asks_the_retriever_a_question():
    asked = []
    async with serve(retriever({"result": [[]]}, {"answers": []}, asked=asked)) as url:
        it = AgentHarness(
            SearchAgent,
            [ASK],
            shared={"search": SearchConfig(server_url=f"{url}/retrieve", max_retries=0)},
        )
        await it.agent.preflight()
        with raises(ConfigError, key=("not ready", "/retrieve"), value="a wrong answer"):
            await it.agent.preflight()
    assert len(asked) == 2
    with raises(ConfigError, key="search.server_url", value=("not ready", "cannot be reached")):
        await it.agent.preflight()


def test_search_without_a_server_says_where_to_set_it():
    with raises(ConfigError, key="search.server_url"):
        AgentHarness(SearchAgent, ["x"])
