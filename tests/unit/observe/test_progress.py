"""What a run shows while it lasts."""

import io

from rich.console import Console

from jax_agent_rl.observe.progress import Progress, print_line

RECORD = {
    "reward_mean": 0.5,
    "tool_calls_mean": 1.0,
    "rollout_tokens_per_second": 1200.0,
    "learner_tokens_per_second": 2200.0,
    "logprob_gap_max": 1e-5,
    "step_seconds": 20.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(progress: Progress) -> str:
    """The live part as a terminal of 100 columns has it."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(progress.display())
    return console.file.getvalue()


def plain(total: int = 8) -> tuple[Progress, Clock, io.StringIO]:
    clock = Clock()
    file = io.StringIO()
    return Progress(Console(file=file, width=100), total_steps=total, clock=clock), clock, file


def test_the_time_left_goes_on_counting_between_steps():
    progress, clock, _ = plain()
    assert "0/8" in shown(progress) and "left" not in shown(progress)
    progress.step({"step": 2, **RECORD}, seconds_left=90.0)
    assert "2/8, 1m30s left" in shown(progress)
    clock.now = 60.0
    assert "2/8, 30s left" in shown(progress)


def test_warnings_stay_in_sight_while_they_hold():
    progress, _, _ = plain()
    progress.warn(["truncated", "clipped"])
    assert "⚠ truncated, clipped" in shown(progress)
    progress.warn([])
    assert "⚠" not in shown(progress)


def test_without_a_terminal_there_are_plain_lines_and_no_bar():
    progress, _, file = plain()
    with progress:
        progress.phase("step 1: rollout", lambda: "3/8")
        progress.step({"step": 1, **RECORD}, seconds_left=60.0)
        progress.print_line("  warning (truncated): [odd] brackets stay")
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1/8", "warning"]
    assert "[odd] brackets stay" in lines[2]
    assert "━" not in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_the_heading_is_repeated_every_twenty_steps():
    progress, _, file = plain(total=60)
    progress.resumed(7)
    assert "7/60" in shown(progress)
    for step in range(8, 32):
        progress.step({"step": step, **RECORD}, seconds_left=1.0)
    lines = file.getvalue().splitlines()
    assert lines[0] == "resumed after step 7"
    assert [i for i, line in enumerate(lines) if line.split()[0] == "step"] == [1, 22]


def test_the_rewards_of_each_role_end_the_line_of_a_step():
    progress, _, file = plain()
    roles = {
        "role/solver/reward_mean": 0.75,
        "role/checker/reward_mean": 0.25,
        "role/solver/turns_mean": 1.0,
    }
    progress.step(RECORD | {"step": 1}, seconds_left=10)
    progress.step(RECORD | {"step": 2} | roles, seconds_left=10)
    _, alone, two_roles = file.getvalue().splitlines()
    assert two_roles.endswith("solver 0.75, checker 0.25")
    assert not alone.endswith("0.25")
    assert "solver" not in alone


def test_no_line_steers_the_terminal():
    console = Console(file=io.StringIO(), width=100)
    Progress(console, total_steps=1).print_line("best: \x1b[2J\u202eadd\u061c")
    print_line(console, "joined \x1b]0;owned\x07")
    text = console.file.getvalue()
    assert "\\x1b[2J\\u202eadd\\u061c" in text
    assert "\\x1b]0;owned\\x07" in text
    assert not set(text) & set("\x1b\x07\u202e\u061c")
