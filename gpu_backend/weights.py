"""Where each Hugging Face tensor lies in vLLM's model, and which updates fit the model.

vLLM stores some matrices fused (q, k and v as one, stacked along rows) and some transposed. Its own
loader does the fusing; the table here says where every part must be found *afterwards*, so that a
silently skipped part is noticed. Experts are one stack per layer, gate above up; kernels that would
shuffle it after loading are not used (``worker.py`` on CPUs, ``moe_backend`` elsewhere).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from jax_agent_rl.errors import ConfigError, ModelError, WeightUpdateError
from jax_agent_rl.models.tensors import HEAD, has_own_head
from jax_agent_rl.utils.weight_transfer import LogprobProbe

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family's layout in vLLM.

    Attributes:
        fused: vLLM's module name to the Hugging Face modules stacked in it, in order of rows.
        transposed: modules whose ``weight`` Hugging Face stores as [in, out] and vLLM as [out, in].
        aliases: how names begin in some folders and in published ones, by which updates call every
            tensor.
        prefixes: how those begin in vLLM; the first that fits is replaced.
        experts: vLLM's module with the stacks of all experts, in place of Hugging Face's
            ``experts``.
        media: kinds of multi-modal input; ``config.json`` names each kind's placeholder in
            ``<kind>_token_id``.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    experts: str | None = None
    media: tuple[str, ...] = ()


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_LLAMA = Family(fused=_FUSED)
_GPT2 = Family(
    transposed=frozenset({"c_attn", "c_proj", "c_fc"}),
    prefixes={"transformer.": "transformer.", "": "transformer."},
)
_QWEN_VL = Family(
    fused=_FUSED,
    # Two generations of names are in use: some versions of transformers since 4.52 wrote another
    # than is published.
    aliases={"model.language_model.": "model.", "model.visual.": "visual."},
    prefixes={
        "visual.": "visual.",
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
    media=("image", "video"),
)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": Family(fused=_FUSED, experts="experts.routed_experts"),
    "Gemma3ForCausalLM": _LLAMA,
    "Glm4ForCausalLM": Family(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    ),  # gate and up are one on both sides
    "GPT2LMHeadModel": _GPT2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VL,
}


class Placement(NamedTuple):
    """Where one tensor lies: rows ``first .. first + rows`` of vLLM's ``parameter``, or of its slice ``expert``."""

    parameter: str
    first: int
    rows: int
    transposed: bool = False
    expert: int | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Contents of the checkpoint that an engine was started with.

    Attributes:
        family: its layout in vLLM.
        shapes: every tensor of the model, by the names of published checkpoints.
        optional: names an update may leave out (a tied output matrix).
        eos_token_ids: ids that end a generation.
        placeholders: id of one position of an image or a video, by kind of input the model takes.
    """

    family: Family
    shapes: Shapes
    optional: frozenset[str]
    eos_token_ids: frozenset[int] = frozenset()
    placeholders: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read ``config.json`` and the headers of the safetensors files.

        Raises:
            ConfigError: not a model folder, an architecture without a table, or quantised weights.
        """
        config_file = folder / "config.json"
        if not config_file.is_file():
            raise ConfigError(
                f"model.path={str(folder)!r} holds no config.json; set it to a Hugging Face model"
                " folder"
            )
        config = json.loads(config_file.read_text())
        names = config.get("architectures") or ["(none)"]
        if names[0] not in FAMILIES:
            raise ConfigError(
                f"{config_file}: architecture {names[0]!r} has no table in gpu_backend/weights.py,"
                " so its weights could not be updated safely; there are"
                f" {', '.join(sorted(FAMILIES))} (add one there)"
            )
        if config.get("quantization_config"):
            raise ConfigError(
                f"{config_file}: quantised weights cannot be trained; use the unquantised model"
            )
        family = FAMILIES[names[0]]
        shapes: dict[str, tuple[int, ...]] = {}
        files = sorted(folder.glob("*.safetensors"))
        try:
            for file in files:
                shapes |= {
                    _renamed(n, family.aliases): shape for n, shape in read_header(file)[0].items()
                }
        except WeightUpdateError as error:
            raise ConfigError(str(error)) from error
        if not shapes:
            raise ConfigError(
                f"{folder} holds no *.safetensors; convert the model's weights to safetensors"
            )
        is_tied = config.get("tie_word_embeddings", False) or names[0] == "GPT2LMHeadModel"
        try:
            is_tied = is_tied and not has_own_head(files)  # vLLM unties a head that differs
        except ModelError as error:
            raise ConfigError(str(error)) from error
        return cls(
            family=family,
            shapes=shapes,
            optional=frozenset({HEAD}) if is_tied else frozenset(),
            eos_token_ids=_eos_ids(folder, config),
            placeholders={kind: _placeholder(config, config_file, kind) for kind in family.media},
        )

    def check_media(self, wanted: Collection[str]) -> None:
        """Check that the model takes these kinds of input.

        Raises:
            ConfigError: it does not; or it takes some and none is wanted, when vLLM would not load
                its vision tower.
        """
        if unknown := sorted(set(wanted) - self.placeholders.keys()):
            raise ConfigError(
                f"rollout.vllm.multi_modal names {unknown}, which this model does not take; remove"
                " them"
            )
        if self.placeholders and not wanted:
            raise ConfigError(
                f"this model takes {' and '.join(self.placeholders)} input; say how much of it with"
                f" e.g. rollout.vllm.multi_modal.{next(iter(self.placeholders))}=1"
            )

    def check(self, update: Shapes, *, partial: bool) -> None:
        """Check that these tensors may replace the model's (all of them, or some if ``partial``).

        Raises:
            WeightUpdateError: unknown or missing names, or other shapes.
        """
        unknown = sorted(update.keys() - self.shapes.keys() - self.optional)
        if unknown:
            raise WeightUpdateError(
                f"the update holds {len(unknown)} tensors the model does not have: {unknown[:3]}"
            )
        wrong = [
            n
            for n in sorted(update)
            if n in self.shapes and tuple(update[n]) != tuple(self.shapes[n])
        ]
        if wrong:
            name = wrong[0]
            raise WeightUpdateError(
                f"{len(wrong)} tensors have another shape, e.g. {name}: {list(update[name])}, "
                f"served is {list(self.shapes[name])}"
            )
        missing = sorted(self.shapes.keys() - update.keys() - self.optional)
        if missing and not partial:
            raise WeightUpdateError(
                f"the update lacks {len(missing)} of {len(self.shapes)} tensors, e.g."
                f" {missing[:3]}; send them all or set partial=True"
            )
        if not update:
            raise WeightUpdateError("the update holds no tensor")

    def placements(self) -> dict[str, Placement]:
        """Return where every tensor lies after loading (on one device; tensor-parallel ranks hold slices of it)."""
        return {
            n: _place(n, self.shapes, self.family) for n in self.shapes if n not in self.optional
        }


def _placeholder(config: Mapping[str, Any], file: Path, kind: str) -> int:
    if type(placeholder := config.get(f"{kind}_token_id")) is not int:
        raise ConfigError(f"{file} names no {kind}_token_id; download the model again")
    return placeholder


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return those of ``generation_config.json`` (which lists all) if it has any, else of ``config.json``."""
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text()) if file.is_file() else {}
    language = config.get("text_config", config)
    eos = generation.get("eos_token_id", config.get("eos_token_id", language.get("eos_token_id")))
    return frozenset() if eos is None else frozenset(eos if isinstance(eos, list) else [eos])


def _place(name: str, shapes: Shapes, family: Family) -> Placement:
    parts, rows = name.split("."), shapes[name][0]
    module, kind = (parts[-2], parts[-1]) if len(parts) > 1 else ("", name)
    full = _renamed(name, family.prefixes).split(".")
    if family.experts and len(parts) > 4 and parts[-4] == "experts":
        stack, first = {"gate_proj": ("w13", 0), "up_proj": ("w13", rows), "down_proj": ("w2", 0)}[
            module
        ]
        parameter = ".".join([*full[:-4], family.experts, f"{stack}_{kind}"])
        return Placement(parameter=parameter, first=first, rows=rows, expert=int(parts[-3]))
    for fused, members in family.fused.items():
        if module in members:
            before = members[: members.index(module)]
            siblings = (".".join([*parts[:-2], member, kind]) for member in before)
            first = sum(shapes[sibling][0] for sibling in siblings)
            return Placement(parameter=".".join([*full[:-2], fused, kind]), first=first, rows=rows)
    transposed = module in family.transposed and kind == "weight"
    rows = shapes[name][1] if transposed else rows
    return Placement(parameter=".".join(full), first=0, rows=rows, transposed=transposed)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the beginning of a name by the first of ``prefixes`` that fits."""
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def read_header(file: Path) -> tuple[Shapes, Mapping[str, str]]:
    """Return the shapes and the metadata of a safetensors file, without reading its tensors.

    Raises:
        WeightUpdateError: the file is missing, cut short, or not safetensors.
    """
    try:
        with safe_open(file, framework="numpy") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
            return shapes, tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(f"{file} is not a whole safetensors file: {error}") from error


def read_update(paths: Sequence[str]) -> tuple[Shapes, LogprobProbe | None]:
    """Return shapes and probe of an update's files.

    Raises:
        WeightUpdateError: a file is damaged, or two files hold the same tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    probe = None
    for path in paths:
        added, metadata = read_header(Path(path))
        if twice := sorted(shapes.keys() & added.keys()):
            raise WeightUpdateError(
                f"{twice[0]} stands in two files of the update, the second is {path}"
            )
        shapes |= added
        try:
            probe = probe or LogprobProbe.from_metadata(metadata)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(f"the probe in {path} is damaged: {error}") from error
    return shapes, probe
