"""A trajectory in a few lines, as the end of a run shows it."""

from jax_agent_rl.observe.trajectories import outline


def record(*, turns: int, messages: list[tuple[str, str]]) -> dict:
    said = [{"role": role, "content": content} for role, content in messages]
    return {"step": 7, "reward": 0.5, "trajectory_id": "t-1", "turns": [{}] * turns, "messages": said}


WORKED = [("system", "Use tools."), ("user", "What is 1 plus 1?"), ("assistant", "[add()]"), ("tool", "2")]


def test_worked_examples_of_the_prompt_are_left_out():
    played = [("user", "What is 2 plus 2?"), ("assistant", "[add()]"), ("tool", "4"), ("assistant", "= 4")]
    text = outline(record(turns=2, messages=[*WORKED, ("assistant", "= 2"), *played]), title="best")
    assert text.splitlines() == [
        "best: step 7, reward 0.50, t-1",
        "       user  What is 2 plus 2?",
        "  assistant  [add()]",
        "       tool  4",
        "  assistant  = 4",
    ]


def test_long_messages_end_early_and_controls_are_spelt_out():
    long = outline(record(turns=1, messages=[("user", "a\n\nb"), ("assistant", "\x1b[2J" + "x" * 300)]), title="worst")
    question, answer = long.splitlines()[1:]
    assert question.endswith("  a b") and "\x1b" not in long and "\\x1b[2J" in answer
    assert answer.endswith("x…") and len(answer) == len("  assistant  ") + 100


def test_a_trajectory_that_was_never_sampled_shows_its_prompt():
    assert "What is 1 plus 1?" in outline(record(turns=0, messages=WORKED[:2]), title="worst")
