"""The game of examples/kuhn_poker, with scripted players."""

from pathlib import Path

import pytest

from jax_agent_rl.agents import AgentContext, get_agent, load_agents
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rewards import load_rewards, score
from jax_agent_rl.rewards.rules import environment
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import episode_request
from tests.fakes import FakeCodec, ScriptedBackend

EXAMPLE = Path(__file__).parents[3] / "examples" / "kuhn_poker" / "agent.py"


@pytest.fixture(scope="module", autouse=True)
def registered():
    load_agents(str(EXAMPLE))
    load_rewards(str(EXAMPLE.with_name("reward.py")))


async def play(first: str, second: str, *moves: str):
    """One game of these cards and replies, in order."""
    codec = FakeCodec()
    said = iter(moves)
    backend = ScriptedBackend(codec, lambda request: [*codec.encode_text(next(said)), 2])
    context = AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=codec,
        limits=AgentConfig(),
        max_model_len=1000,
    )
    row = {
        "data_source": "kuhn_poker",
        "prompt": [{"role": "system", "content": "Play."}],
        "extra_info": {"cards": {"first": first, "second": second}},
    }
    agent = get_agent("kuhn_poker")(context)
    game = await agent.play(episode_request(row, SamplingParams(max_tokens=8)))
    assert next(said, None) is None, "every move was asked for"
    return {t.role: t for t in game}


@pytest.mark.parametrize(
    ("moves", "won"),
    [  # what a King wins of a Queen as the first player, by the rules: ante 1, bet 1
        (("check", "check"), 1),
        (("bet", "fold"), 1),
        (("bet", "call"), 2),
        (("check", "bet", "fold"), -1),
        (("check", "bet", "call"), 2),
    ],
)
async def test_the_payoffs_are_those_of_the_game(moves, won):
    game = await play("King", "Queen", *moves)
    assert [environment(game[role].turn_scores) for role in ("first", "second")] == [won, -won]
    lower = await play("Jack", "Queen", *moves)
    assert environment(lower["first"].turn_scores) == (won if "fold" in moves else -won)


async def test_a_player_reads_its_own_card_and_what_the_other_did():
    game = await play("King", "Queen", " check", " bet", " call")
    texts = {}
    for role, trajectory in game.items():
        texts[role] = " ".join(str(message["content"]) for message in trajectory.messages)
    assert "King" in texts["first"]
    assert "Queen" not in texts["first"]
    assert "Queen" in texts["second"]
    assert "King" not in texts["second"]
    assert "Your opponent bets. fold or call?" in texts["first"]
    assert game["first"].num_turns == 2
    assert game["second"].num_turns == 1


async def test_an_illegal_move_ends_the_game_and_costs_its_player_alone():
    game = await play("King", "Queen", "bet", "raise")
    assert [environment(game[role].turn_scores) for role in ("first", "second")] == [0, -3]
    alone = await play("King", "Queen", "call")
    assert alone.keys() == {"first"}
    assert environment(alone["first"].turn_scores) == -3


@pytest.mark.parametrize(
    ("moves", "sound"),
    [
        (("bet", "call"), [1, 0]),  # the Jack cannot win
        (("bet", "fold"), [1, 1]),
        (("check", "bet", "fold"), [0, 1]),  # the King cannot lose
        (("check", "raise"), [1, 0]),
    ],
)
async def test_accuracy_counts_players_who_neither_blunder_nor_break_the_rules(moves, sound):
    game = await play("King", "Jack", *moves)
    scored = [await score(game[role]) for role in ("first", "second")]
    assert [t.reward_parts["accuracy"] for t in scored] == sound
