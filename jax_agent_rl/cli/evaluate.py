"""Commands ``eval``, ``rollout``, ``simulate``, ``rescore``, ``view``, ``report``, ``export-atif``.

The first three sample without training; the others read what a run recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_agent_rl.cli.options import (
    ConfigArgument,
    ConfigOption,
    EmaOption,
    JsonOption,
    ModelOption,
    Overrides,
    Panel,
    RunOption,
    StepOption,
    command,
    console_of,
    given_config,
    key_completer,
    policy_choice,
    print_object,
    run_to_end,
)
from jax_agent_rl.observe.progress import print_line
from jax_agent_rl.observe.selection import Colour, Sort, Split, TrajectoryFilter
from jax_agent_rl.types import FinishReason, StopReason
from jax_agent_rl.utils.text import counted

if TYPE_CHECKING:
    from rich.table import Table


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        Panel.LOOK,
        "view runs/quickstart --sort worst --limit 3",
        "view runs/quickstart --split heldout --step 6",
        "view runs/quickstart --tool-error any --min-step 2 --text price",
        "view runs/quickstart --tree",
    )(view)
    command(
        app,
        Panel.LOOK,
        "report runs/quickstart",
        "report runs/quickstart --out /tmp/report.html --limit 200",
    )(report)
    command(
        app,
        Panel.LOOK,
        "export-atif runs/quickstart atif/quickstart",
        name="export-atif",
    )(export_atif)
    command(
        app,
        Panel.TRAIN,
        "rollout quickstart --out rollouts.parquet",
        "rollout --run runs/quickstart --out data/distilled --temperature 0.7 -n 4",
        "rollout --model ~/models/Qwen3-0.6B --data gsm8k.jsonl --limit 100 --out rollouts.jsonl",
    )(rollout)
    command(
        app,
        Panel.LOOK,
        "eval quickstart -n 8 -k 1,4,8",
        "eval --run runs/quickstart --step 4 --json",
        "eval quickstart --model ~/models/Qwen3-0.6B -n 1 --temperature 0",
        "eval --model ~/models/Qwen3-0.6B --data gsm8k.parquet agent.max_response_length=512",
        name="eval",
    )(evaluate)
    command(
        app,
        Panel.LOOK,
        "rescore runs/quickstart --reward new_reward.py",
        "rescore runs/quickstart reward.timeout=5 --out rescored.parquet --json",
        "rescore runs/quickstart --config dapo --reward new_reward.py",
    )(rescore)
    command(
        app,
        Panel.LOOK,
        "simulate quickstart",
        "simulate quickstart rollout.group_size=16 assume.engines.count=8",
    )(simulate)


def evaluate(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    model: ModelOption = None,
    run: RunOption = None,
    step: StepOption = None,
    ema: EmaOption = False,
    data: Annotated[
        str | None, typer.Option(help="Rows (file, glob or Hub dataset) instead of data.eval.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of rows to use, from the first.")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--samples", help="Trajectories per prompt.")] = 8,
    k: Annotated[
        str | None,
        typer.Option(
            "-k", help="Values of k for pass@k, separated by commas; default 1, 4, 16, … and -n."
        ),
    ] = None,
    pass_reward: Annotated[
        float, typer.Option(help="Minimum reward of a trajectory that passes.")
    ] = 1.0,
    temperature: Annotated[
        float | None,
        typer.Option(
            help=(
                "Default rollout.eval_temperature, or rollout.temperature if that is 0 and -n"
                " above 1."
            )
        ),
    ] = None,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k sampling; 0: off.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Least probability relative to the likeliest id's; 0: off.")
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for samples and summary; default RUN_DIR-eval, with a number if it exists."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Evaluate a policy on held-out rows: pass@k and mean reward by data source.

    Its configuration names the agents, tools and rewards. The policy is a configuration's model,
    any Hugging Face folder of a known family (--model), or a checkpoint (--run). Lost trajectories
    count as failures. Intervals have 95 % confidence: a bootstrap over prompts; if all prompts
    agree, Wilson's interval for pass@k and none for the reward. The same seed gives the same
    samples; `jax-agent-rl view FOLDER` shows them.
    """
    from jax_agent_rl.data.dataset import evaluation_sources
    from jax_agent_rl.deploy.preflight import check_policy
    from jax_agent_rl.runtime.policy_choice import choose

    choice = policy_choice(
        config,
        overrides,
        config_file,
        model=model,
        run=run,
        step=step,
        ema=ema,
        data=data,
    )
    ks = parse_ks(k, n)
    settings = choose(choice)
    run_dir = Path(settings.run_dir)
    out = out or run_dir.with_name(run_dir.name + "-eval")
    check_policy(choice, settings, sources=evaluation_sources(settings, data), out=out)
    from jax_agent_rl.evaluate.evaluation import EvaluationRequest
    from jax_agent_rl.evaluate.evaluation import evaluate as run_evaluation
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.runtime.policy import open_policy
    from jax_agent_rl.runtime.resume import free_folder

    request = EvaluationRequest(
        samples=n,
        ks=ks,
        pass_reward=pass_reward,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        data=data,
        limit=limit,
    )
    use_compilation_cache()
    console = console_of(json)
    out_dir = free_folder(out)
    with open_policy(choice) as subject:
        summary = run_to_end(run_evaluation(subject, request, out=out_dir, console=console))
    print_line(console, headline(summary))
    console.print(score_table(summary["scores"]))
    print_line(console, f"samples: {out_dir} (jax-agent-rl view {out_dir})")
    if json:
        print_object(summary)


def rollout(
    out: Annotated[
        Path,
        typer.Option(
            help="FILE.parquet, FILE.jsonl, or a FOLDER that datasets.load_dataset reads."
        ),
    ],
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    model: ModelOption = None,
    run: RunOption = None,
    step: StepOption = None,
    ema: EmaOption = False,
    data: Annotated[
        str | None, typer.Option(help="Rows (file, glob or Hub dataset) instead of data.train.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of rows to use, from the first.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n", "--samples", min=1, help="Trajectories per row; default rollout.group_size."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default rollout.temperature.")] = None,
    json: JsonOption = False,
) -> None:
    """Collect trajectories without training: exact token ids, masks, log-probs, rewards, messages.

    Agents, tools, rewards and sampling are as in training; filters are not applied. After an
    interruption, the same command continues. Every started trajectory is in the file or, if lost,
    counted by reason in the summary next to it.
    """
    from jax_agent_rl.data.dataset import collection_sources, find_files
    from jax_agent_rl.deploy.preflight import check_policy
    from jax_agent_rl.runtime.policy_choice import choose

    choice = policy_choice(
        config,
        overrides,
        config_file,
        model=model,
        run=run,
        step=step,
        ema=ema,
        data=data,
    )
    settings = choose(choice)
    sources = collection_sources(settings, data)
    check_policy(choice, settings, sources=sources, out=out.parent)
    from jax_agent_rl.evaluate.collection import CollectionRequest, collect
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.runtime.policy import open_policy

    request = CollectionRequest(group_size=n, temperature=temperature, data=data, limit=limit)
    # Files of the Hub are downloaded before a checkpoint is exported.
    for source in sources:
        find_files(source)
    use_compilation_cache()
    console = console_of(json)
    with open_policy(choice) as subject:
        summary = run_to_end(collect(subject, request, out=out, console=console))
    dropped = sorted(summary["dropped"].items())
    lost = ", ".join(f"{reason} {count}" for reason, count in dropped)
    print_line(
        console,
        f"{counted(summary['started'], 'trajectory')} started = {summary['kept']} in {out} + lost"
        f" ({lost or 'none'}), of {counted(summary['prompts'], 'prompt')}"
        f" (jax-agent-rl view {out})",
    )
    if json:
        print_object(summary)


def rescore(
    run: Annotated[
        Path, typer.Argument(help="A run folder, one of eval, or what rollout or rescore wrote.")
    ],
    overrides: Overrides = None,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Configuration with the reward section, instead of the run's.",
        ),
    ] = None,
    reward: Annotated[
        Path | None,
        typer.Option(help="Python file with @register_reward functions: reward.path=FILE."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Table to write with the new rewards: FILE.parquet, FILE.jsonl or a FOLDER."
        ),
    ] = None,
    biggest: Annotated[
        int, typer.Option(min=0, help="Number of trajectories to name, the biggest changes.")
    ] = 10,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Play the replies again in their environments, which may have changed."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Score recorded trajectories again, with other reward functions, and tell what changed.

    Scoring is as in training: the run's reward section with the keys given here, its workers and
    time limits. The policy is not needed. What environments gave for turns stays as recorded,
    unless --replay plays them again, which needs the policy's tokenizer. A trajectory that cannot
    be scored is counted by reason, and left out of the new table.
    """
    from jax_agent_rl.deploy.preflight import check_rescoring
    from jax_agent_rl.evaluate.rescore import RescoringRequest
    from jax_agent_rl.evaluate.rescore import rescore as run_rescoring

    command_line = given_config(None, overrides, config_file)
    keys = command_line.overrides
    if reward is not None:
        keys = [*keys, f"reward.path={reward}"]
    if out is not None:
        check_rescoring(out)
    request = RescoringRequest(
        source=run,
        config=command_line.file,
        overrides=keys,
        out=out,
        biggest=biggest,
        replay=replay,
    )
    console = console_of(json)
    summary = run_to_end(run_rescoring(request, console=console))
    console.print(change_table(summary))
    for change in summary["biggest"]:
        print_line(
            console,
            f"{change['trajectory_id']} ({change['data_source']}, step {change['step']}):"
            f" {change['old']:.3f} -> {change['new']:.3f}",
        )
    if out is not None:
        print_line(console, f"table: {out} (jax-agent-rl view {out})")
    if json:
        print_object(summary)


def change_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of what changed, with a row per split and step, and one for all."""
    from rich.markup import escape
    from rich.table import Table

    from jax_agent_rl.utils.text import printable

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("step", justify="left")
    for heading in ("trajectories", "old mean", "new mean", "raised", "lowered", "not scored"):
        table.add_column(heading, justify="right")
    for row in [*summary["steps"], {"split": "all", "step": "", **summary}]:
        name = printable(f"{row['split']} {row['step']}".strip(), one_line=True)
        failed = ", ".join(f"{reason} {count}" for reason, count in row["failed"].items())
        table.add_row(
            escape(name),
            str(row["trajectories"]),
            _mean(row["old_mean"]),
            _mean(row["new_mean"]),
            str(row["raised"]),
            str(row["lowered"]),
            failed or "0",
        )
    return table


def _mean(value: float | None) -> str:
    if value is None:
        return "·"
    return f"{value:.3f}"


def parse_ks(text: str | None, samples: int) -> tuple[int, ...]:
    """Parse ``"1,4,8"`` into ascending numbers.

    By default, they are the powers of 4 below ``samples``, and ``samples``.

    Raises:
        ConfigError: not numbers.
    """
    from jax_agent_rl.errors import ConfigError

    if text is None:
        ks = {1, samples}
        power = 4
        while power < samples:
            ks.add(power)
            power *= 4
        return tuple(sorted(ks))
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"-k {text!r}: give numbers separated by commas, such as -k 1,4,8"
        ) from None


def headline(summary: Mapping[str, Any]) -> str:
    """Describe the evaluation in one line."""
    return (
        f"{summary['policy']} on {summary['data']}:"
        f" {counted(summary['samples_per_prompt'], 'sample')} per prompt,"
        f" temperature {summary['temperature']:g}, seed {summary['seed']}"
    )


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row per data source; each mean with its 95 % interval, if any."""
    from rich.markup import escape
    from rich.table import Table

    from jax_agent_rl.utils.text import printable

    ks = next(iter(scores.values()))["pass"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("data source", justify="left")
    table.add_column("prompts", justify="right")
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    for heading in ("reward", "turns", "tools", "errors", "cut", "lost"):
        table.add_column(heading, justify="right")

    for name, row in scores.items():
        passes = [_interval(row["pass"][k], ".1%") for k in ks]
        lost = ", ".join(f"{reason} {count}" for reason, count in row["lost"].items())
        table.add_row(
            escape(printable(name, one_line=True)),
            str(row["prompts"]),
            *(escape(interval) for interval in passes),
            escape(_interval(row["reward"], ".3f")),
            f"{row['turns_mean']:.1f}",
            f"{row['tool_calls_mean']:.1f}",
            f"{row['tool_error_share']:.0%}",
            f"{row['cut_share']:.0%}",
            escape(lost) or "0",
        )
    return table


def _interval(value: Mapping[str, float | None], form: str) -> str:
    mean = format(value["mean"], form)
    if value["low"] is None:
        return mean
    return f"{mean} [{value['low']:{form}}, {value['high']:{form}}]"


def view(
    run: Annotated[
        Path,
        typer.Argument(help="A run folder, one of eval, what rollout wrote, or ATIF documents."),
    ],
    split: Annotated[Split | None, typer.Option(help="Only 'train' or 'heldout'.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    min_step: Annotated[int | None, typer.Option(help="First step to show.")] = None,
    max_step: Annotated[int | None, typer.Option(help="Last step to show.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Minimum reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Maximum reward.")] = None,
    tool_error: Annotated[
        str | None, typer.Option(help="Kind of tool error (timeout, …), 'any' or 'none'.")
    ] = None,
    finish_reason: Annotated[
        FinishReason | None, typer.Option(help="Finish reason of the trajectory (answer, …).")
    ] = None,
    stop_reason: Annotated[
        StopReason | None, typer.Option(help="Stop reason of one of its turns (eos, length, …).")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Text in the response or the id, ignoring case.")
    ] = None,
    sort: Annotated[Sort, typer.Option(help="'time'; or the 'best' or 'worst' last.")] = "time",
    limit: Annotated[
        int, typer.Option(min=1, help="Number of trajectories to show, the last ones.")
    ] = 5,
    whole_prompt: Annotated[
        bool, typer.Option("--whole-prompt", help="Show prompts in full.")
    ] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show groups as trees of turns, with rewards.")
    ] = False,
    color: Annotated[
        Colour, typer.Option(help="Meaning of the colour of sampled tokens.")
    ] = "mask",
) -> None:
    """Show a run's trajectories in the terminal; sampled and inserted tokens look different."""
    from jax_agent_rl.evaluate.export import read_recorded
    from jax_agent_rl.observe.view import view_run

    selection = TrajectoryFilter(
        split=split,
        step=step,
        min_step=min_step,
        max_step=max_step,
        min_reward=min_reward,
        max_reward=max_reward,
        tool_error=tool_error,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        text=text,
    )
    view_run(
        read_recorded(run),
        selection,
        sort=sort,
        limit=limit,
        whole_prompt=whole_prompt,
        trees=tree,
        colour=color,
    )


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, also of a run in progress, what rollout wrote, or ATIF documents."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; default report.html in the folder, or FILE.report.html."),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(help="Number of trajectories on the page, fewer if they are long; 0: all."),
    ] = 2000,
) -> None:
    """Write a run as one HTML page: curves, timeline, and every trajectory token by token.

    The page loads nothing.
    """
    from jax_agent_rl.evaluate.export import read_recorded
    from jax_agent_rl.observe.report.command import write_page

    data = read_recorded(run)
    if out is None:
        out = run / "report.html" if run.is_dir() else Path(f"{run}.report.html")
    print(write_page(data, out, limit=limit))


def export_atif(
    run: Annotated[
        Path, typer.Argument(help="A run folder, one of eval, or what rollout or rescore wrote.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write the documents to.")],
) -> None:
    """Write recorded trajectories as ATIF, a document each, with their token ids and log-probs.

    ATIF is the format of Harbor's trajectories. `view` and `report` read such documents, also those
    that other programs wrote.
    """
    from jax_agent_rl.evaluate.atif import write_atif
    from jax_agent_rl.evaluate.export import read_recorded

    count = write_atif(read_recorded(run), out)
    print(f"{counted(count, 'document')} in {out} (jax-agent-rl view {out})")


def simulate(
    config: ConfigArgument = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help=(
                "Overrides of configuration keys and, with the prefix 'assume.', of assumptions:"
                " assume.steps=20."
            ),
            autocompletion=key_completer({"": "train", "assume.": "simulate"}),
        ),
    ] = None,
    config_file: ConfigOption = None,
    assume: Annotated[Path | None, typer.Option(help="YAML file of assumptions.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare the trainers on a described cluster (engines, learner, tools) in virtual time."""
    from jax_agent_rl.testing.simulate.run import run_command

    command_line = given_config(config, overrides, config_file)
    run_command(
        command_line.required("simulate"),
        command_line.overrides,
        assume,
        as_json=json,
        console=console_of(json),
    )
