"""The adapters with the real packages: reasoning-gym, TextWorld, verifiers."""

import asyncio
import sys
from pathlib import Path

import pytest

from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.environments import EnvironmentPool, get_environment
from jax_agent_rl.environments.adapters import parse_command
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.types import FinishReason
from tests.messages import raises


def lease(name, *, scope="rollout"):
    return EnvironmentPool(
        get_environment(name), name=name, scope=scope, max_instances=8, timeout=120.0
    ).lease()


def text_of(observation):
    return "\n".join(message["content"] for message in observation.messages)


# reasoning-gym


async def answer(reply, **kwargs):
    pytest.importorskip("reasoning_gym")
    async with lease("reasoning_gym") as environment:
        opening = await environment.reset(dataset="chain_sum", index=0, seed=3, **kwargs)
        assert "57 + 87 + 70" in text_of(opening)  # as reasoning-gym 0.1.25 makes it for this seed
        return await environment.step(Reply(content=reply))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<answer>214</answer>", 1.0),
        ("so it is <answer> 214 </answer>.", 1.0),
        ("<answer>the answer is 214</answer>", 0.0),
        ("<answer>213</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("214", 0.0),
    ],
)
async def test_reasoning_gym_wants_the_marked_answer_and_gives_nothing_for_part_of_it(reply, score):
    observation = await answer(reply)
    assert observation.score == score
    assert observation.done
    assert observation.metrics["reasoning_gym/answered"] == float("<answer>" in reply)


async def test_reasoning_gyms_partial_credit_is_there_for_those_who_ask():
    assert 0 < (await answer("<answer>the answer is 214</answer>", partial_credit=True)).score < 1


async def test_a_reasoning_gym_question_is_fixed_by_seed_and_index():
    pytest.importorskip("reasoning_gym")

    async def question(**kwargs):
        async with lease("reasoning_gym") as environment:
            return text_of(await environment.reset(dataset="chain_sum", **kwargs))

    same = await question(index=5, seed=1)
    assert same == await question(index=5, seed=1)
    assert len({same, await question(index=6, seed=1), await question(index=5, seed=1000)}) == 3
    short = await question(index=5, config='{"min_terms": 2, "max_terms": 2}')
    assert short == await question(index=5, config={"max_terms": 2, "min_terms": 2})
    assert short.count("+") <= 1


@pytest.mark.parametrize(
    "kwargs", [{"dataset": "no_such"}, {"dataset": "chain_sum", "config": {"min_term": 1}}]
)
async def test_a_reasoning_gym_dataset_that_does_not_exist_is_named(kwargs):
    pytest.importorskip("reasoning_gym")
    async with lease("reasoning_gym") as environment:
        with raises(EnvironmentFailedError, key="reasoning_gym", value=f"{kwargs['dataset']!r}"):
            await environment.reset(index=0, **kwargs)


# TextWorld


@pytest.fixture(scope="session")
def game(tmp_path_factory) -> Path:
    """A game of two commands, made by tw-make's own functions."""
    textworld = pytest.importorskip("textworld")
    options = textworld.GameOptions()
    options.seeds = 7
    options.nb_rooms = 2
    options.nb_objects = 3
    options.quest_length = 2
    options.path = str(tmp_path_factory.mktemp("games") / "game.z8")
    return Path(textworld.generator.compile_game(textworld.generator.make_game(options), options))


async def test_a_textworld_game_is_won_and_its_points_add_up_to_one(game):
    async with lease("textworld") as environment:
        opening = await environment.reset(game=str(game))
        assert "recover the teacup" in text_of(opening)
        assert "You can: " in text_of(opening)
        assert "take teacup from chair" in text_of(opening)
        first = await environment.step(Reply(content="Take teacup from chair"))
        assert not first.done
        assert first.metrics["textworld/inadmissible"] == 0.0
        second = await environment.step(Reply(content="I put it down.\n> put teacup on counter"))
    assert second.done
    assert second.metrics["textworld/won"] == 1.0
    assert first.score + second.score == 1.0
    for observation in (opening, first, second):
        assert ">" not in text_of(observation)
        assert "RESTART" not in text_of(observation)


async def test_a_textworld_command_that_means_nothing_is_answered_and_counted(game):
    async with lease("textworld") as environment:
        await environment.reset(game=str(game), show_commands=False)
        observation = await environment.step(Reply(content="sing a song\x00\n\n"))
        assert observation.metrics["textworld/inadmissible"] == 1.0
        assert observation.score == 0.0
        assert text_of(observation)
        assert "You can:" not in text_of(observation)
        for nonsense in ("", "x" * 5000, "\N{SNOWMAN}", "quit", "restart", "save"):
            assert not (await environment.step(Reply(content=nonsense))).metrics["textworld/won"]


async def test_many_textworld_games_run_at_once(game):
    async def play():
        async with lease("textworld") as environment:
            await environment.reset(game=str(game))
            await environment.step(Reply(content="take teacup from chair"))
            return (await environment.step(Reply(content="put teacup on counter"))).metrics[
                "textworld/won"
            ]

    assert await asyncio.gather(*(play() for _ in range(6))) == [1.0] * 6


async def test_an_instance_plays_the_same_game_again_from_its_beginning(game):
    pool = EnvironmentPool(
        get_environment("textworld"),
        name="textworld",
        scope="global",
        max_instances=1,
        timeout=120.0,
    )
    openings = []
    for _ in range(2):
        async with pool.lease() as environment:
            openings.append(text_of(await environment.reset(game=str(game))))
            await environment.step(Reply(content="take teacup from chair"))
    await pool.close()
    assert openings[0] == openings[1]


async def test_a_game_that_is_not_there_says_how_to_make_it(tmp_path):
    pytest.importorskip("textworld")
    async with lease("textworld") as environment:
        with raises(EnvironmentFailedError, key="nothing.z8", fix="tw-make"):
            await environment.reset(game=str(tmp_path / "nothing.z8"))


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("go east", "go east"),
        ("First I look.\n\n> Open  the   BOX \n", "open the box"),
        ("<command>take key</command> because it is there", "take key"),
        ("", ""),
        ("\n\n", ""),
    ],
)
def test_the_command_in_a_reply(reply, command):
    assert parse_command(reply) == command


# verifiers

TASKSET = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Words(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "words"

    async def setup_task(self, task):
        self.answer = task.answer

    @vf.tool
    def first_letter(self, loud: bool = False) -> str:
        """The first letter of the answer.

        Args:
            loud: In capitals.
        """
        return self.answer[0].upper() if loud else self.answer[0]

class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Words(vf.ToolsetConfig())]

    @vf.stop
    def too_many_tools(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 3

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def brief(self, trace) -> float:
        return 0.5 if trace.num_turns == 1 else 0.0

    @vf.metric
    async def calls(self, trace) -> float:
        return len(trace.tool_messages)

class GuessConfig(vf.TasksetConfig):
    words: str = "apple pear"

class Guess(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for word in self.config.words.split():
            question = f"A fruit of {len(word)} letters?"
            data = Data(prompt=question, system_prompt="Guess.", answer=word)
            yield GuessTask(data, self.config.task)

__all__ = ["Guess"]
'''

NEEDS_RUNTIME = """
import verifiers.v1 as vf

class ShellTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        await runtime.run(["true"], {})

    @vf.reward
    async def passes(self, runtime) -> float:
        return 1.0

class Shell(vf.Taskset[ShellTask, vf.TasksetConfig]):
    def load(self):
        yield ShellTask(vf.TaskData(prompt="run it"), self.config.task)

__all__ = ["Shell"]
"""


@pytest.fixture(scope="session", autouse=True)
def tasksets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasksets")
    (folder / "guess_fruit.py").write_text(TASKSET)
    (folder / "shell_work.py").write_text(NEEDS_RUNTIME)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


async def test_a_verifiers_task_is_asked_answered_and_scored():
    pytest.importorskip("verifiers")
    async with lease("verifiers") as environment:
        opening = await environment.reset(taskset="guess_fruit", index=1)
        assert opening.messages == (
            {"role": "system", "content": "Guess."},
            {"role": "user", "content": "A fruit of 4 letters?"},
        )
        observation = await environment.step(Reply(content="pear"))
        assert observation.done
        outcome = await environment.conclude([], FinishReason.ENVIRONMENT_DONE)
    assert outcome == {
        "score": 2.5,
        "verifiers/right": 1.0,
        "verifiers/brief": 0.5,
        "verifiers/calls": 0.0,
    }


async def test_a_verifiers_toolset_is_called_and_its_failures_are_read_by_the_model():
    pytest.importorskip("verifiers")
    async with lease("verifiers") as environment:
        await environment.reset(taskset="guess_fruit", index=0, config={"words": "kiwi"})
        (schema,) = environment.tool_schemas
        assert schema["function"]["name"] == "words_first_letter"
        assert schema["function"]["parameters"]["properties"]["loud"]["type"] == "boolean"
        call = ToolCall(name="words_first_letter", arguments={"loud": True})
        observation = await environment.step(Reply(content="hm", tool_calls=(call,)))
        assert observation.messages == (
            {"role": "tool", "name": "words_first_letter", "content": "K"},
        )
        assert not observation.done
        assert observation.tool_calls[0].error is None
        wrong = (
            ToolCall(name="words_last_letter", arguments={}),
            ToolCall(name=call.name, arguments={"loud": 7}),
        )
        observation = await environment.step(Reply(content="", tool_calls=wrong))
        assert [c.error for c in observation.tool_calls] == ["unknown_tool", "bad_arguments"]
        assert observation.done, "three tool results: the task's own stop"
        outcome = await environment.conclude([], FinishReason.ENVIRONMENT_DONE)
    assert outcome["score"] == 0.0
    assert outcome["verifiers/calls"] == 3.0


async def test_a_verifiers_reply_that_was_cut_off_is_part_of_what_is_scored():
    pytest.importorskip("verifiers")
    async with lease("verifiers") as environment:
        await environment.reset(taskset="guess_fruit", index=0)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "appl"}]
        outcome = await environment.conclude(messages, FinishReason.RESPONSE_LENGTH)
    assert outcome["verifiers/right"] == 0.0
    assert outcome["verifiers/brief"] == 0.5


async def test_a_call_that_cannot_be_decoded_is_answered():
    pytest.importorskip("verifiers")
    async with lease("verifiers") as environment:
        await environment.reset(taskset="guess_fruit", index=0)
        observation = await environment.step(Reply(content="", malformed=("no JSON",)))
        assert not observation.done
        assert "Failed to decode tool call: no JSON" in text_of(observation)


async def test_a_verifiers_task_that_cannot_run_here_is_refused_not_scored_wrongly():
    pytest.importorskip("verifiers")
    async with lease("verifiers") as environment:
        with raises(
            EnvironmentFailedError,
            key=("setup", "passes"),
            value="takes a runtime",
            fix="own harness",
        ):
            await environment.reset(taskset="shell_work", index=0)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"index": 2}, {"value": ("2 tasks", "number 2")}),
        ({"index": -1}, {"value": "not number -1"}),
    ],
)
async def test_a_verifiers_task_that_is_not_there_is_named(kwargs, named):
    pytest.importorskip("verifiers")
    async with lease("verifiers") as environment:
        with raises(EnvironmentFailedError, **named):
            await environment.reset(taskset="guess_fruit", **kwargs)
