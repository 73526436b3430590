"""The sections ``algorithm.kl``, the distance to a reference model, and ``distill``.

The teachers of ``distill`` take the place of the reference model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from jax_agent_rl.config.base import NonNegative, Positive, Section, Unless, WhenKey

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]

_WITH_KL = Unless("algorithm.kl.where", "none")
_SAMPLED_TOKENS = Unless("algorithm.kl.top_k")
_ADAPTIVE = WhenKey("algorithm.kl.controller", "adaptive")


class KLConfig(Section):
    """KL divergence from the reference policy.

    `reference` says which that is, unless `distill` has teachers.
    """

    where: Literal["none", "reward", "advantage", "loss"] = Field(
        default="none",
        description=(
            "none, reward (subtracted from every token's reward), advantage (subtracted from every"
            " token's advantage, so that a token answers for its own divergence alone) or loss (a"
            " term of the loss)."
        ),
    )
    reference: Annotated[Literal["initial", "feedback"], _WITH_KL] = Field(
        default="initial",
        description=(
            "initial: the model the run started from, whose weights are kept beside the policy's."
            " feedback: the policy itself, once it has seen what tools and rewards said about the"
            " trajectory, see `algorithm.feedback` (SDPO)."
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

    @property
    def keeps_reference(self) -> bool:
        """Whether weights beside the policy's are needed, unless there are teachers."""
        return self.where != "none" and self.reference == "initial"

    @property
    def reads_feedback(self) -> bool:
        """Whether the reference is the policy with feedback in its prompt."""
        return self.where != "none" and self.reference == "feedback"


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

    def problems(self) -> Iterator[str]:
        """Yield every inconsistency of the section, with its fix."""
        earlier_sources: set[str] = set()
        for index, teacher in enumerate(self.teachers):
            if earlier_sources.issuperset(teacher.data_sources):
                yield (
                    f"distill.teachers[{index}] ({teacher.path}) teaches no row: the teachers"
                    f" before it have its data_sources {list(teacher.data_sources)}; name others,"
                    " or order the special before the general"
                )
            earlier_sources.update(teacher.data_sources)
