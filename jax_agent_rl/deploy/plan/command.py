"""The ``plan`` command, and its compiler in a process of its own.

The compiler may abort that process, and memory may run out there::

    command ──PlanTask──► subprocess ──► lines of progress, then the plan, or a refusal
       ▲                      └── aborted, killed ──► CompilerError: what it was compiling,
       │                                              and its last message
       └── one for each layout of a search, so that earlier results survive
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from jax_agent_rl.deploy.plan.result import PlanResult
from jax_agent_rl.errors import CompilerError, ConfigError, ModelError
from jax_agent_rl.observe.progress import print_line
from jax_agent_rl.utils.files import replacing
from jax_agent_rl.utils.startup import own_environment, own_python, quiet_logging
from jax_agent_rl.utils.text import counted

PLANNER = own_python("-m", "jax_agent_rl.deploy.plan.command")

ESTIMATES_SHOWN = 10
"""Layouts of a search whose estimates are printed before it compiles."""

# Settings of libtpu that avoid a fault, by a function on its stack. Seen on v5p with libtpu
# 0.0.42.1: gradients of a 1.5B model with fsdp=4.
_REMEDIES = {
    "EmitAllReduceScatterFusion": (
        "LIBTPU_INIT_ARGS=--xla_tpu_enable_all_reduce_scatter_fusion=false"
    )
}
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """What to plan.

    Attributes:
        recipe: configuration file.
        overrides: ``a.b=c``.
        topology: see ``Slice.parse``.
        utilization: share of the ideal that programs reach of which the compiler gives no time.
        price: price of a chip-hour, if the cost is asked for.
        profile: kind of the programs to profile (``plan.Profile``), instead of planning the run.
        width: characters of the screen's lines.
        colours: whether the screen shows colours.
    """

    recipe: str
    overrides: Sequence[str]
    topology: str
    utilization: float
    price: float | None
    profile: Any = None
    width: int
    colours: bool


def run_command(
    task: PlanTask, console: Console, *, budget: int | None, picture: Path | None, as_json: bool
) -> PlanResult:
    """Plan a run and print the result.

    Args:
        budget: search meshes and batches until so many fit; None plans the configured ones.
        picture: image file to draw the chips' memory to.
        as_json: end with one JSON object.

    Raises:
        ConfigError, ModelError: what a user has to fix.
        CompilerError: the compiler fails; in a search, on every layout.
        OSError: the image cannot be written.
    """
    if task.profile is not None and (budget is not None or picture is not None):
        raise ConfigError(
            "plan --profile shows programs of one layout: leave out --search and --plot"
        )
    if picture is not None:
        check_image(picture)

    searched: list[dict[str, Any]] = []
    if budget is None:
        planned = plan_in_subprocess(task, lambda text: print_line(console, f"  {text}"))
    else:
        planned, searched = _search(task, budget, console)
    print_plan(planned, searched, console, picture=picture, as_json=as_json)
    return planned


def _search(
    task: PlanTask, budget: int, console: Console
) -> tuple[PlanResult, list[dict[str, Any]]]:
    """Return the best layout's plan, and a JSON object for each layout tried."""
    from jax_agent_rl.config import Config, build
    from jax_agent_rl.config.loading import read_tree
    from jax_agent_rl.deploy.plan.plan import check
    from jax_agent_rl.deploy.plan.search import (
        TRIES,
        Candidate,
        candidates,
        estimate_table,
        layout_table,
        search,
        verdict,
    )
    from jax_agent_rl.deploy.plan.topology import Slice

    tree = read_tree(Path(task.recipe))
    slice = Slice.parse(task.topology)
    model = check(build(tree, task.overrides))

    def configured(overrides: Sequence[str]) -> Config:
        return build(tree, [*task.overrides, *overrides])

    def compile_layout(layout: Candidate) -> PlanResult:
        print_line(console, f"layout: {' '.join(layout.changes) or 'as it is configured'}")
        changed = dataclasses.replace(task, overrides=[*task.overrides, *layout.changes])
        return plan_in_subprocess(changed, lambda text: print_line(console, f"  {text}"))

    layouts = candidates(configured, model, slice)
    limit = min(TRIES * budget, len(layouts))
    console.print(
        f"{counted(len(layouts), 'layout')} could do; compiling until {min(budget, limit)} fit,"
        f" {limit} at most. Estimates for a chip, in the order in which layouts are tried:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(estimate_table(layouts[:ESTIMATES_SHOWN]), "")
    tried = search(layouts, compile_layout, capacity=slice.chip.hbm_bytes, budget=budget)
    console.print(layout_table(tried), "")
    console.print(verdict(tried), "", highlight=False, soft_wrap=True, sep="\n")

    best = tried[0].plan
    assert best is not None  # otherwise the search has failed
    return best, [layout.as_json() for layout in tried]


def print_plan(
    planned: PlanResult,
    searched: Sequence[Mapping[str, Any]],
    console: Console,
    *,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Print a plan, and draw it at the end.

    Args:
        searched: a JSON object for each layout that was tried.
        picture: image file to draw to, if any.
        as_json: print one JSON object, as the last line.

    Raises:
        OSError: the image cannot be written.
    """
    console.file.write(planned.report)  # rendered for this console's width and colours
    console.file.flush()
    if picture is not None:
        print_line(console, f"drawing {picture}")
    if as_json:  # the last line
        print(json.dumps({**planned.json, "searched": searched}), flush=True)
    if picture is not None:
        _draw(planned.json, picture)


def check_image(file: Path) -> None:
    """Check that an image can be written, before anything is compiled.

    Raises:
        ConfigError: the suffix names no format, or the folder is missing or read-only.
    """
    from matplotlib.figure import Figure

    kind = file.suffix.removeprefix(".").lower()
    if kind not in Figure().canvas.get_supported_filetypes():
        raise ConfigError(
            f"--plot {file}: {kind!r} is not an image format; end it with .png, .pdf or .svg"
        )
    if not file.parent.is_dir():
        raise ConfigError(
            f"--plot {file}: there is no folder {file.parent}; make it, or name another"
        )
    existing = file if file.exists() else file.parent
    if file.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"--plot {file} cannot be written; name a file in a folder of yours")


def _draw(plan: Mapping[str, Any], file: Path) -> None:
    """Draw the memory of a plan as JSON; the file's suffix names the format."""
    from matplotlib.figure import Figure

    memory = {program["name"]: program["memory"] for program in plan["programs"]}
    kinds: list[str] = []
    for parts in memory.values():
        for kind in parts:
            if kind not in kinds:
                kinds.append(kind)

    figure = Figure(figsize=(10, 1.5 + 0.45 * len(memory)), layout="constrained")
    axes = figure.subplots()
    starts = [0.0] * len(memory)
    for kind in kinds:
        sizes = [parts.get(kind, 0) / _GIB for parts in memory.values()]
        axes.barh(list(memory), sizes, left=starts, label=kind)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.axvline(plan["capacity"] / _GIB, color="black", linestyle="--", label="capacity")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest chip")
    verdict = "fits" if plan["fits"] else "does not fit"
    axes.set_title(f"{plan['topology']}: {verdict}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize="small")
    with replacing(file, message="{file} could not be written ({reason})") as stream:
        figure.savefig(stream, format=file.suffix.lstrip(".") or None)


# --- the compiler's process -----------------------------------------------------------------------


def plan_in_subprocess(
    task: PlanTask, on_progress: Callable[[str], None], command: Sequence[str] = PLANNER
) -> PlanResult:
    """Compile a run's programs in a process of their own, and wait for it.

    Args:
        on_progress: takes a line of progress.
        command: starts a program that answers as :func:`main` does.

    Raises:
        ConfigError: the configuration does not go with the slice.
        ModelError: the model's ``config.json`` is missing or of another family.
        CompilerError: the compiler failed, or its process ended before it had an answer.
    """
    progress = "starting"
    planned: PlanResult | None = None
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        _started(command, task, errors) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):  # the process ended within the line
                break
            match json.loads(line):
                case {"progress": str(progress)}:
                    on_progress(progress)
                case {"report": report, "plan": plan}:
                    planned = PlanResult(report=report, json=plan)
                case {"refused": "ConfigError", "problems": problems}:
                    raise ConfigError(problems)
                case {"refused": "ModelError", "problems": problems}:
                    raise ModelError(*problems)
                case {"refused": _, "problems": problems}:
                    raise CompilerError(*problems)
        status = process.wait()
        errors.seek(0)
        stderr = errors.read()

    if planned is None:
        raise CompilerError(_explain(status, progress, stderr))
    sys.stderr.write(stderr)  # warnings
    return planned


@contextlib.contextmanager
def _started(
    command: Sequence[str], task: PlanTask, errors: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start the process with its task; it never outlives this block."""
    environment = own_environment()
    environment["JAX_PLATFORMS"] = "cpu"  # it looks for no chips, and compiles for described ones
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its status tells how it ended
            print(json.dumps(dataclasses.asdict(task)), file=process.stdin, flush=True)
        yield process
    finally:
        process.kill()
        process.communicate()


def _explain(status: int, progress: str, stderr: str) -> str:
    """Explain why there is no plan, and what to do.

    Args:
        status: exit status of the process; -N if signal N ended it.
        progress: its last line of progress.
        stderr: its standard error.
    """
    if status >= 0:
        return (
            f"planning ended with exit status {status} when it was {progress}: this should not"
            f" happen\n{stderr}"
        )
    name = signal.Signals(-status).name
    if -status == signal.SIGKILL:
        return (
            f"planning was killed ({name}) when it was {progress}. A system does that where memory"
            " runs out: plan where there is more, or take a smaller learner.micro_batch_size"
        )

    # XLA's compilers use Abseil, which writes the line of a fatal error so.
    fatal = re.search(r"^F\d{4} .*?\] (.+)$", stderr, re.MULTILINE)
    if fatal is not None:
        message = fatal[1].strip()
    else:
        message = " ".join(stderr.split()[-30:])
    if not message:
        message = "it gave no message"

    remedies = ["try another learner.mesh, or --search, which leaves out what fails"]
    for function, setting in _REMEDIES.items():
        if function in stderr:
            remedies.append(f"set {setting}, here and on the slice")
    return (
        f"the compiler ended itself ({name}) when it was {progress}: {message}. That is a fault of"
        f" this compiler, and would also end the run on the slice; {'; or '.join(remedies)}"
    )


def main() -> None:
    """Read a :class:`PlanTask` from standard input, and answer with lines, each a JSON object."""
    quiet_logging()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is not an answer

        def answer(**line: Any) -> None:
            print(json.dumps(line), file=answers, flush=True)

        task = PlanTask(**json.loads(sys.stdin.readline()))
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        try:
            planned = _plan(task, lambda text: answer(progress=text))
        except ConfigError as error:
            answer(refused="ConfigError", problems=error.problems)
        except (ModelError, CompilerError) as error:
            answer(refused=type(error).__name__, problems=[str(error)])
        else:
            answer(report=planned.report, plan=planned.json)


def _exit_with_parent() -> None:
    """Exit when standard input ends, as compiling takes minutes."""
    # Not through sys.stdin, whose lock this thread would hold when the interpreter ends.
    while os.read(0, 1024):
        pass
    os._exit(1)


def _plan(task: PlanTask, on_progress: Callable[[str], None]) -> PlanResult:
    """Compile the programs of a task; imported here, as the parent need not load JAX."""
    from jax_agent_rl.config import load
    from jax_agent_rl.deploy.plan.plan import check, compile_profiled, make_plan
    from jax_agent_rl.deploy.plan.profiles import profiles_as_json, show_profiles
    from jax_agent_rl.deploy.plan.report import as_json, show
    from jax_agent_rl.deploy.plan.topology import Slice

    slice = Slice.parse(task.topology)
    config = load(task.recipe, task.overrides)
    model = check(config)

    screen = io.StringIO()
    console = Console(file=screen, width=task.width, force_terminal=task.colours)
    if task.profile is not None:
        compiled = compile_profiled(
            config, model, slice, profile=task.profile, on_progress=on_progress
        )
        show_profiles(compiled, slice.chip, console)
        return PlanResult(report=screen.getvalue(), json=profiles_as_json(compiled, slice.chip))

    plan = make_plan(config, model, slice, utilization=task.utilization, on_progress=on_progress)
    show(plan, console, price=task.price)
    return PlanResult(report=screen.getvalue(), json=as_json(plan, price=task.price))


if __name__ == "__main__":
    main()
