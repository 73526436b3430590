"""The teachers of a run (``distill``): checked before anything is loaded, then put on the learner's mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from tokenizers import Tokenizer

from jax_agent_rl.config import Config
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.learner.scoring import Teacher
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import check_files, load_config, load_hf
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.utils.hub import model_folder


def check_teachers(config: Config) -> list[str]:
    """Check that the teachers read the policy's ids, and that their files are complete; return a line about each.

    Raises:
        ConfigError: a teacher has another tokenizer, or reads no images although the policy does.
        ModelError: files of a teacher are missing or damaged.
    """
    if config.distill is None:
        return []
    lines, ids = [], _vocabulary(config.model.path)
    has_vision = load_config(config.model.path).vision is not None
    for teacher in config.distill.teachers:
        model = check_files(teacher.path) if teacher.url is None else None
        theirs = _vocabulary(teacher.path)
        if differing := [token for token, number in ids.items() if theirs.get(token) != number]:
            token = min(differing, key=ids.__getitem__)
            raise ConfigError(
                f"distill.teachers: {teacher.path} has another tokenizer than {config.model.path}, whose ids it is to "
                f"score: {len(differing)} of {len(ids)} tokens differ, e.g. {token!r} is {ids[token]} here and "
                f"{theirs.get(token, 'none')} there; choose a teacher of the policy's model family"
            )
        if has_vision and model is not None and model.vision is None:
            raise ConfigError(
                f"distill.teachers: {teacher.path} reads no images, and {config.model.path} does; choose a teacher "
                "with vision"
            )
        where = f"served at {teacher.url}" if model is None else model.family
        lines.append(f"distill.teachers: {teacher.path}: {where}, reads the policy's ids")
    return lines


def require_teachers(config: Config, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every row has a teacher.

    Raises:
        ConfigError: names the data sources of rows without one.
    """
    if config.distill is None:
        return
    data_sources = [teacher.data_sources for teacher in config.distill.teachers]
    if missing := sorted({str(row.get("data_source")) for row in rows if first_teacher(data_sources, row) is None}):
        patterns = [pattern for own in data_sources for pattern in own]
        raise ConfigError(
            f"no teacher of distill.teachers has the rows of data_source {missing}: their data_sources are {patterns}; "
            "name them, or * for all"
        )


def make_teachers(config: Config, model: DecoderConfig) -> list[Teacher] | None:
    """Load the teachers without a URL in the learner's compute dtype, each device's shard separately.

    None without ``distill``.

    Args:
        config: the resolved configuration.
        model: the policy's hyperparameters.

    Raises:
        ConfigError: the mesh does not divide a teacher.
        ModelError: files are missing or damaged.
    """
    if config.distill is None:
        return None
    made, mesh = [], make_mesh(config.learner.mesh)
    for teacher in config.distill.teachers:
        if teacher.url is not None:
            continue
        own = load_config(teacher.path)
        places = parameter_shardings(mesh, own.parameter_shapes())
        params = load_hf(teacher.path, dtype=jnp.dtype(config.learner.compute_dtype), shardings=places)[1]
        images = model.vision and VisionProcessor.of(own, teacher.path, pixels=config.model.pixels)
        made.append(
            Teacher(
                own,
                params,
                algorithm=config.algorithm,
                config=config.learner,
                temperature=config.rollout.temperature,
                vocab_size=model.vocab_size,
                data_sources=teacher.data_sources,
                vision_processor=images,
            )
        )
    return made


def _vocabulary(path: str) -> dict[str, int]:
    """Return the ids of all tokens, control tokens included."""
    file = model_folder(path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"the tokenizer {file} cannot be read: {error}") from error
