"""Commands ``replay`` and ``same``: a run compared with itself, and with another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_agent_rl.cli.options import (
    JsonOption,
    Overrides,
    Panel,
    command,
    console_of,
    given_config,
    print_object,
    run_to_end,
)
from jax_agent_rl.observe.progress import print_line
from jax_agent_rl.utils.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from jax_agent_rl.evaluate.step_replay import ChangedStep


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        Panel.CHECK,
        "replay runs/quickstart --step 4",
        "replay runs/quickstart --step 4 --reward new_reward.py",
        "replay runs/quickstart --step 4 algorithm.adv_estimator=rloo --json",
    )(replay)
    command(
        app,
        Panel.CHECK,
        "same runs/quickstart runs/quickstart-2",
    )(same)


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder of train.")],
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="The training step to repeat.")] = 1,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="FILE", help="Another configuration, instead of the run's."
        ),
    ] = None,
    reward: Annotated[
        Path | None,
        typer.Option(help="Python file with @register_reward functions: reward.path=FILE."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Repeat a recorded training step offline, to the bit, and say what differs from its record.

    Ids, log-probs and tools' answers are the recorded ones; rewards, advantages, gradients and new
    weights are computed again, from the last checkpoint before the step. With other keys of
    algorithm, critic, learner or reward, it also says what they would have made of the step. Keys
    of learner.mesh repeat it on other devices. The exit status is 1 if more than rounding differs.
    """
    from jax_agent_rl.evaluate.step_comparison import first_difference
    from jax_agent_rl.evaluate.step_replay import StepReplayRequest
    from jax_agent_rl.evaluate.step_replay import replay as run_replay

    command_line = given_config(None, overrides, config_file)
    keys = command_line.overrides
    if reward is not None:
        keys = [*keys, f"reward.path={reward}"]
    request = StepReplayRequest(run=run, step=step, config=command_line.file, overrides=keys)
    console = console_of(json)
    result = run_to_end(run_replay(request, console=console))

    began = f"checkpoint {result.from_step}" if result.from_step else "the untrained model"
    print_line(console, f"step {result.step} of {run}, repeated from {began}")
    for comparison in result.comparisons:
        line = f"  {comparison.what}: {comparison.equal} of {comparison.compared} equal"
        if comparison.first is not None:
            line += f", largest relative difference {comparison.largest:.1e}"
        print_line(console, line)
    for note in result.notes:
        print_line(console, f"  {note}")
    first = first_difference(result.comparisons)
    if first is None:
        print_line(console, "equal to the bit, as far as it was recorded")
    else:
        kind = "rounding" if result.verdict == "rounding" else "different"
        print_line(console, f"{kind}; first difference: {first}")
    if result.change is not None:
        _print_change(console, result.change)
    if json:
        print_object(result.summary())
    if result.verdict == "different":
        raise typer.Exit(1)


def _print_change(console: Console, change: ChangedStep) -> None:
    """Print what another configuration makes of the step: recorded -> changed."""
    print_line(console, "with " + "; ".join(change.changes) + ":")
    print_line(console, f"  mean reward {_arrow(change.reward_mean)}")
    print_line(console, f"  trajectories with a token to train on {_arrow(change.trained)}")
    print_line(
        console,
        f"  {counted(change.turned_advantages, 'trajectory')} with an advantage of another sign",
    )
    for name, values in change.metrics.items():
        print_line(console, f"  {name} {_arrow(values)}")
    print_line(console, f"  norm of the update {_arrow(change.update_norm)}")
    if change.update_cosine is not None:
        print_line(console, f"  cosine between both updates {change.update_cosine:.3f}")


def _arrow(values: tuple[Any, Any]) -> str:
    return " -> ".join("none" if value is None else f"{value:.4g}" for value in values)


def same(
    first: Annotated[Path, typer.Argument(help="A run folder.")],
    second: Annotated[Path, typer.Argument(help="Another run folder.")],
    json: JsonOption = False,
) -> None:
    """Compare two runs: what decided them, and the first step in which something else came out.

    Compared are packages, machines, variables, fingerprints of models, rows and code, every key of
    the configuration; then, step by step, ids, log-probs, rewards, metrics and weights. What
    depends on time is left out. The exit status is 1 if something else came out.
    """
    from jax_agent_rl.evaluate.same import compare_runs

    console = console_of(json)
    result = compare_runs(first, second)
    for cause in result.causes:
        print_line(console, f"{cause}")
    if not result.causes:
        print_line(console, "nothing on record differs of what decides a run")
    for note in result.notes:
        print_line(console, note)
    steps = f"{counted(result.steps, 'step')} with the same trajectories, metrics and weights"
    print_line(console, steps)
    if result.outcome is not None:
        print_line(console, f"first difference: {result.outcome}")
    if json:
        print_object(result.summary())
    if not result.is_same:
        raise typer.Exit(1)
