"""What can be told before anything is loaded: a file, folder or port that a command cannot have.

Every command that loads a model, trains or listens asks here first, right after it has read its
configuration::

    configuration ──► preflight ──► imports of JAX, the model, compilation, the run folder

Each check takes milliseconds, imports nothing that computes, and leaves nothing behind. All
problems are told at once. What takes longer (every row, the tokenizer, rewards) is for
``jax-agent-rl doctor`` and for the run itself, whose own errors have the same words: the checks
here are the first lines of what the run does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jax_agent_rl.config import Config, DataSource
from jax_agent_rl.errors import ConfigError, JaxAgentRLError, StorageError
from jax_agent_rl.utils.files import expand_path
from jax_agent_rl.utils.hub import hub_name, require_model_file
from jax_agent_rl.utils.network import listen_on, require_token, token_from

if TYPE_CHECKING:
    from jax_agent_rl.config.commands import SftConfig, TinkerServerSettings, ToolServerSettings
    from jax_agent_rl.runtime.policy_choice import PolicyChoice


COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"


class Preflight:
    """Collects what is wrong; :meth:`finish` tells it.

    The checks may be called in any order, each for what a command needs.
    """

    def __init__(self) -> None:
        self._errors: list[JaxAgentRLError] = []

    def finish(self) -> None:
        """Raise the one error there was, or a ConfigError with all of them."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            problems = []
            for error in self._errors:
                problems += _lines(error)
            raise ConfigError(problems)

    def rows(self, sources: Iterable[DataSource] | None) -> None:
        """Check that the files of rows are there.

        Files of the Hub are left to the run, which downloads them.
        """
        from jax_agent_rl.data.dataset import find_files, is_downloaded

        for source in sources or ():
            with self._collecting():
                if not is_downloaded(source):
                    find_files(source)

    def model(self, path: str, *, tokenizer: bool = True) -> None:
        """Check that a folder holds a model, or a run with a checkpoint.

        A model of the Hub is left to the run.

        Args:
            path: as in ``model.path``.
            tokenizer: whether the model's tokenizer is needed.
        """
        from jax_agent_rl.runtime.policy_choice import saved_step

        with self._collecting():
            if hub_name(path) is not None:
                return
            folder = expand_path(path)
            if (folder / "checkpoints").is_dir():
                saved_step(folder, None)
                return
            require_model_file(folder, "config.json")
            if tokenizer:
                require_model_file(folder, "tokenizer.json")

    def checkpoint(self, run: Path, step: int | None) -> None:
        """Check that a run has a checkpoint of a step; None: any."""
        from jax_agent_rl.runtime.policy_choice import saved_step

        with self._collecting():
            saved_step(run, step)

    def folder(self, path: str | Path, *, key: str) -> None:
        """Check that a folder can be made, or written to; nothing stays of the attempt.

        Args:
            path: the folder; in a bucket it is not checked.
            key: option or configuration key that names it.
        """
        if "://" in str(path):
            return
        with self._collecting():
            require_writable(Path(path).expanduser(), key=key)

    def listener(self, host: str, port: int, token_env: str | None, *, key: str) -> None:
        """Check that a server can listen, and has a token where other machines can reach it.

        Args:
            port: 0 takes a free one.
            token_env: environment variable with the token, if any.
            key: option or configuration key that names the variable.
        """
        with self._collecting():
            require_token(host, token_from(token_env, key=key), key=key)
        with self._collecting():
            listen_on(host, port).close()

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except JaxAgentRLError as error:
            self._errors.append(error)


def _lines(error: JaxAgentRLError) -> list[str]:
    return error.problems if isinstance(error, ConfigError) else [str(error)]


def require_writable(folder: Path, *, key: str) -> None:
    """Check that a folder, which need not exist, can be made and written to.

    Permissions do not tell: a file system may be read-only, and the user may be root. Therefore a
    folder is made in the nearest existing one, and removed again.

    Raises:
        StorageError: it cannot.
    """
    nearest = folder
    try:
        if "\0" in str(folder):  # Path.exists would say that it is not there
            raise ValueError("a name cannot hold the character NUL")
        while not nearest.exists():
            nearest = nearest.parent
        os.rmdir(tempfile.mkdtemp(prefix=".jax-agent-rl-", dir=nearest))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"{key}={folder}: the folder cannot be made or written to ({nearest}: {reason}); name"
            " another one"
        ) from error


# --- commands -------------------------------------------------------------------------------------


def check_training(config: Config) -> None:
    """Check what ``train`` needs; ``distill`` and ``quickstart`` are runs of it."""
    checks = Preflight()
    checks.rows((*config.data.train, *(config.data.eval or ())))
    checks.model(config.model.path)
    if config.distill is not None:
        for teacher in config.distill.teachers:
            checks.model(teacher.path)
    checks.folder(config.run_dir, key="run_dir")
    if config.trainer.checkpoint_dir is not None:
        checks.folder(config.trainer.checkpoint_dir, key="trainer.checkpoint_dir")
    checks.finish()


def joins_processes(config: Config) -> bool:
    """Return whether other processes train the same run.

    Then only the first process reads rows and writes records.
    """
    return bool(config.learner.multihost.coordinator or os.environ.get(COORDINATOR_ADDRESS))


def check_supervised(config: SftConfig) -> None:
    """Check what ``sft`` and ``dpo`` need."""
    checks = Preflight()
    checks.rows((*config.data.train, *(config.data.eval or ())))
    checks.model(config.model.path)
    checks.folder(config.run_dir, key="run_dir")
    checks.finish()


def check_policy(
    choice: PolicyChoice,
    config: Config,
    *,
    sources: Iterable[DataSource] = (),
    out: Path | None = None,
    listens: tuple[str, int, str | None, str] | None = None,
) -> None:
    """Check what a command needs that samples from a policy: ``eval``, ``rollout`` and the servers.

    Args:
        config: configuration of the policy.
        sources: rows that are read.
        out: folder that is written.
        listens: host, port, variable of the token and the key that names it.
    """
    checks = Preflight()
    if choice.run is not None:
        checks.checkpoint(choice.run, choice.step)
    else:
        checks.model(config.model.path)
    checks.rows(sources)
    if out is not None:
        checks.folder(out, key="--out")
    if listens is not None:
        host, port, token_env, key = listens
        checks.listener(host, port, token_env, key=key)
    checks.finish()


def check_rescoring(out: Path) -> None:
    """Check what ``rescore`` needs that writes a table."""
    checks = Preflight()
    checks.folder(out.parent, key="--out")
    checks.finish()


def check_certification(config: Config | None, *, out: Path) -> None:
    """Check what ``certify`` needs.

    Args:
        config: None stands for the quickstart's model and task, which are fetched and written.
    """
    checks = Preflight()
    if config is not None:
        checks.rows((*config.data.train, *(config.data.eval or ())))
        checks.model(config.model.path)
    checks.folder(out, key="--out")
    checks.finish()


def check_quickstart(config: Config) -> None:
    """Check what ``quickstart`` needs.

    It fetches the model, and writes rows to the folder that it runs in.
    """
    checks = Preflight()
    checks.folder(Path("data"), key="the folder for rows")
    checks.folder(config.run_dir, key="run_dir")
    checks.finish()


def check_model(path: str) -> None:
    """Check that a model is there, with or without a tokenizer."""
    checks = Preflight()
    checks.model(path, tokenizer=False)
    checks.finish()


def check_conformance(
    backend: str,
    *,
    model: Path | None,
    url: str | None,
    engine: str,
    engine_factory: str | None,
    adapters: bool,
    data_parallel: int,
) -> None:
    """Check what ``conformance`` needs, with the options of that command.

    Raises:
        ConfigError: options do not go together, or there is no model.
    """
    if url is not None and (backend not in ("remote", "sglang") or model is None):
        raise ConfigError(
            f"--url {url} goes with --backend remote or sglang and --model: the folder of the model"
            f" that server serves, to compare with; got --backend {backend}, --model {model}"
        )
    # --engine says what serves behind these two, and nothing of any other backend.
    serving = backend
    given = f"--backend {backend}"
    if backend in ("remote", "ray") and url is None:
        serving = engine
        given += f" --engine {engine}"
    of_jetstream = []
    if engine_factory is not None:
        of_jetstream.append(f"--engine-factory {engine_factory}")
    if data_parallel > 1:
        of_jetstream.append(f"--data-parallel {data_parallel}")
    if of_jetstream and serving != "jetstream":
        raise ConfigError(f"{of_jetstream[0]} needs backend jetstream to serve; got {given}")
    if engine_factory is not None and adapters:
        raise ConfigError(
            f"--engine-factory {engine_factory} does not go with --adapters: such an engine serves"
            " none"
        )
    if engine in ("remote", "ray"):
        raise ConfigError(
            f"--engine {engine}: it needs an engine of its own behind it; use jetstream or vllm"
        )
    if model is not None:
        check_model(str(model))


def check_checkpoint(run: Path, step: int | None, *, out: Path | None = None) -> None:
    """Check what a command needs that reads a run's checkpoint, and writes a folder."""
    checks = Preflight()
    checks.checkpoint(run, step)
    if out is not None:
        checks.folder(out, key="the folder to write")
    checks.finish()


def check_tool_server(settings: ToolServerSettings) -> None:
    """Check what ``tool-server`` needs."""
    checks = Preflight()
    checks.listener(settings.host, settings.port, settings.token_env, key="token_env")
    checks.finish()


def check_tinker_server(settings: TinkerServerSettings) -> None:
    """Check what ``tinker-server`` needs."""
    checks = Preflight()
    checks.model(settings.model.path)
    checks.folder(settings.state_dir, key="state_dir")
    checks.listener(settings.host, settings.port, settings.token_env, key="token_env")
    checks.finish()
