"""The models in training: a learner each, which share programs and frozen parameters.

All run in one thread. A model's state is in memory. Its requests are in the database before they
run, and its state is written to disk every few updates: a server that was killed loads the newest
snapshot and repeats the requests since, which gives the same state.
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
from jax_agent_rl.learner.parameterization import new_adapters
from jax_agent_rl.learner.sequence_learner import AdamParams, ForwardBackward, SequenceLearner
from jax_agent_rl.learner.sequences import TrainingSequence
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
"""A checkpoint's path, and the fingerprint of its content: another one may get the same path."""
_REPEATED = ("forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change a model's state, and so are repeated after the newest snapshot."""


class Models:
    """Computes training requests; used by one thread at a time.

    Args:
        model: the base model's hyperparameters.
        params: the base model's parameters.

    Attributes:
        folder: holds snapshots and checkpoints.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        model: DecoderConfig,
        params: Params,
        database: Database,
    ) -> None:
        self._settings = settings
        self._model = model
        self._database = database
        self.folder = Path(settings.state_dir)
        config = LearnerConfig(
            pack_length=settings.pack_length,
            compute_dtype=settings.compute_dtype,
            lora=settings.lora,
        )
        # Clients send a few sequences at a time: whole rows would be mostly padding.
        self._base = SequenceLearner(model, params, config=config, reference=True, lengths=8)
        self._learners: dict[str, SequenceLearner] = {}
        self._updates: dict[str, int] = {}
        # The last checkpoint that was scored with, and its parameters; None for the base model.
        self._scored_checkpoint: Checkpoint | None = None
        self._scored_params: Params | None = None
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
        """Compute a request and return its result.

        Raises:
            BadRequest: it cannot be computed, which is the client's fault.
        """
        self._restore(request)
        try:
            result = self._run_request[request.kind](request.owner, request)
        except ValueError as error:  # the learner's, of a batch that it cannot pack
            raise BadRequest(str(error)) from error

        # Only after requests that leave no gradient, which a snapshot does not hold.
        is_due = self._updates[request.owner] % self._settings.snapshot_every == 0
        if request.kind == "load_weights" or (request.kind == "optim_step" and is_due):
            self._snapshot(request, result)
        return result

    def _snapshot(self, request: Request, result: bytes) -> None:
        """Write the state after a request, then note it with the result, then remove older states.

        A server that is killed in between finds the older state, and the requests since then.
        """
        file = self.snapshot_file(request.owner, request.number)
        self._write(file, request.owner)
        self._database.set_snapshot(request, result)
        self._remove_snapshots(request.owner, except_file=file)

    def fingerprint(self, path: str) -> str:
        """Return the fingerprint of a checkpoint: another one may get the same path.

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
        if path is None:
            return self._base.params
        return self._base.twin(self._trained(path)).params

    @property
    def vocab_size(self) -> int:
        """The number of ids of the model."""
        return self._model.vocab_size

    def score(
        self, checkpoint: Checkpoint | None, contexts: list[ScoringRequest]
    ) -> list[ContextScores]:
        """Score contexts under a checkpoint or the base model, all in one batch."""
        trained = self._params_to_score(checkpoint)
        sequences = []
        for context in contexts:
            sequences.append(_sequence(context.ids, np.arange(len(context.ids) - 1)))

        # One more sequence for each column of targets, and where its log-probs go.
        target_sequences = []
        destinations: list[tuple[np.ndarray, np.ndarray]] = []
        target_logprobs: list[np.ndarray | None] = []
        for context in contexts:
            if context.targets is None:
                target_logprobs.append(None)
                continue
            logprobs = np.zeros(context.targets.shape)
            target_logprobs.append(logprobs)
            for ids, column in zip(context.targets.T, logprobs.T, strict=True):
                indices = np.flatnonzero(ids >= 0)
                if len(indices):
                    targets = ids[indices].astype(np.int32)
                    target_sequences.append(_sequence(context.ids, indices, targets))
                    destinations.append((column, indices))  # a view of ``logprobs``

        scored = self._base.forward([*sequences, *target_sequences], trained=trained)
        for (column, indices), values in zip(destinations, scored[len(sequences) :], strict=True):
            column[indices] = values

        with_top = [number for number, context in enumerate(contexts) if context.top]
        tops: dict[int, Any] = {}
        if with_top:
            top_sequences = [sequences[number] for number in with_top]
            count = max(context.top for context in contexts)
            top_logprobs = self._base.top_logprobs(top_sequences, count, trained=trained)
            tops = dict(zip(with_top, top_logprobs, strict=True))

        results = []
        for number in range(len(contexts)):
            results.append(
                ContextScores(
                    logprobs=scored[number],
                    top=tops.get(number),
                    targets=target_logprobs[number],
                )
            )
        return results

    def _params_to_score(self, checkpoint: Checkpoint | None) -> Params | None:
        """Return the trained parameters of a checkpoint; None for the base model.

        The parameters of the last checkpoint stay in memory.
        """
        if checkpoint != self._scored_checkpoint:
            self._scored_checkpoint = None
            self._scored_params = None
        if checkpoint is not None and self._scored_checkpoint is None:
            path, _ = checkpoint  # it may have been replaced since it was requested
            fingerprint = self.fingerprint(path)
            self._scored_params = self._trained(path)
            self._scored_checkpoint = (path, fingerprint)
        return self._scored_params

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
        files = sorted(self.folder.glob("checkpoints/*/*/*"))
        return [file for file in files if file not in known]

    # --- requests ---------------------------------------------------------------------------------

    def _forward_backward(self, model: str, request: Request) -> bytes:
        message = parse_batch(request.body or b"")
        sequences, columns, constants = read_batch(message, pack_length=self._settings.pack_length)
        learner = self._learners[model]
        if message.forward_only:
            result = ForwardBackward(loss=0.0, logprobs=learner.forward(sequences))
        else:
            result = learner.forward_backward(sequences, loss=message.loss_fn, **constants)
        return write_batch_result(result, columns)

    def _optim_step(self, model: str, request: Request) -> bytes:
        body = OptimStepRequest.from_json(request.body)
        if body.adam_params is None:
            raise BadRequest("only AdamW is computed: send adam_params")
        adam_params = AdamParams(**body.adam_params.model_dump())
        applied = self._learners[model].optim_step(adam_params)
        self._updates[model] += 1
        metrics = {"grad_norm:mean": applied.norm, "finite:mean": float(applied.finite)}
        return _reply("optim_step", metrics=metrics)

    def _save(self, model: str, request: Request) -> bytes:
        self.remove_expired()  # room for the new one; a name that has expired is free again
        body = SaveRequest.from_json(request.body)
        for_sampler = request.kind == "save_weights_for_sampler"
        folder = "sampler_weights" if for_sampler else "weights"
        name = body.path or f"{request.number:06}"
        path = f"{PREFIX}{model}/{folder}/{name}"
        file = self._file(path)
        if file.exists() and not (for_sampler or body.overwrite):
            raise BadRequest(f"{path} exists; choose another name, or send overwrite")
        self._write(file, model, optimizer=not for_sampler)

        model_settings = self._database.model(model) or {}
        kind = "sampler" if for_sampler else "training"
        ttl = body.ttl_seconds
        recorded = {
            "base_model": model_settings.get("base_model"),
            "user_metadata": body.user_metadata or model_settings.get("user_metadata"),
        }
        if ttl is None and for_sampler and body.path is None:
            # Nobody can ask for it by name: it stays as long as it is used.
            ttl = self._settings.sampler_ttl_seconds
            recorded["idle_seconds"] = ttl
        recorded["expires"] = None if ttl is None else time.time() + ttl
        self._database.add_checkpoint(path, model, kind, file.stat().st_size, recorded)

        if not for_sampler or body.sampling_session_seq_id is None:
            return _reply(request.kind, path=path)
        session = f"{model}:sampler:{body.sampling_session_seq_id}"
        self._database.add_sampler(session, path)
        named_path = None if body.path is None else path
        return _reply(request.kind, path=named_path, sampling_session_id=session)

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

        initial = None
        lora = self._settings.lora
        if lora is not None:
            initial = new_adapters(lora.model_copy(update={"seed": settings["seed"]}), self._model)
        self._learners[model] = self._base.twin(initial)
        self._updates[model] = 0
        try:
            if settings["snapshot"]:
                file = self.snapshot_file(model, settings["snapshot"])
                if not file.is_file():
                    file = self._unnumbered_snapshot(model)
                self._read(file, model, optimizer=True)

            for earlier in self._database.since(model, settings["snapshot"]):
                if earlier.number < request.number and earlier.kind in _REPEATED:
                    self._run_request[earlier.kind](model, earlier)
        except BaseException:
            # The next request must not go on from a part of the state.
            self._learners.pop(model, None)
            self._updates.pop(model, None)
            raise

    def snapshot_file(self, model: str, number: int) -> Path:
        """Return the file of a model's state after the request of a number."""
        return self._below("models", model, str(number))

    def _unnumbered_snapshot(self, model: str) -> Path:
        """Return where an earlier version of the server wrote all snapshots of a model."""
        return self._below("models", model)

    def _remove_snapshots(self, model: str, *, except_file: Path | None = None) -> None:
        """Remove the snapshots of a model, all or except one."""
        folder = self.snapshot_file(model, 0).parent
        for file in (*folder.glob("*"), self._unnumbered_snapshot(model)):
            if file != except_file:
                file.unlink(missing_ok=True)
        if except_file is None and folder.is_dir():
            folder.rmdir()

    def _file(self, path: str) -> Path:
        """Return the file of a checkpoint's path; raise BadRequest if it is no such path."""
        parts = path.removeprefix(PREFIX).split("/")
        is_named = (
            path.startswith(PREFIX)
            and len(parts) == 3
            and parts[1] in ("weights", "sampler_weights")
        )
        if not is_named:
            raise BadRequest(f"{path!r} is not a path of a checkpoint: {PREFIX}MODEL/weights/NAME")
        return self._below("checkpoints", *parts)

    def _below(self, *names: str) -> Path:
        """Return a file of the server's folder, whose last name gets a suffix.

        Raises:
            BadRequest: a name would lead out of the folder.
        """
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise BadRequest(f"{name!r} is not a name of a model or a checkpoint")
        *folders, name = names
        return self.folder.joinpath(*folders, f"{name}.npz")

    def _write(self, file: Path, model: str, *, optimizer: bool = True) -> None:
        """Write a model's parameters, with the state of the optimizer or without."""
        learner = self._learners[model]
        tree = learner.state.policy if optimizer else {"params": learner.trained}
        arrays = {}
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[jax.tree_util.keystr(key_path)] = np.asarray(leaf)

        make_folder(file.parent)
        with replacing(file) as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]  # no array is called allow_pickle

    def _read(self, file: Path, model: str, *, optimizer: bool) -> None:
        """Read a model's parameters; without the optimizer's state, that begins anew."""
        learner = self._learners[model]
        state = learner.state
        if not optimizer:
            params = _read_arrays(file, state.policy.params, ".params")
            self._learners[model] = self._base.twin(params)
            return
        policy = _read_arrays(file, state.policy, "")
        learner.state = type(state)(policy, None, state.kl_coef, state.steps, state.nonfinite)

    def _trained(self, path: str) -> Params:
        """Return the trained parameters of a checkpoint."""
        return _read_arrays(self._file(path), self._base.trained, ".params")


def _read_arrays(file: Path, like: Any, prefix: str) -> Any:
    """Return the arrays of a file in the structure of a tree of arrays, with its shardings.

    Args:
        prefix: of the arrays' names in a file that also holds the optimizer's state.
    """
    if not file.is_file():
        raise BadRequest(f"there is no checkpoint {file.stem} of that model")

    with np.load(file, allow_pickle=False) as stored:
        sources = []
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(like):
            name = jax.tree_util.keystr(key_path)
            if f"{prefix}{name}" in stored:
                sources.append((f"{prefix}{name}", leaf.sharding))
            elif f"['params']{name}" in stored:  # a file of parameters alone
                sources.append((f"['params']{name}", leaf.sharding))
            else:
                raise BadRequest(
                    f"{file.stem} does not hold {name}; a sampler's weights have no optimizer state"
                )
        # Only after all names are known: a file that lacks one puts nothing on the device.
        leaves = [jax.device_put(stored[source], sharding) for source, sharding in sources]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _sequence(
    ids: list[int], indices: np.ndarray, targets: np.ndarray | None = None
) -> TrainingSequence:
    """Return a sequence that scores the ids after ``indices``, or ``targets`` instead of them."""
    loss_mask = np.zeros(indices[-1] + 2, bool)
    loss_mask[indices + 1] = True
    token_ids = np.array(ids[: len(loss_mask)], np.int32)
    return TrainingSequence(token_ids=token_ids, loss_mask=loss_mask, targets=targets)


def _reply(kind: str, **fields: Any) -> bytes:
    """Return a result in JSON; fields that are None are left out."""
    content = {"type": kind}
    for name, value in fields.items():
        if value is not None:
            content[name] = value
    return json.dumps(content).encode()
