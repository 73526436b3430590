"""The models in training: a learner each, which share programs and frozen parameters, in one thread.

A model's state is in memory. Its requests are in the database before they run, and its state is on
disk every few updates: a server that was killed loads the newest snapshot and repeats the requests
since, which gives the same state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.config.commands import TinkerServerSettings
from jax_agent_rl.learner.batch import TrainingSequence
from jax_agent_rl.learner.parameterization import new_adapters
from jax_agent_rl.learner.sequence_learner import AdamParams, ForwardBackward, SequenceLearner
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.lora import PeftAdapter, scaled_adapter
from jax_agent_rl.tinker_server.database import Database, Request
from jax_agent_rl.tinker_server.requests import LoadRequest, OptimStepRequest, SaveRequest
from jax_agent_rl.tinker_server.wire import (
    BadRequest,
    ContextScores,
    ScoringRequest,
    parse_batch,
    read_batch,
    write_batch_result,
)
from jax_agent_rl.utils.files import make_folder, replacing
from jax_agent_rl.utils.fingerprints import file_fingerprint

PREFIX = "tinker://"
Checkpoint = tuple[str, str]
"""A checkpoint's path, and the fingerprint of its content: another one may get its name."""


class Models:
    """Computes training requests; used by one thread at a time.

    Args:
        settings: of the server.
        model: the base model's hyperparameters.
        params: its parameters.
        database: of the server.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        model: DecoderConfig,
        params: Params,
        database: Database,
    ) -> None:
        self._settings, self._model, self._database = settings, model, database
        self._folder = Path(settings.state_dir)
        config = LearnerConfig(
            pack_length=settings.pack_length,
            compute_dtype=settings.compute_dtype,
            lora=settings.lora,
        )
        # Clients send a few sequences at a time: whole rows would be mostly padding.
        self._base = SequenceLearner(model, params, config=config, reference=True, lengths=8)
        self._learners: dict[str, SequenceLearner] = {}
        self._updates: dict[str, int] = {}
        self._scored: tuple[Checkpoint | None, Params | None] = (
            None,
            None,
        )  # the last checkpoint scored with
        self._run_request: dict[str, Callable[[str, Request], bytes]] = {
            "create_model": lambda model, _: _reply("create_model", model_id=model),
            "forward": self._forward_backward,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "load_weights": self._load,
            "unload_model": self._unload,
        }

    def run(self, request: Request) -> bytes:
        """Compute a request and return its result; raise BadRequest if that is the client's fault."""
        self._restore(request)
        try:
            result = self._run_request[request.kind](request.owner, request)
        except ValueError as error:  # the learner's, of a batch that it cannot pack
            raise BadRequest(str(error)) from error
        is_due = self._updates[request.owner] % self._settings.snapshot_every == 0
        if (
            request.kind == "load_weights" or request.kind == "optim_step" and is_due
        ):  # no gradient is left after these
            self._snapshot(request, result)
        return result

    def _snapshot(self, request: Request, result: bytes) -> None:
        """Write the state after a request, then note it together with the result, then remove older states.

        A server that is killed in between finds the older state, and the requests since then.
        """
        file = self._snapshot_file(request.owner, request.number)
        self._write(file, request.owner)
        self._database.set_snapshot(request, result)
        self._remove_snapshots(request.owner, kept=file)

    def fingerprint(self, path: str) -> str:
        """Return the fingerprint of a checkpoint: another one may get its name.

        Raises:
            BadRequest: there is no such file.
        """
        file = self._file(path)
        try:
            return file_fingerprint(file)
        except FileNotFoundError:
            raise BadRequest(f"there is no checkpoint {path!r} any more") from None

    def adapter(self, path: str) -> PeftAdapter:
        """Return the adapter of a checkpoint, for the engine."""
        assert self._settings.lora is not None
        return scaled_adapter(self._settings.lora, self._trained(path))

    def merged(self, path: str | None) -> Params:
        """Return the whole model of a checkpoint, or the base model; on device."""
        return self._base.params if path is None else self._base.twin(self._trained(path)).params

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._model.vocab_size

    def score(
        self, checkpoint: Checkpoint | None, work: list[ScoringRequest]
    ) -> list[ContextScores]:
        """Score contexts under a checkpoint or the base model, all in one batch."""
        if checkpoint != self._scored[0]:
            self._scored = (None, None)
        if checkpoint is not None and self._scored[0] is None:
            path = checkpoint[0]  # it may have been replaced since it was asked for
            self._scored = ((path, self.fingerprint(path)), self._trained(path))
        data = [_sequence(context.ids, np.arange(len(context.ids) - 1)) for context in work]
        others, views = [], []  # a sequence for each column of targets, and where its log-probs go
        targets = [
            None if context.targets is None else np.zeros(context.targets.shape) for context in work
        ]
        for context, made in zip(work, targets, strict=True):
            if context.targets is not None and made is not None:
                for ids, column in zip(context.targets.T, made.T, strict=True):
                    if len(at := np.flatnonzero(ids >= 0)):
                        others.append(_sequence(context.ids, at, ids[at].astype(np.int32)))
                        views.append((column, at))
        logprobs = self._base.forward([*data, *others], trained=self._scored[1])
        for (column, at), values in zip(views, logprobs[len(data) :], strict=True):
            column[at] = values
        tops: dict[int, Any] = {}
        if chosen := [number for number, context in enumerate(work) if context.top]:
            some = [data[number] for number in chosen]
            most = max(context.top for context in work)
            tops = dict(
                zip(
                    chosen,
                    self._base.top_logprobs(some, most, trained=self._scored[1]),
                    strict=True,
                )
            )
        return [
            ContextScores(logprobs=values, top=tops.get(number), targets=targets[number])
            for number, values in enumerate(logprobs[: len(data)])
        ]

    def forget(self, models: list[str]) -> None:
        """Free the memory of models. A later request restores them."""
        for model in models:
            self._learners.pop(model, None)

    def remove_checkpoint(self, path: str) -> None:
        """Remove a checkpoint and its file."""
        self._database.remove_checkpoint(path)
        self._file(path).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove the checkpoints that have expired, with their files."""
        for path in self._database.remove_expired():
            self._file(path).unlink(missing_ok=True)

    def remove_training_state(self, model: str) -> None:
        """Remove the state of a model that the database has forgotten, in memory and on disk."""
        self.forget([model])
        self._remove_snapshots(model)

    def unknown_files(self, paths: list[str]) -> list[Path]:
        """Return the files in the checkpoints' folders that are not of these checkpoints."""
        known = {self._file(path) for path in paths}
        return [
            file for file in sorted(self._folder.glob("checkpoints/*/*/*")) if file not in known
        ]

    # --- requests ---------------------------------------------------------------------------------

    def _forward_backward(self, model: str, request: Request) -> bytes:
        message = parse_batch(request.body or b"")
        data, columns, constants = read_batch(message, pack_length=self._settings.pack_length)
        learner = self._learners[model]
        if message.forward_only:
            result = ForwardBackward(loss=0.0, logprobs=learner.forward(data))
        else:
            result = learner.forward_backward(data, loss=message.loss_fn, **constants)
        return write_batch_result(result, columns)

    def _optim_step(self, model: str, request: Request) -> bytes:
        given = OptimStepRequest.from_json(request.body).adam_params
        if given is None:
            raise BadRequest("only AdamW is computed: send adam_params")
        numbers = AdamParams(**given.model_dump())
        applied = self._learners[model].optim_step(numbers)
        self._updates[model] += 1
        metrics = {"grad_norm:mean": applied.norm, "finite:mean": float(applied.finite)}
        return _reply("optim_step", metrics=metrics)

    def _save(self, model: str, request: Request) -> bytes:
        self.remove_expired()  # room for the new one; a name that has expired is free again
        body = SaveRequest.from_json(request.body)
        for_sampler = request.kind == "save_weights_for_sampler"
        name = body.path or f"{request.number:06}"
        path = f"{PREFIX}{model}/{'sampler_weights' if for_sampler else 'weights'}/{name}"
        file = self._file(path)
        if file.exists() and not (for_sampler or body.overwrite):
            raise BadRequest(f"{path} exists; choose another name, or send overwrite")
        self._write(file, model, optimizer=not for_sampler)
        settings = self._database.model(model) or {}
        kind = "sampler" if for_sampler else "training"
        ttl = body.ttl_seconds
        recorded = {
            "base_model": settings.get("base_model"),
            "user_metadata": body.user_metadata or settings.get("user_metadata"),
        }
        if ttl is None and for_sampler and body.path is None:
            # Nobody can ask for it by name: it stays as long as it is used.
            ttl = self._settings.sampler_ttl_seconds
            recorded["idle_seconds"] = ttl
        recorded["expires"] = None if ttl is None else time.time() + ttl
        self._database.add_checkpoint(path, model, kind, file.stat().st_size, recorded)
        if for_sampler and body.sampling_session_seq_id is not None:
            session = f"{model}:sampler:{body.sampling_session_seq_id}"
            self._database.add_sampler(session, path)
            return _reply(
                request.kind, path=None if body.path is None else path, sampling_session_id=session
            )
        return _reply(request.kind, path=path)

    def _load(self, model: str, request: Request) -> bytes:
        body = LoadRequest.from_json(request.body)
        self._read(self._file(body.path), model, optimizer=body.optimizer)
        return _reply("load_weights", path=body.path, model_id=model)

    def _unload(self, model: str, request: Request) -> bytes:
        self._learners.pop(model, None)
        return _reply("unload_model", model_id=model)

    # --- states -----------------------------------------------------------------------------------

    def _restore(self, request: Request) -> None:
        """Have the model of a request in memory: new, or as it was before the server ended."""
        model = request.owner
        if model in self._learners:
            return
        settings = self._database.model(model)
        if settings is None:
            raise BadRequest(f"there is no model {model}")
        lora, initial = self._settings.lora, None
        if lora is not None:
            initial = new_adapters(lora.model_copy(update={"seed": settings["seed"]}), self._model)
        self._learners[model], self._updates[model] = self._base.twin(initial), 0
        if settings["snapshot"]:
            file = self._snapshot_file(model, settings["snapshot"])
            self._read(
                file if file.is_file() else self._unnumbered_snapshot(model), model, optimizer=True
            )
        for before in self._database.since(model, settings["snapshot"]):
            if before.number < request.number and before.kind in (
                "forward_backward",
                "optim_step",
                "load_weights",
            ):
                self._run_request[before.kind](model, before)

    def _snapshot_file(self, model: str, number: int) -> Path:
        """Return the file of a model's state after the request of a number."""
        return self._below("models", model, str(number))

    def _unnumbered_snapshot(self, model: str) -> Path:
        """Return where an earlier version of the server wrote all snapshots of a model."""
        return self._below("models", model)

    def _remove_snapshots(self, model: str, *, kept: Path | None = None) -> None:
        """Remove the snapshots of a model, except one."""
        folder = self._snapshot_file(model, 0).parent
        for file in (*folder.glob("*"), self._unnumbered_snapshot(model)):
            if file != kept:
                file.unlink(missing_ok=True)
        if kept is None and folder.is_dir():
            folder.rmdir()

    def _file(self, path: str) -> Path:
        """Return the file of a checkpoint's path; raise BadRequest for what is none."""
        parts = path.removeprefix(PREFIX).split("/")
        is_named = (
            path.startswith(PREFIX)
            and len(parts) == 3
            and parts[1] in ("weights", "sampler_weights")
        )
        if not is_named:
            raise BadRequest(f"{path!r} is no path of a checkpoint: {PREFIX}MODEL/weights/NAME")
        return self._below("checkpoints", *parts)

    def _below(self, *names: str) -> Path:
        """Return a file of the server's folder, whose last name gets a suffix; raise BadRequest for one elsewhere."""
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise BadRequest(f"{name!r} is no name of a model or a checkpoint")
        *folders, name = names
        return self._folder.joinpath(*folders, f"{name}.npz")

    def _write(self, file: Path, model: str, *, optimizer: bool = True) -> None:
        learner = self._learners[model]
        tree = learner.state.policy if optimizer else {"params": learner.trained}
        arrays = {
            jax.tree_util.keystr(k): np.asarray(x)
            for k, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        make_folder(file.parent)
        with replacing(file) as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]  # no array is called allow_pickle

    def _read(self, file: Path, model: str, *, optimizer: bool) -> None:
        learner = self._learners[model]
        if not optimizer:
            fresh = self._base.twin(_arrays(file, learner.state.policy.params, ".params"))
            self._learners[model] = fresh
            return
        state = learner.state
        learner.state = type(state)(
            _arrays(file, state.policy, ""), None, state.kl_coef, state.steps, state.nonfinite
        )

    def _trained(self, path: str) -> Params:
        return _arrays(self._file(path), self._base.trained, ".params")


def _arrays(file: Path, like: Any, prefix: str) -> Any:
    """Return the arrays of a file in the structure, and at the places, of a tree of arrays."""
    if not file.is_file():
        raise BadRequest(f"there is no checkpoint {file.stem} of that model")
    with np.load(file, allow_pickle=False) as stored:
        names = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(like)}
        sources = {
            name: next((n for n in (f"{prefix}{name}", f"['params']{name}") if n in stored), None)
            for name in names
        }
        if missing := [name for name, source in sources.items() if source is None]:
            raise BadRequest(
                f"{file.stem} does not hold {missing[0]}; a sampler's weights have no optimizer"
                " state"
            )
        leaves = [jax.device_put(stored[sources[name]], x.sharding) for name, x in names.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _sequence(
    ids: list[int], at: np.ndarray, targets: np.ndarray | None = None
) -> TrainingSequence:
    """Return a sequence that scores the ids after places ``at``, or ``targets`` instead of them."""
    mask = np.zeros(at[-1] + 2, bool)
    mask[at + 1] = True
    return TrainingSequence(
        token_ids=np.array(ids[: len(mask)], np.int32), loss_mask=mask, targets=targets
    )


def _reply(kind: str, **fields: Any) -> bytes:
    return json.dumps(
        {"type": kind, **{name: value for name, value in fields.items() if value is not None}}
    ).encode()
