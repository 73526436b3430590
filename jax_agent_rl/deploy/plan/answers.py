"""What the compiler answers about programs, kept on disk.

Compiling a large model takes minutes, and most changes of a plan leave most programs as they are:
another KV cache leaves the learner's, another micro-batch the engine's. A plan that was interrupted
goes on where it was. JAX's own cache cannot be read without the chips.

The lines of code in a kept answer are those of the earlier plan, so profiles ask the compiler.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from jax.sharding import Mesh

from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.errors import StorageError
from jax_agent_rl.learner.optimized_params import exchange_options
from jax_agent_rl.utils.files import cache_root, make_folder, replacing

_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
"""Variables of the environment that change what a compiler makes of a program."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one chip while a program runs there.

    Attributes:
        aliased: outputs that take the memory of arguments.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class CompilerAnswer:
    """What the compiler says of a program.

    Attributes:
        memory: None if the program does not fit a chip even alone.
        text: the optimized program; of one that does not fit, the compiler's message.
    """

    memory: Memory | None
    text: str


def answer_file(lowered: jax.stages.Lowered, mesh: Mesh, chip: Chip) -> Path:
    """Return the file of a program's answer, whose name tells all that the answer depends on."""
    parts = [lowered.as_text(), repr(chip), str(mesh.devices.shape)]
    for device in mesh.devices.flat:
        parts.append(f"{device!r} of process {device.process_index}")
    # Options are not part of a program's text.
    parts.append(json.dumps(exchange_options(mesh), sort_keys=True))
    for package in _COMPILERS:
        with contextlib.suppress(PackageNotFoundError):  # of the other platform
            parts.append(f"{package} {version(package)}")
    for name in _FLAGS:
        parts.append(os.environ.get(name, ""))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_root() / "plans" / f"{digest[:32]}.json.gz"


def read_answer(file: Path) -> CompilerAnswer | None:
    """Return an answer that was kept; None if there is none, or its file is damaged."""
    try:
        fields = json.loads(gzip.decompress(file.read_bytes()))
        memory = fields["memory"]
        if memory is not None:
            memory = Memory(**memory)
        return CompilerAnswer(memory=memory, text=fields["text"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return None


def keep_answer(file: Path, answer: CompilerAnswer) -> None:
    """Keep an answer for later plans, if there is room for it."""
    data = gzip.compress(json.dumps(asdict(answer)).encode())
    # Without it a later plan only takes longer.
    with contextlib.suppress(StorageError):
        make_folder(file.parent)
        with replacing(file) as stream:
            stream.write(data)
