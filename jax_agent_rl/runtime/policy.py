"""Policies on disk: the chosen one to serve, a run's checkpoint exported, a run folder resolved to a model's folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from jax_agent_rl.config import Config, LearnerConfig, MeshConfig, ModelConfig, TeacherConfig, build
from jax_agent_rl.config.commands import DpoConfig, SftConfig
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.errors import CheckpointError, ConfigError, ModelError
from jax_agent_rl.learner.checkpoint import Checkpointer, Notes, read_notes
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.models.convert import named_dtype
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.models.identity import WEIGHTS, model_fingerprints
from jax_agent_rl.models.lora import save_peft
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.runtime.choice import (
    PolicyChoice,
    checkpoint_folder,
    choose,
    recorded_tree,
    saved_step,
)
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.fingerprints import fingerprint, folder_fingerprint

logger = logging.getLogger(__name__)
_Named = TypeVar("_Named", ModelConfig, TeacherConfig)


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """A policy on disk and its configuration.

    Attributes:
        config: the resolved configuration; ``model.path`` holds the weights.
        recorded: the same for records, with a permanent ``model.path``.
        name: the policy's name in messages and records.
        step: step of the checkpoint; 0 for a model that is not of a run.
        checkpoint: fingerprint of the checkpoint's weights; None for a model that is not of a run.
    """

    config: Config
    recorded: Config
    name: str
    step: int
    checkpoint: str | None = None

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights, tokenizer and adapters that are served, wherever they lie.

        Rollout servers have their own weights, see ``ServerPool.weights_fingerprint``.
        """
        policy: Any = self.checkpoint or model_fingerprints(self.config.model.path)
        adapters = {
            name: folder_fingerprint(folder)
            for name, folder in self.recorded.rollout.adapters.items()
        }
        return fingerprint([policy, adapters])


@contextlib.contextmanager
def open_policy(choice: PolicyChoice) -> Iterator[ServedPolicy]:
    """Yield the chosen policy; a checkpoint is exported to a temporary folder beside its run.

    Raises:
        ConfigError: a file, a key or the combination is wrong.
        CheckpointError: there is no such checkpoint.
    """
    config = with_resolved_model(choose(choice))
    if choice.run is None:
        yield ServedPolicy(config=config, recorded=config, name=config.model.path, step=0)
        return
    step = saved_step(choice.run, choice.step)
    checkpoint = saved_run(choice.run, step)
    temporary = make_temp_folder("weights-", choice.run)
    folder = temporary / "model"
    names = set(config.agent.role_adapters.values())
    try:
        export_run(choice.run, folder, step=step, adapter=bool(names), ema=choice.ema)
        if names:
            adapters = {name: str(folder / name) for name in names}
            served = {"rollout": config.rollout.model_copy(update={"adapters": adapters})}
        else:
            served = {"model": config.model.model_copy(update={"path": str(folder)})}
        yield ServedPolicy(
            config=config.model_copy(update=served),
            recorded=config,
            name=f"{choice.run}, step {step}{', moving average' if choice.ema else ''}",
            step=step,
            checkpoint=checkpoint.export_key(ema=choice.ema),
        )
    finally:
        remove_temp_folder(temporary)


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    adapter: bool = False,
    ema: bool = False,
) -> Path:
    """Write a checkpoint as a Hugging Face folder, with adapters merged; return the folder.

    Args:
        run: the run folder.
        out: the folder to write: a new one, or that of an older export, which is replaced as a
            whole.
        step: step of the checkpoint; None: the newest.
        dtype: dtype of the weights, see :data:`~jax_agent_rl.models.convert.DTYPES`.
        adapter: write only the adapters, for PEFT; those of ``agent.role_adapters`` to a folder
            each.
        ema: write the moving average of what was trained.

    Raises:
        CheckpointError: not a run folder, its checkpoint is missing or damaged, or the model that
            it was trained over is another one now.
        ModelError: an unknown ``dtype``, or one that cannot hold the weights; or ``out`` holds
            something else.
        ConfigError: ``adapter`` for a run that trained the whole model, or a whole model of one
            that trained several adapters; ``ema`` for one without an average.
    """
    target = named_dtype(dtype)
    saved = saved_run(run, step)
    trained = saved.trained
    lora, base = trained.learner.lora, trained.model_path
    if adapter and lora is None:
        raise ConfigError(
            f"{run} trained the whole model (learner.lora is null); export it without --adapter"
        )
    if ema and not trained.learner.averaging:
        raise ConfigError(f"{run} kept no moving average (learner.ema_decay is 0); leave out --ema")
    names = trained.adapters
    if names and not adapter:
        raise ConfigError(
            f"{run} trained the adapters {names} over one model; export them with --adapter"
        )
    if out.expanduser().resolve() == Path(base).expanduser().resolve():
        raise ModelError(
            f"{out} is the model that the run was trained over, which it still needs; name a new"
            " folder"
        )
    saved.require_base()
    model, params = load_hf(base)
    start = Parameterization.policy(
        model, params, trained.learner, mesh=make_mesh(MeshConfig.model_validate({}))
    )
    checkpointer = Checkpointer(trained.checkpoints, keep=trained.keep_checkpoints)
    try:
        placed = jax.tree.map(jax.device_put, start.params, start.shardings)
        part = {"policy": {"opt_state": {"average": placed}} if ema else {"params": placed}}
        state = checkpointer.restore_part(
            {name: part for name in names} if names else part, step=saved.notes.step
        )
    finally:
        checkpointer.close()

    def weights(state: Any) -> Any:
        policy = state["policy"]
        return policy["opt_state"]["average"] if ema else policy["params"]

    if adapter and lora is not None:
        for folder, part in [(out / name, state[name]) for name in names] or [(out, state)]:
            save_peft(
                folder,
                lora,
                model,
                weights(part),
                base=base,
                base_weights=model_fingerprints(base)[WEIGHTS],
            )
        return out
    params = jax.tree.map(lambda x: x.astype(target), start.merge(weights(state), start.frozen))
    save_hf(out, model, params, tokenizer_from=base)
    return out


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """What a run's checkpoints hold.

    Attributes:
        model_path: the model that it started from.
        learner: what was trained of it.
        adapters: names of the adapters, if it trained several.
        checkpoints: their folder.
        keep_checkpoints: as configured.
    """

    model_path: str
    learner: LearnerConfig
    adapters: list[str]
    checkpoints: Path | str
    keep_checkpoints: int


def trained_run(run: Path) -> TrainedRun:
    """Describe a run of ``train``, ``sft`` or ``dpo``; raises CheckpointError if the folder is not a run's."""
    return _described(run, recorded_tree(run))


def _described(run: Path, tree: Mapping[str, Any]) -> TrainedRun:
    """Describe a run with this configuration."""
    tree = dict(tree)
    command = tree.pop("command", None)
    if command is None:
        config = build(tree)
        learner, adapters = config.learner, sorted(set(config.agent.role_adapters.values()))
    else:
        config = build_tree(DpoConfig if command == "dpo" else SftConfig, tree)
        learner, adapters = LearnerConfig(**dict(config.learner)), []
    return TrainedRun(
        model_path=config.model.path,
        learner=learner,
        adapters=adapters,
        checkpoints=checkpoint_folder(run, tree),
        keep_checkpoints=config.trainer.keep_checkpoints,
    )


EXPORT_FORMAT = 1
"""Raised when a checkpoint would be exported as another model than before."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """One checkpoint of a run.

    Attributes:
        trained: what the run trained when it was written, which a resumed run may have changed
            since.
        notes: what the checkpoint says about itself.
        tree: the configuration then, with the run's newest places of models and checkpoints, as
            JSON.
    """

    trained: TrainedRun
    notes: Notes
    tree: Mapping[str, Any]

    @property
    def config(self) -> Config:
        """The configuration of a run of ``train`` when the checkpoint was written."""
        return build(self.tree)

    def export_key(self, *, ema: bool = False) -> str:
        """Return the fingerprint of what is exported: it depends on no name, step or time."""
        part = ".policy.opt_state.average." if ema else ".policy.params."
        base = self._base() or model_fingerprints(self.trained.model_path)
        lora = self.trained.learner.lora
        adapter = None if lora is None else lora.model_dump(mode="json")
        return fingerprint([EXPORT_FORMAT, self.notes.fingerprint(part), base, adapter])

    def require_base(self) -> None:
        """Check that the model the run was trained over is still the same: adapters and tokenizer go with it.

        Raises:
            CheckpointError: it is another one.
        """
        recorded = self._base()
        if recorded is None:
            return
        found = model_fingerprints(self.trained.model_path)
        differing = sorted(
            name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)
        )
        if differing:
            raise CheckpointError(
                f"model.path={self.trained.model_path} is not the model that the run was trained"
                f" over ({', '.join(differing)} differ); put that model back, or resume the run"
                " with its new place as model.path"
            )

    def _base(self) -> dict[str, str] | None:
        """Return the recorded fingerprints of the model; None in checkpoints of earlier versions."""
        return self.notes.progress.get("identity", {}).get("content", {}).get("model.path")


def saved_run(run: Path, step: int | None = None) -> SavedRun:
    """Describe a checkpoint of a run; the newest for None.

    Raises:
        CheckpointError: not a run folder, or no such checkpoint, or its notes are damaged.
    """
    recorded = recorded_tree(run)
    now = _described(run, recorded)
    notes = read_notes(now.checkpoints, step)
    config = notes.progress.get("identity", {}).get("config")
    if config is None:  # of an earlier version
        return SavedRun(trained=now, notes=notes, tree=recorded)
    places = {
        name: value for name, value in recorded["trainer"].items() if name == "checkpoint_dir"
    }
    trainer = config["trainer"] | places
    model = {**config["model"], "path": recorded["model"]["path"]}
    tree = {**recorded, **config, "model": model, "trainer": trainer}
    then = _described(run, tree)
    return SavedRun(
        trained=replace(now, learner=then.learner, adapters=then.adapters), notes=notes, tree=tree
    )


def resolve_model(path: str) -> str:
    """Return the Hugging Face folder of ``model.path``: of a run folder its newest checkpoint's, exported once.

    The folder is found by the content of the checkpoint, so that a run that was rewound, and has
    written the same step again, is exported again.

    Raises:
        CheckpointError: the run has no complete checkpoint.
    """
    run = Path(path).expanduser()
    if not (run / "checkpoints").is_dir():
        return path
    saved = saved_run(run)
    step = saved.notes.step
    key = saved.export_key().rpartition(":")[2]
    folder = run / "exports" / key / f"step-{step}"
    if not folder.is_dir():
        logger.info("exporting step %d of %s", step, run)
        unfinished = make_temp_folder("weights-", run)
        try:
            export_run(run, unfinished / "model", step=step)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                (unfinished / "model").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, with the same content
                    raise
        finally:
            remove_temp_folder(unfinished)
    return str(folder)


def with_resolved_model(config: Config) -> Config:
    """Return a configuration in which no path of the policy or a teacher is a run folder, see :func:`resolve_model`."""

    def resolved(model: _Named) -> _Named:
        return model.model_copy(update={"path": resolve_model(model.path)})

    changes: dict[str, Any] = {"model": resolved(config.model)}
    if config.distill is not None:
        teachers = tuple(map(resolved, config.distill.teachers))
        changes["distill"] = config.distill.model_copy(update={"teachers": teachers})
    return config.model_copy(update=changes)
