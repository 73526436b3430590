"""Attacks by files that others wrote: models, configurations, records, archives, chat templates."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import pickle
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax_agent_rl.agents.command.workspace import WorkspaceLimits, read_tree
from jax_agent_rl.config.loading import read_tree as read_config
from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.observe.run_dir import read_trajectories
from jax_agent_rl.observe.view import outline
from jax_agent_rl.testing.redteam.attack import Surface, attack


class OwnReaders:
    """The readers of this installation."""

    name = "readers of this installation"


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, Path]]:
    """Yield an empty folder, and the path of a file that hostile code would make."""
    with tempfile.TemporaryDirectory(prefix="redteam-") as folder:
        path = Path(folder)
        (path / "model").mkdir()
        yield path / "model", path / "code-has-run"


async def _refused(read: Callable[[], Any]) -> bool:
    """Return whether a reader refuses what it is given, in words for a user."""
    try:
        await asyncio.to_thread(read)
    except JaxAgentRLError:
        return True
    return False


class _Touch:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._file,))


@attack("files-pickled-weights", Surface.FILES)
async def pickled_weights(target: OwnReaders) -> str:
    """Run code from a model's weights."""
    with _folder() as (folder, canary):
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(canary)))
        is_refused = await _refused(lambda: load_hf(folder))
        if canary.exists():
            return "code of pytorch_model.bin has run"
    return "" if is_refused else "a model without safetensors was read"


@attack("files-remote-code", Surface.FILES)
async def remote_code(target: OwnReaders) -> str:
    """Run Python files of a model's folder."""
    with _folder() as (folder, canary):
        automatic = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        (folder / "config.json").write_text(json.dumps({**LLAMA, "auto_map": automatic}))
        (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n")
        await _refused(lambda: load_hf(folder))
        return "evil.py of the model's folder has run" if canary.exists() else ""


@attack("files-safetensors-header", Surface.FILES)
async def safetensors_header(target: OwnReaders) -> str:
    """Have a file's header read as terabytes."""
    with _folder() as (folder, _):
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
        is_refused = await _refused(lambda: load_hf(folder))
    return "" if is_refused else "weights with a header of 4 EiB were read"


@attack("files-yaml-code", Surface.FILES)
async def yaml_code(target: OwnReaders) -> str:
    """Run code from a configuration."""
    with _folder() as (folder, canary):
        file = folder / "config.yaml"
        file.write_text(f"seed: !!python/object/apply:pathlib.Path.touch [{str(canary)!r}]\n")
        is_refused = await _refused(lambda: read_config(file))
        if canary.exists():
            return "a constructor of the YAML file has run"
    return "" if is_refused else "a YAML file with a Python object was read"


@attack("files-yaml-growth", Surface.FILES)
async def yaml_growth(target: OwnReaders) -> str:
    """Have a small configuration grow without end."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        references = ", ".join([f"*a{level - 1}"] * 8)
        lines.append(f"a{level}: &a{level} [{references}]")
    with _folder() as (folder, _):
        file = folder / "config.yaml"
        file.write_text("\n".join(lines) + "\n")
        is_refused = await _refused(lambda: read_config(file))
    return "" if is_refused else "a YAML file of 100 million values in 500 characters was read"


@attack("files-deep-record", Surface.FILES)
async def deep_record(target: OwnReaders) -> str:
    """End a reader by JSON that is nested too deep."""
    with _folder() as (folder, _):
        file = folder / "trajectories.jsonl"
        file.write_text('{"step": ' + "[" * 100_000 + "\n")
        try:
            records = await asyncio.to_thread(lambda: list(read_trajectories(file)))
        except RecursionError:
            return "a RecursionError"
    return "a record" if records else ""


@attack("files-archive-outside", Surface.FILES)
async def archive_outside(target: OwnReaders) -> str:
    """Write outside the folder of an archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("../outside", "/outside", "inside/../../outside"):
            archive.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("link")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        archive.addfile(link)
    limits = WorkspaceLimits(max_bytes=1 << 20, max_entries=100)
    try:
        entries = read_tree(packed.getvalue(), limits, "/app")
    except (JaxAgentRLError, ValueError):
        return ""
    outside = [entry.name for entry in entries if ".." in entry.name or entry.name.startswith("/")]
    return f"entries outside: {outside}" if outside else ""


@attack("files-terminal-codes", Surface.FILES)
async def terminal_codes(target: OwnReaders) -> str:
    """Steer a terminal by recorded text."""
    hostile = "\x1b]0;title\x07\x1b[2Jcleared\u202ereversed"
    record = {
        "step": 1,
        "trajectory_id": f"t{hostile}",
        "reward": 0.0,
        "finish_reason": "answer",
        "row": {"reward_model": {"ground_truth": hostile}},
        "messages": [{"role": "user", "content": hostile}],
        "segments": [],
        "turns": [],
    }
    text = outline(record, title="worst")
    found = [code for code in ("\x1b", "\x07", "\u202e") if code in text]
    return f"printed: {found}" if found else ""
