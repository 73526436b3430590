"""The sections ``algorithm.kl``, the distance to a reference model, and ``distill``.

The teachers of ``distill`` take the place of the reference model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from jax_agent_rl.config.base import NonNegative, Positive, Section, Unless, WhenKey

if TYPE_CHECKING:
    from jax_agent_rl.config.run import Config

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]

_WITH_KL = Unless("algorithm.kl.where", "none")
_SAMPLED_TOKENS = Unless("algorithm.kl.top_k")
_ADAPTIVE = WhenKey("algorithm.kl.controller", "adaptive")


class KLConfig(Section):
    """KL divergence from the reference policy.

    The reference is the model the run started from, or the teachers of `distill`.
    """

    where: Literal["none", "reward", "advantage", "loss"] = Field(
        default="none",
        description=(
            "none, reward (subtracted from every token's reward), advantage (subtracted from every"
            " token's advantage, so that a token answers for its own divergence alone) or loss (a"
            " term of the loss). All but none need the reference's weights."
        ),
    )
    estimator: Annotated[KLEstimator, _WITH_KL & _SAMPLED_TOKENS] = Field(
        default="k3",
        description=(
            "Estimator per token; with + it has the gradient of k2. With `distill`: k1, in the loss"
            " k1+."
        ),
    )
    top_k: Annotated[NonNegative, WhenKey("algorithm.kl.where", "loss")] = Field(
        default=0,
        description=(
            "loss: the KL itself instead of an estimate from the sampled token, over the ids that"
            " the reference holds most likely, this many at each position, and all others as one."
            " 0: an estimate."
        ),
    )
    coef: Annotated[float, _WITH_KL] = Field(
        default=0.001,
        gt=0,
        description="Weight; with the adaptive controller, the initial weight. With `distill`: 1.",
    )
    controller: Annotated[Literal["fixed", "adaptive"], _WITH_KL & _SAMPLED_TOKENS] = Field(
        default="fixed", description="Constant weight, or adaptive: steers the KL towards `target`."
    )
    target: Annotated[float, _ADAPTIVE] = Field(
        default=0.1, gt=0, description="adaptive: target KL per token, in nats."
    )
    horizon: Annotated[Positive, _ADAPTIVE] = Field(
        default=10_000,
        description="adaptive: trajectories over which the coefficient may change by 20%.",
    )


class TeacherConfig(Section):
    """A teacher: a frozen model with the policy's tokenizer."""

    path: str = Field(
        description=(
            "Its weights, put on the learner's devices: a Hugging Face folder, a run folder, or"
            " owner/name[@revision] on the Hub. With a url only its tokenizer is read."
        )
    )
    url: str | None = Field(
        default=None,
        description=(
            "Where it is served instead: `http://HOST:8000/v1` of vLLM or another server whose"
            " completions have vLLM's `prompt_logprobs`, or `http://HOST:8100` of `jax-agent-rl"
            " rollout-server`."
        ),
    )
    model: str | None = Field(
        default=None, description="Its name at an address with /v1; null: its path."
    )
    token_env: str | None = Field(
        default=None, description="Environment variable with the server's token."
    )
    max_in_flight: Positive = Field(
        default=16, description="Maximum number of concurrent requests to its server."
    )
    timeout: float = Field(
        default=300.0, gt=0, description="Timeout of a request to its server, in seconds."
    )
    data_sources: tuple[str, ...] = Field(
        default=("*",),
        min_length=1,
        description=(
            "Data sources of the rows it teaches (* matches). A row has the first teacher that"
            " fits."
        ),
    )


def first_teacher(data_sources: Iterable[Sequence[str]], row: Mapping[str, Any]) -> int | None:
    """Return the index of the first teacher whose ``data_sources`` fit a row; None if none do.

    Args:
        data_sources: patterns of each teacher.
    """
    source = str(row.get("data_source"))
    for index, patterns in enumerate(data_sources):
        for pattern in patterns:
            if fnmatchcase(source, pattern):
                return index
    return None


def _as_list(value: Any) -> Any:
    """Return teachers as a list of mappings; a text is a teacher's path."""
    items = value if isinstance(value, (list, tuple)) else [value]
    teachers = []
    for item in items:
        teachers.append({"path": item} if isinstance(item, str) else item)
    return teachers


_TEACHER_SCHEMAS = [{"type": "string"}, {"type": "object"}]
_TEACHERS_SCHEMA = {
    "anyOf": [*_TEACHER_SCHEMAS, {"type": "array", "items": {"anyOf": _TEACHER_SCHEMAS}}]
}


class DistillConfig(Section):
    """On-policy distillation: the policy is trained towards teachers on what it samples itself.

    `algorithm.kl` says how. Unless it is given, every token's advantage is the teacher's log-prob
    minus the policy's (Thinking Machines), and unless `algorithm.adv_estimator` is given, rewards
    are not learned from.
    """

    teachers: Annotated[
        tuple[TeacherConfig, ...],
        BeforeValidator(_as_list),
        WithJsonSchema(_TEACHERS_SCHEMA),
    ] = Field(
        min_length=1,
        description=(
            "The teachers: a folder, or a list of folders and of mappings `{path, url, model,"
            " token_env, max_in_flight, timeout, data_sources}`. Only path is required; url names a"
            " server that scores in its place, data_sources the rows it teaches (* matches). A row"
            " has the first teacher that fits."
        ),
    )


def with_teachers(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the ``algorithm`` of on-policy distillation to an unvalidated tree with ``distill``.

    Keys of the tree stay as they are.
    """
    if sections.get("distill") is None:
        return sections
    algorithm = sections.get("algorithm") or {}
    if not isinstance(algorithm, Mapping):
        return sections
    kl = algorithm.get("kl") or {}
    if not isinstance(kl, Mapping) or kl.get("where") == "none":
        return sections

    is_exact = bool(kl.get("top_k"))  # computed over the likeliest ids instead of estimated
    kl = {"where": "loss" if is_exact else "advantage", "coef": 1.0, **kl}
    if not is_exact:
        kl = {"estimator": "k1+" if kl["where"] == "loss" else "k1", **kl}
    defaults = {
        "adv_estimator": "none",
        "filter_zero_variance": False,  # groups of equal rewards have the teacher's gradient
    }
    return {**sections, "algorithm": {**defaults, **algorithm, "kl": kl}}


def kl_problems(config: Config) -> Iterator[str]:
    """Yield every inconsistency of the KL with itself and the advantages, each with its fix."""
    kl = config.algorithm.kl
    adv_estimator = config.algorithm.adv_estimator
    if kl.where in ("reward", "advantage") and kl.estimator.endswith("+"):
        yield (
            f"algorithm.kl.estimator={kl.estimator} differs from {kl.estimator[:-1]} in its"
            f" gradient only, and a reward has none, nor has an advantage; use {kl.estimator[:-1]},"
            " or kl.where=loss"
        )
    if kl.where == "loss" and kl.estimator == "k1" and not kl.top_k:
        yield "algorithm.kl.estimator=k1 has a gradient of mean zero in the loss; use k1+, k2 or k3"
    if kl.where == "reward" and adv_estimator == "gdpo":
        yield (
            "algorithm.kl.where=reward would not reach gdpo, which reads the reward's parts; use"
            " kl.where=loss"
        )
    if kl.where in ("none", "reward") and adv_estimator == "none":
        yield (
            f"algorithm.adv_estimator=none learns from algorithm.kl alone, and kl.where={kl.where}"
            " leaves nothing; set kl.where=advantage or loss, or another estimator"
        )


def distill_problems(config: Config) -> Iterator[str]:
    """Yield every inconsistency of the teachers, each with its fix."""
    distill = config.distill
    if distill is None:
        return
    if config.algorithm.kl.where == "none":
        yield (
            "distill.teachers, but algorithm.kl.where=none compares with none; set it to advantage"
            " or loss"
        )

    # A server scores at temperature 1 over the whole vocabulary, whatever the policy samples from.
    temperature = config.rollout.temperature
    urls = [teacher.url for teacher in distill.teachers if teacher.url is not None]
    if urls and (temperature != 1 or config.replays_supports):
        subset = " from some of them" if config.replays_supports else ""
        yield (
            f"distill.teachers: {urls[0]} gives log-probs of temperature 1 over all ids, but the"
            f" policy samples with rollout.temperature={temperature:g}{subset}; set"
            " rollout.temperature=1 without top_p, top_k, min_p and agent.constrain_tool_calls, or"
            " put the teacher on the learner's devices (remove its url)"
        )

    earlier_sources: set[str] = set()
    for index, teacher in enumerate(distill.teachers):
        if earlier_sources.issuperset(teacher.data_sources):
            yield (
                f"distill.teachers[{index}] ({teacher.path}) teaches no row: the teachers before"
                f" it have its data_sources {list(teacher.data_sources)}; name others, or order the"
                " special before the general"
            )
        earlier_sources.update(teacher.data_sources)
