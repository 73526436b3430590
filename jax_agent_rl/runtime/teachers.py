"""The teachers of a run (``distill``): checked before loading, then put on the learner's mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from tokenizers import Tokenizer

from jax_agent_rl.config import Config
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.learner.teachers import Teacher
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import check_files, load_config, load_hf
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.utils.hub import model_folder


def check_teachers(config: Config) -> list[str]:
    """Check that the teachers read the policy's token ids, and that their files are complete.

    Returns:
        A line about each teacher.

    Raises:
        ConfigError: a teacher has another tokenizer, or reads no images although the policy does.
        ModelError: files of a teacher are missing or damaged.
    """
    if config.distill is None:
        return []

    policy_ids = _vocabulary(config.model.path)
    has_vision = load_config(config.model.path).vision is not None
    lines = []
    for teacher in config.distill.teachers:
        model = check_files(teacher.path) if teacher.url is None else None
        # Equal token by token: scores of other ids would train nonsense.
        teacher_ids = _vocabulary(teacher.path)
        differing = [token for token, id_ in policy_ids.items() if teacher_ids.get(token) != id_]
        if differing:
            token = min(differing, key=policy_ids.__getitem__)
            raise ConfigError(
                f"distill.teachers: {teacher.path} has another tokenizer than {config.model.path},"
                f" whose ids it is to score: {len(differing)} of {len(policy_ids)} tokens differ,"
                f" e.g. {token!r} is {policy_ids[token]} here and"
                f" {teacher_ids.get(token, 'none')} there; choose a teacher of the policy's model"
                " family"
            )

        if has_vision and model is not None and model.vision is None:
            raise ConfigError(
                f"distill.teachers: {teacher.path} reads no images, and {config.model.path} does;"
                " choose a teacher with vision"
            )

        what = f"served at {teacher.url}" if model is None else model.family
        lines.append(f"distill.teachers: {teacher.path}: {what}, reads the policy's ids")

    return lines


def require_teachers(config: Config, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every row has a teacher.

    Raises:
        ConfigError: names the data sources of rows without one.
    """
    if config.distill is None:
        return
    data_sources = [teacher.data_sources for teacher in config.distill.teachers]
    missing = set()
    for row in rows:
        if first_teacher(data_sources, row) is None:
            missing.add(str(row.get("data_source")))
    if missing:
        patterns = list(itertools.chain.from_iterable(data_sources))
        raise ConfigError(
            f"no teacher of distill.teachers has the rows of data_source {sorted(missing)}: their"
            f" data_sources are {patterns}; name them, or * for all"
        )


def make_teachers(config: Config, model: DecoderConfig) -> list[Teacher] | None:
    """Load the teachers without a URL in the learner's compute dtype; None without ``distill``.

    Each device's shard is read separately.

    Args:
        model: the policy's.

    Raises:
        ConfigError: the mesh does not divide a teacher.
        ModelError: files are missing or damaged.
    """
    if config.distill is None:
        return None

    mesh = make_mesh(config.learner.mesh)
    dtype = jnp.dtype(config.learner.compute_dtype)
    teachers = []
    for teacher in config.distill.teachers:
        if teacher.url is not None:
            continue

        teacher_model = load_config(teacher.path, weights=True)
        shardings = parameter_shardings(mesh, teacher_model.parameter_shapes())
        _, params = load_hf(teacher.path, dtype=dtype, shardings=shardings)
        vision_processor = None
        if model.vision:
            vision_processor = VisionProcessor.of(
                teacher_model, teacher.path, pixels=config.model.pixels
            )
        teachers.append(
            Teacher(
                teacher_model,
                params,
                algorithm=config.algorithm,
                config=config.learner,
                temperature=config.rollout.temperature,
                vocab_size=model.vocab_size,
                data_sources=teacher.data_sources,
                vision_processor=vision_processor,
            )
        )
    return teachers


def _vocabulary(path: str) -> dict[str, int]:
    """Return the ids of all tokens, control tokens included."""
    file = model_folder(path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"the tokenizer {file} cannot be read: {error}") from error
