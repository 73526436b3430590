"""Checkpoints with Orbax: the train state on device, and JSON of everything else a resume needs.

::

    folder/<step>/state   arrays, each device's part written by its own process, in the background
                  notes   JSON: progress of the trainer; shape, dtype and checksum of every array;
                          a checksum of its own

A checkpoint is written under another name and renamed when it is complete, so a killed process
leaves none that is half written. (A bucket cannot rename: there, a file ``commit_success.txt`` says
that a checkpoint is complete.) Storage may still damage one later. The checksums tell, whatever
mesh it is restored onto. Arrays are not compressed: trained weights would shrink by a tenth only,
and compressing would take five times as long as writing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint_steps import brief, complete_steps, located
from jax_agent_rl.utils.fingerprints import fingerprint
from jax_agent_rl.utils.startup import ignore_abandoned_transfers
from jax_agent_rl.utils.text import counted

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Checkpointer:
    """Writes ``folder/<step>/`` atomically and keeps the newest ones.

    Args:
        folder: made if missing; ``gs://…`` is one in a bucket.
        keep: number of checkpoints that stay.
        read_only: change nothing in the folder: a run that is still training may be writing a
            checkpoint there. Such an object never saves.
    """

    def __init__(self, folder: Path | str, *, keep: int, read_only: bool = False) -> None:
        ignore_abandoned_transfers()
        self._folder = located(folder)
        self._keep = keep
        self._read_only = read_only
        self._shared = SharedWrites() if jax.process_count() > 1 else None
        self._manager = self._open()
        self._state_bytes = 0  # of the state that was saved last

    def _open(self) -> ocp.CheckpointManager:
        barrier = None if self._shared is None else self._shared.barrier
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=True,
            create=not self._read_only,
            # What an interrupted process was writing; a reader would delete a living one's.
            cleanup_tmp_directories=not self._read_only,
            async_options=ocp.AsyncOptions(barrier_sync_fn=barrier),
        )
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "notes": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Start saving a state; return once its arrays are copied.

        A state that is saved already is not written again. Another one replaces the checkpoint of
        the same step and all later ones: a run that went back to an earlier step has abandoned
        them.

        Args:
            step: training steps that are finished.
            state: a pytree of arrays.
            progress: JSON.

        Raises:
            CheckpointError: this or an earlier save could not be written. Complete checkpoints are
                intact.
        """
        with self._writing():
            if self._shared is not None:
                self._shared.agree()  # what follows takes all processes
            arrays = _manifest(state)
            if step in self.steps:
                self._manager.wait_until_finished()  # this step may still be written
                if self._holds(step, arrays):
                    return
                self._delete_after(step - 1)

            self._state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            arguments = ocp.args.Composite(
                state=ocp.args.PyTreeSave(state),
                notes=ocp.args.JsonSave(_sealed(progress, arrays)),
            )
            self._manager.save(step, args=arguments, force=True)

    def _holds(self, step: int, arrays: dict[str, dict[str, Any]]) -> bool:
        """Return whether the checkpoint of a step holds these arrays; a damaged one holds none."""
        try:
            is_equal = _notes(self._folder, step).arrays == arrays
        except (OSError, ValueError, KeyError, TypeError):
            is_equal = False
        if self._shared is not None:
            # Also waits until all have read it: else a fast process would delete it too early.
            is_equal = bool(multihost_utils.process_allgather(np.asarray(is_equal)).all())
        return is_equal

    def check(self) -> None:
        """Raise CheckpointError if a save has failed in the background, on any process.

        It never waits.
        """
        with self._writing():
            if self._shared is not None:
                self._shared.check()
            if not self._manager.is_saving_in_progress():
                # It returns at once; only this call raises what Orbax's threads have met.
                self._manager.wait_until_finished()

    def wait(self) -> None:
        """Wait until every started save is on disk.

        Raises:
            CheckpointError: a save failed. Complete checkpoints are intact.
        """
        self._finish_writing()

    def _finish_writing(self) -> None:
        with self._writing():
            if self._shared is not None:
                self._shared.check()
            self._manager.wait_until_finished()

    def written(self) -> str:
        """Return the progress of the save in the background, e.g. ``0.9 of 1.6 GB written``.

        It is empty if no save is running.
        """
        if not self._manager.is_saving_in_progress():
            return ""
        total = f"{self._state_bytes / 1e9:.1f}"
        if not isinstance(self._folder, Path):  # looking into a bucket takes a request per file
            return f"{total} GB on their way"

        unfinished = [
            path for path in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*") if path.is_dir()
        ]
        if not unfinished:
            return ""
        written = sum(_size(file) for folder in unfinished for file in folder.rglob("*"))
        return f"{min(written, self._state_bytes) / 1e9:.1f} of {total} GB written"

    def restore(self, like: Any, *, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """Return a checkpoint: its step, the state placed as ``like`` is, and the progress.

        Args:
            like: a state of the same structure. Shapes, dtypes and shardings are taken from it; the
                checkpoint may have been saved from another mesh.
            step: None is the newest. Newer checkpoints stay until :meth:`delete_newer`.

        Raises:
            CheckpointError: it does not exist, belongs to another model, or is damaged.
        """
        step = self._existing(step)

        def load() -> Any:
            return self._manager.restore(step, args=ocp.args.Composite(state=_reading(like)))[
                "state"
            ]

        restored, progress = self._load(step, like, load, is_complete=True)
        return step, restored, progress

    def delete_newer(self, step: int) -> None:
        """Delete the checkpoints after a step.

        A run that went back to the step calls it before it records its own next step.
        """
        self._delete_after(step)

    def _delete_after(self, step: int) -> None:
        for newer in self.steps:
            if newer > step:
                self._manager.delete(newer)

    def restore_part(self, like: Any, *, step: int | None = None) -> Any:
        """Return a part of a checkpoint's state, placed as ``like`` is.

        Args:
            like: the part, e.g. ``{"policy": {"params": params}}``; see :meth:`restore`.
            step: None is the newest.

        Raises:
            CheckpointError: as :meth:`restore`.
        """
        step = self._existing(step)

        def load() -> Any:
            folder = self._folder / str(step) / "state"
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(folder, args=_reading(like, partial_restore=True))

        restored, _ = self._load(step, like, load, is_complete=False)
        return restored

    def _existing(self, step: int | None) -> int:
        return _existing(self._folder, self.steps, step)

    def _load(
        self,
        step: int,
        like: Any,
        load: Callable[[], Any],
        *,
        is_complete: bool,
    ) -> tuple[Any, dict[str, Any]]:
        """Load arrays and progress; check that they fit and that their checksums are right.

        Args:
            step: of an existing checkpoint.
            load: returns the arrays.
            is_complete: ``like`` is the complete state, not a part of it.
        """
        try:
            notes = _notes(self._folder, step)
            self._require_fit(step, notes.arrays, like, is_complete)
            restored = load()

            damaged = []
            for name, entry in _manifest(restored).items():
                if notes.arrays[name] != entry:
                    damaged.append(name)
            if damaged:
                raise ValueError(
                    f"wrong checksums of {counted(len(damaged), 'array')}, e.g. of {damaged[0]}"
                )
        except CheckpointError:
            raise
        except Exception as error:  # Orbax also raises bare Exception
            raise self._damaged(step, error) from error
        return restored, notes.progress

    def close(self) -> None:
        """Wait for running saves and free Orbax's threads."""
        self._finish_writing()
        self._manager.close()

    def _require_fit(
        self,
        step: int,
        manifest: dict[str, dict[str, Any]],
        like: Any,
        is_complete: bool,
    ) -> None:
        """Raise CheckpointError if arrays differ in dtype or shape from ``like``."""
        saved = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in manifest.items()}
        wanted = {
            name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_arrays(like).items()
        }
        names = set(wanted)
        if is_complete:
            names |= set(saved)

        differing = sorted(name for name in names if saved.get(name) != wanted.get(name))
        if differing:
            name = differing[0]
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} does not fit this configuration: {name} is"
                f" {saved.get(name, 'missing')} in it and {wanted.get(name, 'missing')} here"
                f" ({counted(len(differing), 'array')} in all); resume with the model.path, the"
                " sections algorithm, learner and critic, and the agent.role_adapters that the run"
                " was started with"
            )

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return _damaged(self._folder, self.steps, step, error)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Tell which checkpoint is intact if one could not be written."""
        try:
            yield
        except (OSError, ValueError) as error:
            # Orbax may remember a step whose commit failed. Opened again, it only knows what is on
            # disk. With several processes, opening would wait for all of them; but the run ends.
            if self._shared is None:
                self._manager = self._open()
            else:
                self._shared.fail(error)
                self._manager.reload()

            latest_step = self._manager.latest_step()
            if latest_step is None:
                intact = "there is none yet"
            else:
                intact = f"checkpoint {latest_step} is intact; free space, then --resume"
            raise CheckpointError(
                f"a checkpoint could not be written to {self._folder} ({intact}): {brief(error)}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What a checkpoint says about itself.

    Attributes:
        step: training steps that were finished.
        progress: JSON that was saved with the state.
        arrays: shape, dtype and checksum of each array, by its path in the state.
    """

    step: int
    progress: dict[str, Any]
    arrays: dict[str, dict[str, Any]]

    def fingerprint(self, part: str = "") -> str:
        """Return the fingerprint of the arrays whose paths contain ``part``.

        Equal states have equal fingerprints.

        Raises:
            CheckpointError: there are none.
        """
        arrays = {name: entry for name, entry in self.arrays.items() if part in f".{name}."}
        if not arrays:
            raise CheckpointError(f"checkpoint {self.step} holds no arrays {part.strip('.')}")
        return fingerprint(arrays)


def read_notes(folder: Path | str, step: int | None = None) -> Notes:
    """Return what a checkpoint says about itself, without its arrays and without other processes.

    Args:
        step: None is the newest.

    Raises:
        CheckpointError: it does not exist, or its notes are damaged.
    """
    path = located(folder)
    steps = complete_steps(folder)
    step = _existing(path, steps, step)
    try:
        return _notes(path, step)
    except Exception as error:  # the client of a bucket may raise anything
        raise _damaged(path, steps, step, error) from error


def differing_arrays(state: Any, notes: Notes) -> list[str]:
    """Return the names of a state's arrays that are not, to the bit, those of a checkpoint."""
    return [name for name, entry in _manifest(state).items() if notes.arrays.get(name) != entry]


def _notes(folder: Path | epath.Path, step: int) -> Notes:
    notes = json.loads((folder / str(step) / "notes" / "metadata").read_text())
    if notes != _sealed(notes["progress"], notes["arrays"]):
        raise ValueError("the checksum of its notes is wrong")
    return Notes(step=step, progress=notes["progress"], arrays=notes["arrays"])


def _existing(folder: Path | epath.Path, steps: Sequence[int], step: int | None) -> int:
    """Return a step if it has a checkpoint, the newest for None; else raise CheckpointError."""
    if not steps:
        raise CheckpointError(f"no checkpoint in {folder}; start the run without --resume")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; there are {list(steps)}")
    return step


def _damaged(
    folder: Path | epath.Path,
    steps: Sequence[int],
    step: int,
    error: Exception,
) -> CheckpointError:
    earlier_steps = [s for s in steps if s < step]
    if earlier_steps:
        fix = f"go on from the one before with --resume --step {earlier_steps[-1]}"
    else:
        fix = "there is none before it; start the run without --resume"
    return CheckpointError(f"checkpoint {step} in {folder} is damaged ({brief(error)}); {fix}")


def cut_off_steps(folder: Path | str) -> list[int]:
    """Return the steps of incomplete checkpoints, ascending.

    The process was killed while it wrote them.
    """
    steps = set()
    for unfinished in ocp.utils.tmp_checkpoints(located(folder)):
        final_name = unfinished.get_final().name
        if final_name.isdigit():
            steps.add(int(final_name))
    return sorted(steps)


def _reading(like: Any, **options: Any) -> ocp.args.PyTreeRestore:
    """Return the arguments to restore arrays placed as ``like`` is."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(abstract, restore_args=restore_args, **options)


def _size(file: Path) -> int:
    """Return the bytes of a file; 0 if it is renamed at this very moment."""
    try:
        return file.stat().st_size if file.is_file() else 0
    except FileNotFoundError:
        return 0


def named_arrays(state: Any) -> dict[str, Any]:
    """Return the arrays of a pytree by their paths, joined by dots."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        leaves[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return leaves


def _sealed(progress: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of a checkpoint with their checksum."""
    content = json.dumps([progress, arrays], sort_keys=True)
    return {"progress": progress, "arrays": arrays, "crc32": zlib.crc32(content.encode())}


def _manifest(state: Any) -> dict[str, dict[str, Any]]:
    """Return shape, dtype and checksum of each array by its path."""
    leaves = named_arrays(state)
    compute_checksums = _checksums(_everywhere(leaves.values()))
    checksums = jax.device_get(compute_checksums(leaves))
    manifest = {}
    for name, leaf in leaves.items():
        manifest[name] = {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "checksum": int(checksums[name]),
        }
    return manifest


@functools.cache
def _checksums(
    everywhere: NamedSharding | None,
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """Return the program that computes the checksums of all arrays."""

    def checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: _checksum(array) for name, array in arrays.items()}

    return jax.jit(checksums, out_shardings=everywhere)


def _everywhere(leaves: Iterable[jax.Array]) -> NamedSharding | None:
    """Return a sharding that every process can read; None if the arrays lie on no mesh."""
    meshes = [leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None


@jax.jit  # arrays of one shape (parameters and their moments) share a trace
def _checksum(array: jax.Array) -> jax.Array:
    """Return the sum of all elements' bits, each times an odd number, modulo 2**32; uint32.

    The odd number follows from the element's index in the flattened array. An integer sum is the
    same whatever mesh the array is cut over, and any single flipped bit changes it.
    """
    bits = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.uint32(0)
    stride = 1
    for axis in reversed(range(array.ndim)):
        index_of_axis = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        index = index + index_of_axis * jnp.uint32(stride % 2**32)
        stride *= array.shape[axis]
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


FAILED = "jax_agent_rl/checkpoint_failed"
"""The key under which a process reports that its write has failed."""

FOREVER = 10**10  # milliseconds


class SharedWrites:
    """Background writes of several processes to one checkpoint: a failure on one fails all.

    Between writing and renaming, Orbax lets the processes wait for each other. A process with a
    full disk never arrives, and the others would wait until a timeout of many minutes. Instead it
    reports its failure in the key-value store of jax's coordination service, which ends the waiting
    of all. After a failure nothing more is written: the run ends.
    """

    def __init__(self) -> None:
        self._client = ocp.multihost.get_jax_distributed_client()
        self._meet = ocp.multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        self._failed: Future[str] = Future()
        self._saving_thread: int | None = None  # the thread that starts writes
        threading.Thread(target=self._listen, name="checkpoint-failures", daemon=True).start()

    def check(self) -> None:
        """Raise OSError if a write has failed on any process; never wait."""
        if self._failed.done():
            raise OSError(self._failed.result())

    def agree(self) -> None:
        """Run :meth:`check` with the same outcome on all processes.

        Each process calls it before it starts a write.
        """
        self._saving_thread = threading.get_ident()
        have_failed = multihost_utils.process_allgather(np.asarray(self._failed.done()))
        if have_failed.any():
            raise OSError(self._failed.result())

    def fail(self, error: BaseException) -> None:
        """Report a failure to all processes, including this one. The first one counts."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is one already
            self._client.key_value_set(FAILED, f"on process {jax.process_index()}, {error}")

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes; Orbax's background threads call it.

        Raises:
            OSError: a write has failed on one of them.
        """
        # Orbax's threads also come here from a ``finally``, when this process's write has just
        # failed. The thread that starts writes may be handling something else, e.g. a cancellation.
        error = sys.exception()
        if error is not None and threading.get_ident() != self._saving_thread:
            self.fail(error)

        met: Future[Any] = Future()

        def meet() -> None:
            try:
                self._meet(key=key, timeout_ms=timeout_ms)
            except BaseException as error:
                met.set_exception(error)
            else:
                met.set_result(None)

        # Nothing can end the waiting at a barrier, so a thread of its own does it. As a daemon it
        # does not keep the process alive.
        threading.Thread(target=meet, name="checkpoint-barrier", daemon=True).start()
        wait((met, self._failed), return_when=FIRST_COMPLETED)
        if not met.done():
            self.check()
        met.result()

    def _listen(self) -> None:
        with contextlib.suppress(
            jax.errors.JaxRuntimeError
        ):  # the coordination service has ended, with the run
            self._failed.set_result(self._client.blocking_key_value_get(FAILED, FOREVER))
