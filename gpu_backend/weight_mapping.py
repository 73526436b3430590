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

from jax_agent_rl.errors import ConfigError, ModelError, WeightUpdateError
from jax_agent_rl.models.tensors import HEAD, has_own_head, of_prediction_layers, open_tensors
from jax_agent_rl.utils.text import counted

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family's layout in vLLM.

    Attributes:
        fused: vLLM's module name to the Hugging Face modules stacked in it, in order of rows.
        transposed: modules whose ``weight`` Hugging Face stores as [in, out] and vLLM as [out, in].
        aliases: beginning of names in some folders to their beginning in published checkpoints, by
            whose names updates call every tensor.
        prefixes: beginning of published names to their beginning in vLLM; the first that fits is
            replaced.
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
    # Two generations of names are in use: some versions of transformers since 4.52 wrote other
    # names than published checkpoints have.
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
    "Glm4MoeForCausalLM": Family(fused=_FUSED, experts="experts.routed_experts"),
    "MiniMaxM2ForCausalLM": Family(fused=_FUSED, experts="experts.routed_experts"),
    "Gemma3ForCausalLM": _LLAMA,
    "Olmo3ForCausalLM": _LLAMA,
    # Gate and up are one matrix on both sides.
    "Glm4ForCausalLM": Family(fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}),
    "GPT2LMHeadModel": _GPT2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VL,
}


class Placement(NamedTuple):
    """Where one tensor lies in vLLM's model.

    It is in rows ``first .. first + rows`` of ``parameter``, or of its slice ``expert``.
    """

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
                f"{config_file}: architecture {names[0]!r} has no table in"
                " gpu_backend/weight_mapping.py, so its weights could not be updated safely; there"
                f" are {', '.join(sorted(FAMILIES))} (add one there)"
            )
        if config.get("quantization_config"):
            raise ConfigError(
                f"{config_file}: quantised weights cannot be trained; use the unquantised model"
            )

        family = FAMILIES[names[0]]
        shapes: dict[str, tuple[int, ...]] = {}
        files = sorted(folder.glob("*.safetensors"))
        is_tied = config.get("tie_word_embeddings", False) or names[0] == "GPT2LMHeadModel"
        try:
            for file in files:
                for name, shape in read_shapes([file]).items():
                    shapes[_renamed(name, family.aliases)] = shape
            for name in of_prediction_layers(shapes):  # vLLM does not load them either
                del shapes[name]
            is_tied = is_tied and not has_own_head(files)  # vLLM unties a head that differs
        except ModelError as error:
            raise ConfigError(str(error)) from error
        if not shapes:
            raise ConfigError(
                f"{folder} holds no *.safetensors; convert the model's weights to safetensors"
            )

        return cls(
            family=family,
            shapes=shapes,
            optional=frozenset({HEAD}) if is_tied else frozenset(),
            eos_token_ids=_eos_ids(folder, config),
            placeholders={kind: _placeholder(config, config_file, kind) for kind in family.media},
        )

    def check_media(self, kinds: Collection[str]) -> None:
        """Check that the model takes these kinds of input.

        Raises:
            ConfigError: it does not; or it takes some kinds and none is named, and vLLM would not
                load its vision tower.
        """
        unknown = sorted(set(kinds) - self.placeholders.keys())
        if unknown:
            raise ConfigError(
                f"rollout.vllm.multi_modal names {unknown}, which this model does not take; remove"
                " them"
            )
        if self.placeholders and not kinds:
            first_kind = next(iter(self.placeholders))
            raise ConfigError(
                f"this model takes {' and '.join(self.placeholders)} input; say how much of it with"
                f" e.g. rollout.vllm.multi_modal.{first_kind}=1"
            )

    def check(self, update: Shapes, *, partial: bool) -> None:
        """Check that these tensors may replace the model's (all of them, or some if ``partial``).

        Raises:
            WeightUpdateError: unknown or missing names, or other shapes.
        """
        unknown = sorted(update.keys() - self.shapes.keys() - self.optional)
        if unknown:
            raise WeightUpdateError(
                f"the update holds {counted(len(unknown), 'tensor')} that the model does not have:"
                f" {unknown[:3]}"
            )

        misshapen = []
        for name in sorted(update.keys() & self.shapes.keys()):
            if tuple(update[name]) != tuple(self.shapes[name]):
                misshapen.append(name)
        if misshapen:
            name = misshapen[0]
            raise WeightUpdateError(
                f"the update holds {counted(len(misshapen), 'tensor')} of another shape, e.g."
                f" {name}: {list(update[name])}, served is {list(self.shapes[name])}"
            )

        missing = sorted(self.shapes.keys() - update.keys() - self.optional)
        if missing and not partial:
            raise WeightUpdateError(
                f"the update lacks {len(missing)} of {counted(len(self.shapes), 'tensor')}, e.g."
                f" {missing[:3]}; send them all or set partial=True"
            )
        if not update:
            raise WeightUpdateError("the update holds no tensor")

    def placements(self) -> dict[str, Placement]:
        """Return where every tensor lies after loading, on one device.

        Tensor-parallel ranks hold slices of it.
        """
        placements = {}
        for name in self.shapes:
            if name not in self.optional:
                placements[name] = _place(name, self.shapes, self.family)
        return placements


def _placeholder(config: Mapping[str, Any], file: Path, kind: str) -> int:
    placeholder = config.get(f"{kind}_token_id")
    if type(placeholder) is not int:
        raise ConfigError(f"{file} names no {kind}_token_id; download the model again")
    return placeholder


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that end a generation, from the first file that names some.

    ``generation_config.json`` comes before ``config.json``, as it lists all of them.
    """
    sources = [config, config.get("text_config", config)]
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        sources.insert(0, json.loads(generation_file.read_text()))
    for source in sources:
        if "eos_token_id" not in source:
            continue
        eos_ids = source["eos_token_id"]
        if eos_ids is None:
            return frozenset()
        if isinstance(eos_ids, list):
            return frozenset(eos_ids)
        return frozenset({eos_ids})
    return frozenset()


_EXPERT_STACKS = {
    "gate_proj": "w13",
    "w1": "w13",
    "up_proj": "w13",
    "w3": "w13",
    "down_proj": "w2",
    "w2": "w2",
}
"""vLLM's stack of all experts' matrices, by Hugging Face's module of one expert."""


def _place(name: str, shapes: Shapes, family: Family) -> Placement:
    """Return where a tensor lies after loading."""
    rows = shapes[name][0]
    parts = name.split(".")  # e.g. model.layers.0.self_attn.q_proj.weight
    module = parts[-2] if len(parts) > 1 else ""
    kind = parts[-1]
    vllm_parts = _renamed(name, family.prefixes).split(".")

    # e.g. model.layers.0.mlp.experts.7.up_proj.weight
    is_expert = len(parts) > 4 and parts[-4] == "experts"
    if family.experts and is_expert:
        stack = _EXPERT_STACKS[module]
        first = rows if module in ("up_proj", "w3") else 0  # gate lies above up
        return Placement(
            parameter=".".join([*vllm_parts[:-4], family.experts, f"{stack}_{kind}"]),
            first=first,
            rows=rows,
            expert=int(parts[-3]),
        )

    for fused, members in family.fused.items():
        if module not in members:
            continue
        first = 0
        for member in members[: members.index(module)]:
            sibling = ".".join([*parts[:-2], member, kind])
            first += shapes[sibling][0]
        parameter = ".".join([*vllm_parts[:-2], fused, kind])
        return Placement(parameter=parameter, first=first, rows=rows)

    transposed = module in family.transposed and kind == "weight"
    if transposed:
        rows = shapes[name][1]
    return Placement(parameter=".".join(vllm_parts), first=0, rows=rows, transposed=transposed)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the beginning of a name by the first of ``prefixes`` that fits."""
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def read_shapes(files: Sequence[str | Path]) -> Shapes:
    """Return the shapes of safetensors files, without reading their tensors.

    Raises:
        ModelError: a file is missing, cut short, or not safetensors, or two hold the same tensor.
    """
    return {name: tuple(tensor().get_shape()) for name, tensor in open_tensors(files).items()}
