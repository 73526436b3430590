"""Policies on disk: which one to serve, the export of a checkpoint, and run folders as models."""

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
from jax_agent_rl.models.parameters import cast_params
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.runtime.policy_choice import (
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
        """Return the fingerprint of the weights, tokenizer and adapters that are served.

        It does not depend on where they are. Rollout servers have their own weights, see
        ``ServerPool.weights_fingerprint``.
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
    name = f"{choice.run}, step {step}"
    if choice.ema:
        name += ", moving average"
    temporary = make_temp_folder("weights-", choice.run)
    folder = temporary / "model"
    adapter_names = set(config.agent.role_adapters.values())
    try:
        export_run(choice.run, folder, step=step, adapter=bool(adapter_names), ema=choice.ema)
        if adapter_names:
            adapters = {adapter: str(folder / adapter) for adapter in adapter_names}
            changes = {"rollout": config.rollout.model_copy(update={"adapters": adapters})}
        else:
            changes = {"model": config.model.model_copy(update={"path": str(folder)})}
        yield ServedPolicy(
            config=config.model_copy(update=changes),
            recorded=config,
            name=name,
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
        out: the folder to write: a new one, or an older export's, which is replaced as a
            whole.
        step: step of the checkpoint; None: the newest.
        dtype: of the weights, see :data:`~jax_agent_rl.models.convert.DTYPES`.
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
    target_dtype = named_dtype(dtype)
    saved = saved_run(run, step)
    trained = saved.trained
    lora = trained.learner.lora
    base = trained.model_path
    names = trained.adapters
    if adapter and lora is None:
        raise ConfigError(
            f"{run} trained the whole model (learner.lora is null); export it without --adapter"
        )
    if ema and not trained.learner.averaging:
        raise ConfigError(f"{run} kept no moving average (learner.ema_decay is 0); leave out --ema")
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
    parameterization = Parameterization.policy(
        model, params, trained.learner, mesh=make_mesh(MeshConfig.model_validate({}))
    )
    state = _restore_trained(saved, parameterization, ema=ema)

    def trained_params(learner_state: Any) -> Any:
        policy = learner_state["policy"]
        return policy["opt_state"]["average"] if ema else policy["params"]

    if adapter and lora is not None:
        if names:
            states = {out / name: state[name] for name in names}
        else:
            states = {out: state}
        for folder, learner_state in states.items():
            save_peft(
                folder,
                lora,
                model,
                trained_params(learner_state),
                base=base,
                base_weights=model_fingerprints(base)[WEIGHTS],
            )
        return out

    merged = parameterization.merge(trained_params(state), parameterization.frozen)
    save_hf(out, model, cast_params(merged, target_dtype), tokenizer_from=base)
    return out


def _restore_trained(saved: SavedRun, parameterization: Parameterization, *, ema: bool) -> Any:
    """Return the part of a checkpoint with the trained parameters, or their moving average.

    With several adapters, there is such a part for each, by its name.
    """
    placed = jax.tree.map(jax.device_put, parameterization.params, parameterization.shardings)
    policy = {"opt_state": {"average": placed}} if ema else {"params": placed}
    learner_state = {"policy": policy}
    like: Any = learner_state
    if saved.trained.adapters:
        like = dict.fromkeys(saved.trained.adapters, learner_state)

    trained = saved.trained
    checkpointer = Checkpointer(trained.checkpoints, keep=trained.keep_checkpoints, read_only=True)
    try:
        return checkpointer.restore_part(like, step=saved.notes.step)
    finally:
        checkpointer.close()


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """What a run's checkpoints hold.

    Attributes:
        model_path: the model that it started from.
        learner: what was trained of it.
        adapters: names of the adapters, if it trained several.
        checkpoints: their folder.
    """

    model_path: str
    learner: LearnerConfig
    adapters: list[str]
    checkpoints: Path | str
    keep_checkpoints: int


def trained_run(run: Path) -> TrainedRun:
    """Describe a run of ``train``, ``sft`` or ``dpo``.

    Raises:
        CheckpointError: the folder is not a run's.
    """
    return _describe_run(run, recorded_tree(run))


def _describe_run(run: Path, tree: Mapping[str, Any]) -> TrainedRun:
    """Describe a run with this configuration."""
    tree = dict(tree)
    command = tree.pop("command", None)
    adapters: list[str] = []
    if command is None:
        config = build(tree)
        learner = config.learner
        adapters = sorted(set(config.agent.role_adapters.values()))
    else:
        config_class = DpoConfig if command == "dpo" else SftConfig
        config = build_tree(config_class, tree)
        learner = LearnerConfig(**dict(config.learner))

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
        tree: the configuration then, as JSON, with the run's newest paths of models and
            checkpoints.
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
        path = ".policy.opt_state.average." if ema else ".policy.params."
        base = self._base() or model_fingerprints(self.trained.model_path)
        lora = self.trained.learner.lora
        lora_settings = None if lora is None else lora.model_dump(mode="json")
        return fingerprint([EXPORT_FORMAT, self.notes.fingerprint(path), base, lora_settings])

    def require_base(self) -> None:
        """Check that the model the run was trained over is still the same.

        Adapters and tokenizer go with it.

        Raises:
            CheckpointError: it is another one.
        """
        recorded = self._base()
        if recorded is None:
            return

        current = model_fingerprints(self.trained.model_path)
        names = sorted(recorded.keys() | current.keys())
        differing = [name for name in names if recorded.get(name) != current.get(name)]
        if differing:
            raise CheckpointError(
                f"model.path={self.trained.model_path} is not the model that the run was trained"
                f" over ({', '.join(differing)} differ); put that model back, or resume the run"
                " with its new place as model.path"
            )

    def _base(self) -> dict[str, str] | None:
        """Return the recorded fingerprints of the model; None in earlier versions' checkpoints."""
        identity = self.notes.progress.get("identity", {})
        return identity.get("content", {}).get("model.path")


def saved_run(run: Path, step: int | None = None) -> SavedRun:
    """Describe a checkpoint of a run; the newest for None.

    Raises:
        CheckpointError: not a run folder, or no such checkpoint, or its notes are damaged.
    """
    newest_tree = recorded_tree(run)
    newest = _describe_run(run, newest_tree)
    notes = read_notes(newest.checkpoints, step)
    saved_config = notes.progress.get("identity", {}).get("config")
    if saved_config is None:  # of an earlier version
        return SavedRun(trained=newest, notes=notes, tree=newest_tree)

    # The paths are the run's newest: models and checkpoints may have been moved since.
    trainer = dict(saved_config["trainer"])
    if "checkpoint_dir" in newest_tree["trainer"]:
        trainer["checkpoint_dir"] = newest_tree["trainer"]["checkpoint_dir"]
    model = {**saved_config["model"], "path": newest_tree["model"]["path"]}
    tree = {**newest_tree, **saved_config, "model": model, "trainer": trainer}
    at_save = _describe_run(run, tree)
    trained = replace(newest, learner=at_save.learner, adapters=at_save.adapters)
    return SavedRun(trained=trained, notes=notes, tree=tree)


def resolve_model(path: str) -> str:
    """Return the Hugging Face folder of a ``model.path``, which may be a run folder.

    Of a run folder, the newest checkpoint is exported once. The export is found by the content of
    the checkpoint, so that a run that was rewound, and has written the same step again, is exported
    again.

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
    if folder.is_dir():
        return str(folder)

    logger.info("exporting step %d of %s", step, run)
    temporary = make_temp_folder("weights-", run)
    try:
        export_run(run, temporary / "model", step=step)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            (temporary / "model").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        remove_temp_folder(temporary)
    return str(folder)


def with_resolved_model(config: Config) -> Config:
    """Return a configuration whose policy and teachers are Hugging Face folders.

    Run folders are resolved by :func:`resolve_model`.
    """

    def resolve(model: _Named) -> _Named:
        return model.model_copy(update={"path": resolve_model(model.path)})

    changes: dict[str, Any] = {"model": resolve(config.model)}
    if config.distill is not None:
        teachers = tuple(resolve(teacher) for teacher in config.distill.teachers)
        changes["distill"] = config.distill.model_copy(update={"teachers": teachers})
    return config.model_copy(update=changes)
