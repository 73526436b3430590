"""The sinks of ``trainer.logger``: TensorBoard, Weights & Biases, Trackio.

All get the names of ``metrics.jsonl`` and the training step as their axis; evaluations are ``evaluation/…``, nested
counts ``tool_errors_by_kind/timeout``. A resumed run continues the run that each library had. Their packages are
imported only where they are used.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.background import Sink, SinkThread, SinkThreads
from jax_agent_rl.utils.files import write_atomically

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""The package that each name of ``trainer.logger`` imports; the extra has the name."""
IDENTITIES = "loggers.json"
"""The file of the run folder with each library's identity of the run."""
CLOSING_SECONDS = 60.0
"""How long sinks may take to hand over what they hold (an upload, say) when a run ends."""
FLUSH_SECONDS = 10
STEP = "step"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run as a sink needs to know it.

    Attributes:
        folder: the run folder; its name is the run's.
        project: the name under which runs are shown together.
        config: the resolved configuration, as JSON.
        step: the step that the run continues from; later steps are logged again. 0: a new run.
        identity: the return value of :meth:`MetricSink.open` when the run began; None: it begins now.
    """

    folder: Path
    project: str
    config: Mapping[str, Any]
    step: int = 0
    identity: Mapping[str, str] | None = None


class StepScalars(NamedTuple):
    """The numbers of one ``metrics.jsonl`` record by name, and its training step."""

    step: int
    values: Mapping[str, float]


class MetricSink(Sink[StepScalars], Protocol):
    """A library that stores metrics. It is opened in its own thread, too."""

    def open(self, run: RunFacts) -> Mapping[str, str]:
        """Begin or continue a run; return what identifies it next time."""
        ...


class MetricSinks(SinkThreads[StepScalars]):
    """The metric sinks of a run; call it with each record of metrics."""

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.put(StepScalars(record["step"], scalars(record)))


class TensorBoardSink:
    """Event files in ``<run folder>/tensorboard``; a resumed run purges what was logged after its step."""

    _writer: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        import yaml
        from tensorboardX import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(
            str(folder),
            flush_secs=FLUSH_SECONDS,
            purge_step=None if run.identity is None else run.step + 1,
            filename_suffix=f".{run.step}",  # names have a resolution of one second; the next run would overwrite
        )
        if run.identity is None:
            self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False)}```", 0)
        return {"folder": folder.name}

    def write(self, item: StepScalars) -> None:
        for name, value in item.values.items():
            self._writer.add_scalar(name, value, item.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """One W&B run; ``WANDB_MODE=offline`` writes to ``<run folder>/wandb`` for ``wandb sync``.

    W&B's own step only grows, and a resumed run may log a step again. So the training step is a metric, and the axis of
    all others.
    """

    _run: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        import wandb

        identity = run.identity or {"id": uuid.uuid4().hex}
        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=identity["id"],
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return identity

    def write(self, item: StepScalars) -> None:
        self._run.log({**item.values, STEP: item.step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class TrackioSink:
    """One run in Trackio's local database; its name identifies it, so it ends randomly: folders may share a name."""

    _run: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        import trackio

        identity = run.identity or {"name": f"{run.folder.name}-{uuid.uuid4().hex[:6]}"}
        self._run = trackio.init(
            project=run.project, name=identity["name"], resume="allow", config=dict(run.config), embed=False
        )
        return identity

    def write(self, item: StepScalars) -> None:
        self._run.log(dict(item.values), step=item.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


SINKS: dict[str, Callable[[], MetricSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def check_sinks(names: Sequence[str]) -> None:
    """Check, before anything starts, that the sinks can be opened.

    Raises:
        ConfigError: a package is missing, with the extra that installs it, or a login is.
    """
    missing = [name for name in names if not _imports(PACKAGES[name])]
    if missing:
        extras = ",".join(missing)
        raise ConfigError(
            f"trainer.logger names {', '.join(missing)}, which is not installed: pip install 'jax_agent_rl[{extras}]', "
            "or remove it"
        )
    if "wandb" in names:
        _require_wandb_login()


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def _require_wandb_login() -> None:
    """Refuse online W&B without an API key, rather than prompt for one during start-up."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return
    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "trainer.logger names wandb, which knows no API key: run 'wandb login', set WANDB_API_KEY, or "
            "WANDB_MODE=offline"
        )


@contextmanager
def open_sinks(names: Sequence[str], run: RunFacts, *, say: Callable[[str], None]) -> Iterator[MetricSinks]:
    """Yield the sinks of a run. Their failures are reported once each and never raised.

    Args:
        names: from ``trainer.logger``.
        run: the run; its ``identity`` is read from the run folder.
        say: takes a line for the user, from any thread.
    """
    file = run.folder / IDENTITIES
    known: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}

    def start(name: str, sink: MetricSink) -> None:
        known[name] = dict(sink.open(replace(run, identity=known.get(name))))
        write_atomically(file, json.dumps(known, indent=2) + "\n")

    def warn(text: str) -> None:
        say(f"  warning: {text}; metrics.jsonl has everything")

    def feed(name: str) -> SinkThread[StepScalars]:
        sink = SINKS[name]()
        return SinkThread(name, sink, say=warn, start=lambda: start(name, sink))

    sinks = MetricSinks([feed(name) for name in names])
    try:
        yield sinks
    finally:
        sinks.close(CLOSING_SECONDS)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a ``metrics.jsonl`` record by name, nested ones with a slash.

    >>> scalars({"kind": "evaluation", "step": 3, "accuracy": 0.5, "lost": {"tool": 1}})
    {'evaluation/accuracy': 0.5, 'evaluation/lost/tool': 1.0}
    """
    prefix = "" if record["kind"] == "step" else f"{record['kind']}/"
    return dict(_numbers({k: v for k, v in record.items() if k not in ("kind", "step")}, prefix))


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
