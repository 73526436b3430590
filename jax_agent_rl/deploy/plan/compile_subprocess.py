"""Planning in a process of its own: libtpu may abort it on an internal fault, and memory may run out.

::

    command ──Task──► compile_subprocess ──► lines of progress, then what was found, or a refusal
       ▲                              └── aborted, killed ──► CompilerError: what it compiled, its last words
       └── one for each layout of a search: what was compiled before stands
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from jax_agent_rl.errors import CompilerError, ConfigError, ModelError
from jax_agent_rl.utils.startup import quiet_logging

PLANNER = (sys.executable, "-m", "jax_agent_rl.deploy.plan.compile_subprocess")
# What keeps libtpu from where it fails, by a function on its stack. Seen on v5p with libtpu 0.0.42.1: gradients of a
# 1.5B model with fsdp=4.
_REMEDIES = {"EmitAllReduceScatterFusion": "LIBTPU_INIT_ARGS=--xla_tpu_enable_all_reduce_scatter_fusion=false"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to plan.

    Attributes:
        recipe: configuration file.
        topology: as ``Slice.parse`` takes it.
        utilization: share of the roofline that programs are supposed to reach.
        price: of a chip for an hour, if the cost is asked for.
        width: of the screen, in letters.
        colours: whether it has them.
    """

    recipe: str
    overrides: Sequence[str]
    topology: str
    utilization: float
    price: float | None
    width: int
    colours: bool


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Result of planning.

    Attributes:
        report: the plan as people read it.
        made: the same for programs, see :func:`~jax_agent_rl.deploy.plan.report.as_json`.
    """

    report: str
    made: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.made["fits"]

    @property
    def memory(self) -> int:
        """Bytes of a chip that the fullest program needs."""
        return max(program["total"] for program in self.made["programs"])

    @property
    def seconds(self) -> float:
        """Least seconds of a step."""
        return self.made["step"]["seconds"]


def plan_in_subprocess(task: Task, say: Callable[[str], None], command: Sequence[str] = PLANNER) -> PlanResult:
    """Compile a run's programs in a process of their own, and wait for it.

    Args:
        task: what to plan.
        say: takes a line of progress.
        command: starts what answers as :func:`main` does.

    Raises:
        ConfigError: the configuration does not go with the slice.
        ModelError: the model's ``config.json`` is missing or of another family.
        CompilerError: the compiler failed, or its process ended before it had an answer.
    """
    last, planned = "starting", None
    with tempfile.TemporaryFile("w+", errors="replace") as words, _started(command, task, words) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):  # it ended in the middle of it
                break
            match json.loads(line):
                case {"say": str(last)}:
                    say(last)
                case {"report": report, "made": made}:
                    planned = PlanResult(report=report, made=made)
                case {"refused": kind, "problems": problems}:
                    raise _refusal(kind, problems)
        status = process.wait()
        words.seek(0)
        said = words.read()
    if planned is None:
        raise CompilerError(_explained(status, last, said))
    sys.stderr.write(said)  # warnings
    return planned


@contextlib.contextmanager
def _started(command: Sequence[str], task: Task, words: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Start the process with its task; it never outlives this block."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},  # it looks for no chips, and compiles for those described
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its status tells how it ended
            print(json.dumps(dataclasses.asdict(task)), file=process.stdin, flush=True)
        yield process
    finally:
        process.kill()
        process.communicate()


def _refusal(kind: str, problems: list[str]) -> ConfigError | ModelError | CompilerError:
    match kind:
        case "ConfigError":
            return ConfigError(problems)
        case "ModelError":
            return ModelError(*problems)
        case _:
            return CompilerError(*problems)


def _explained(status: int, last: str, said: str) -> str:
    """Explain why there is no plan, and what to do.

    Args:
        status: of the process.
        last: what it was doing.
        said: its standard error.
    """
    if status >= 0:
        return f"planning ended with exit status {status} when it was {last}: this should not happen\n{said}"
    name = signal.Signals(-status).name
    if -status == signal.SIGKILL:
        return (
            f"planning was killed ({name}) when it was {last}. A system does that where memory runs out: plan where "
            "there is more, or take a smaller learner.micro_batch_size"
        )
    fatal = re.search(r"^F\d{4} .*?\] (.+)$", said, re.MULTILINE)  # as Abseil, which libtpu uses, writes that line
    words = fatal[1].strip() if fatal else " ".join(said.split()[-30:])
    remedies = ["try another learner.mesh, or --search, which leaves out what fails"]
    remedies += [f"set {remedy}, here and on the slice" for place, remedy in _REMEDIES.items() if place in said]
    return (
        f"libtpu ended itself ({name}) when it was {last}: {words or 'it said nothing'}. That is a fault of this "
        f"compiler, and would end the run on the slice, too; {'; or '.join(remedies)}"
    )


def main() -> None:
    """Read a :class:`Task` from a line of standard input, and answer with lines, each a JSON object."""
    quiet_logging()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer

        def answer(**line: Any) -> None:
            print(json.dumps(line), file=answers, flush=True)

        task = Task(**json.loads(sys.stdin.readline()))
        threading.Thread(target=_end_with_input, daemon=True).start()
        try:
            planned = _plan(task, say=lambda text: answer(say=text))
        except ConfigError as error:
            answer(refused="ConfigError", problems=error.problems)
        except (ModelError, CompilerError) as error:
            answer(refused=type(error).__name__, problems=[str(error)])
        else:
            answer(report=planned.report, made=planned.made)


def _end_with_input() -> None:
    """Exit when the parent has gone, as compiling takes minutes."""
    while os.read(0, 1024):  # not through sys.stdin, whose lock this thread would hold when the interpreter ends
        pass
    os._exit(1)


def _plan(task: Task, say: Callable[[str], None]) -> PlanResult:
    # Only here: who asks need not load JAX.
    from rich.console import Console

    from jax_agent_rl.config import load
    from jax_agent_rl.deploy.plan.plan import check, make_plan
    from jax_agent_rl.deploy.plan.report import as_json, show
    from jax_agent_rl.deploy.plan.topology import Slice

    slice = Slice.parse(task.topology)
    config = load(task.recipe, task.overrides)
    model = check(config)
    plan = make_plan(config, model, slice, devices=slice.devices(), utilization=task.utilization, say=say)
    console = Console(file=io.StringIO(), width=task.width, force_terminal=task.colours)
    show(plan, console, price=task.price)
    assert isinstance(console.file, io.StringIO)
    return PlanResult(report=console.file.getvalue(), made=as_json(plan, price=task.price))


if __name__ == "__main__":
    main()
