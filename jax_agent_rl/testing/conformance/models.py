"""Model folders to test with, weight updates from them, and the right answers.

Models are a tiny random Llama, and changed copies of any. Answers are from full forward passes in
float64, without a cache, a batch or an engine. Shapes: T ids of a context, S sampled ids, V
vocabulary.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.utils.hub import model_folder, read_pretrained
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.weight_transfer import LogprobProbe

_SPECIAL = ("<unk>", "<bos>", "<eos>")
_ADAPTED = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    # Latent attention.
    "self_attn.q_b_proj",
    "self_attn.kv_b_proj",
    # Delta nets.
    "linear_attn.out_proj",
)
"""Modules of a layer that the adapter changes, of those that a model has."""
_LETTERS = [chr(code) for code in range(33, 127)]
_PROBE_LENGTH = 48
_RANK = 2
"""Rank of the adapter."""


@dataclass(frozen=True, kw_only=True)
class ModelDirs:
    """Hugging Face folders of one architecture, one per weight set.

    Attributes:
        scratch: folder for the other weight sets, and for files that the suite writes.
    """

    base: Path
    scratch: Path

    def weights(self, which: str) -> Path:
        """Return the folder of a weight set."""
        if which == "base":
            return self.base
        return self.scratch / which

    @property
    def adapter(self) -> Path:
        """A PEFT adapter of ``base``.

        Raises:
            ConfigError: ``base`` has no matrix that the suite adapts.
        """
        folder = self.scratch / "adapter"
        if not folder.is_dir():
            modules = ", ".join(_ADAPTED)
            raise ConfigError(
                f"--adapters: {self.base} has none of the matrices that the suite adapts"
                f" ({modules}); leave --adapters out"
            )
        return folder


def prepare_folders(model: Path | None, scratch: Path) -> ModelDirs:
    """Write changed copies of a model (or of a tiny random one) under ``scratch``.

    ``other`` differs in every parameter by a few per cent, so that a stale one cannot go unnoticed.
    Every second tensor of ``mixed`` is ``other``'s; its subfolder ``partial`` holds these alone.
    Neighbours differ in origin, so matrices that an engine fuses are partly new and partly old.
    ``adapted`` is ``base`` with the adapter merged in; without matrices to adapt there is none.

    Raises:
        ModelError: ``model`` holds no safetensors files.
    """
    from safetensors.numpy import load_file

    if model:
        base = model_folder(model, weights=True)
    else:
        base = write_tiny_model(scratch / "base")
    files = weight_files(base)
    if not files:
        raise ModelError(f"{base} holds no safetensors files")

    other = scratch / "other"
    mixed = scratch / "mixed"
    adapted = scratch / "adapted"
    for folder in (other, mixed, adapted):
        folder.mkdir(parents=True)
        for file in base.iterdir():
            if file.is_file() and str(file) not in files:
                shutil.copy(file, folder)
    (mixed / "partial").mkdir()

    noise_rng = np.random.default_rng(1)
    adapter_rng = np.random.default_rng(2)
    adapter: dict[str, np.ndarray] = {}
    for file in map(Path, files):
        tensors = load_file(file)
        changed = {name: _changed(tensor, noise_rng) for name, tensor in tensors.items()}
        _save(changed, other / file.name)

        partial = {name: changed[name] for name in sorted(tensors)[::2]}
        _save(partial, mixed / "partial" / file.name)
        _save({**tensors, **partial}, mixed / file.name)

        for name in list(tensors):
            module, _, ending = name.rpartition(".")
            if ending != "weight" or ".layers." not in module or not module.endswith(_ADAPTED):
                continue
            a, b = _low_rank(tensors[name], adapter_rng)
            adapter[f"base_model.model.{module}.lora_A.weight"] = a
            adapter[f"base_model.model.{module}.lora_B.weight"] = b
            tensors[name] = tensors[name].astype(np.float32) + 2 * b @ a
        _save(tensors, adapted / file.name)

    if adapter:
        _write_adapter(scratch / "adapter", adapter)
    return ModelDirs(base=base, scratch=scratch)


def _write_adapter(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a PEFT adapter."""
    folder.mkdir()
    _save(tensors, folder / "adapter_model.safetensors")
    modules = set()
    for name in tensors:
        module = name.partition(".lora_")[0]
        modules.add(module.rpartition(".")[2])
    settings = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def write_tiny_model(
    folder: Path, *, experts: bool = False, delta_nets: bool = False, latents: bool = False
) -> Path:
    """Write a random model of 97 ids whose distributions are far from uniform.

    It is a Llama, a Qwen3 MoE of eight experts, a Qwen3.5 of a delta net and gated attention, or a
    DeepSeek-V3 of a dense layer and one of experts.
    Ids 3 to 96 are one printable letter each.
    """
    import jax

    from jax_agent_rl.models.config import (
        DecoderConfig,
        DeltaNet,
        Experts,
        LatentAttention,
        Rope,
    )
    from jax_agent_rl.models.hf import save_hf
    from jax_agent_rl.models.parameters import Kind, parameter_at

    family = "llama"
    mixture = None
    if experts:
        family = "qwen3_moe"
        mixture = Experts(count=8, per_token=2, intermediate_size=32, normalize=True)
    config = DecoderConfig(
        family=family,
        qk_norm=experts,
        experts=mixture,
        vocab_size=len(_SPECIAL) + len(_LETTERS),
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_ids=(2,),
    )
    if delta_nets:
        config = replace(
            config,
            family="qwen3_5_text",
            rope=Rope(partial_rotary=0.5),
            qk_norm=True,
            norm_offset=1.0,
            attention_gate=True,
            delta_net=DeltaNet(
                layers=(True, False), key_heads=2, value_heads=4, key_dim=16, value_dim=16
            ),
        )
    if latents:
        config = replace(
            config,
            family="deepseek_v3",
            num_kv_heads=2,
            head_dim=24,
            rope=Rope(interleaved=True),
            latent=LatentAttention(q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
            experts=Experts(
                count=8,
                per_token=2,
                intermediate_size=32,
                normalize=True,
                first_dense_layers=1,
                scoring="sigmoid",
                correction=True,
                groups=4,
                groups_per_token=2,
                shared_size=32,
            ),
        )
    rng = np.random.default_rng(0)

    def draw(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
        if parameter_at(path).kind in (Kind.NORM, Kind.PLAIN_NORM):
            return rng.uniform(0.8, 1.2, shape).astype(np.float32)
        return (rng.standard_normal(shape) * 0.25).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(
        draw, config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )
    save_hf(folder, config, params)
    _write_letter_tokenizer(folder)
    return folder


def weight_files(folder: Path) -> list[str]:
    """Return the safetensors files of a folder, sorted."""
    return [str(file) for file in sorted(folder.glob("*.safetensors"))]


def logprob_probe(which: str, *, reference: Reference, vocab_size: int) -> LogprobProbe:
    """Return a sequence of random ids with the log-probs that a weight set gives them.

    Args:
        reference: computes the log-probs.
        vocab_size: ids are in [0, vocab_size).
    """
    ids = np.random.default_rng(0).integers(0, vocab_size, _PROBE_LENGTH).tolist()
    scores_TV = log_softmax(reference.logits(ids[:-1], weights=which))
    log_probs = scores_TV[np.arange(len(ids) - 1), ids[1:]].tolist()
    return LogprobProbe(ids=(tuple(ids),), log_probs=(tuple(log_probs),))


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _changed(tensor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    noise = 1 + 0.1 * rng.standard_normal(tensor.shape, dtype=np.float32)
    return (tensor.astype(np.float32) * noise).astype(tensor.dtype)


def _low_rank(weight: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return random matrices A and B of an adapter whose product is of the weight's magnitude."""
    spread = float(np.sqrt(weight.astype(np.float32).std()))
    a = (spread * rng.standard_normal((_RANK, weight.shape[1]))).astype(np.float32)
    b = (spread * rng.standard_normal((weight.shape[0], _RANK))).astype(np.float32)
    return a, b


def _write_letter_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate((*_SPECIAL, *_LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


_EDGE = 1e-4
"""Relative slack of the nucleus mass: sums in float32 may cut one id earlier or later."""


def _in_best_groups(ranking: np.ndarray, groups: int, count: int) -> np.ndarray:
    """Return the ranking of experts [T, L, E], -inf for those outside the best groups.

    The best groups are those whose two best experts have the largest sums.
    """
    grouped = ranking.reshape(*ranking.shape[:2], groups, -1)
    if count == groups:
        return ranking
    sums = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    least = np.sort(sums, axis=-1)[..., -count, None, None]
    return np.where(sums[..., None] >= least, grouped, -np.inf).reshape(ranking.shape)


class Reference(Protocol):
    """A model whose logits are taken as correct."""

    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        """Return float64 logits [T, V] of a weight set.

        Row t scores what follows ``ids[: t + 1]``.
        """
        ...

    def router_scores(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        """Return the float64 scores [T, L, E] by which a mixture's routers rank the experts.

        A token takes those with the highest ones. L counts layers with experts. They are needed to
        test ``Capabilities.routed_experts``.
        """
        ...


class TransformersReference:
    """Hugging Face transformers on the CPU.

    Args:
        folders: model folders by name of the weight set.

    Raises:
        ConfigError: torch is not installed.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"the reference runs on torch: {install_command('conformance')}"
            ) from None
        self._folders = dict(folders)
        self._models: dict[str, Any] = {}

    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        import torch

        with torch.inference_mode():
            output = self._model(weights)(torch.tensor([list(ids)]))
            return output.logits[0].double().numpy()

    def router_scores(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        import torch

        model = self._model(weights)
        with torch.inference_mode():
            output = model(torch.tensor([list(ids)]), output_router_logits=True)
        layers = [scores.reshape(len(ids), -1) for scores in output.router_logits]
        scores_TLE = torch.stack(layers, dim=1).double().numpy()
        corrections = []
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                corrections.append(buffer.double().numpy())
        if not corrections:
            return scores_TLE

        ranking_TLE = 1 / (1 + np.exp(-scores_TLE)) + np.stack(corrections)
        fields = model.config.to_dict()
        return _in_best_groups(ranking_TLE, fields.get("n_group", 1), fields.get("topk_group", 1))

    def _model(self, weights: str) -> Any:
        if weights not in self._models:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
            from transformers.utils import logging

            logging.disable_progress_bar()
            folder = self._folders[weights]
            auto_class = AutoModelForCausalLM
            if hasattr(read_pretrained(AutoConfig, folder), "vision_config"):
                auto_class = AutoModelForImageTextToText
            model = read_pretrained(
                auto_class,
                folder,
                dtype=torch.float64,
                attn_implementation="eager",
                experts_implementation="eager",  # torch's grouped products lack float64
            )
            self._models[weights] = model.eval()
        return self._models[weights]


def predictions(
    reference: Reference, prompt: Sequence[int], sampled: Sequence[int], weights: str
) -> np.ndarray:
    """Return the logits, float64 [S, V], from which each sampled id was drawn."""
    if not sampled:
        raise ValueError("no id was sampled: there is nothing to compare")
    logits_TV = reference.logits([*prompt, *sampled[:-1]], weights=weights)
    return logits_TV[len(prompt) - 1 :]


def greedy_gaps(logits_SV: np.ndarray, sampled: Sequence[int]) -> np.ndarray:
    """Return how far each sampled id is below the most likely one, in nats, float64 [S].

    It is 0 for greedy ids.
    """
    sampled_S = logits_SV[np.arange(len(sampled)), list(sampled)]
    return logits_SV.max(axis=-1) - sampled_S


def expected_logprobs(
    logits_SV: np.ndarray,
    sampled: Sequence[int],
    got: Sequence[float],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Return the log-probs, float64 [S], of sampled ids under the distribution of their draws.

    With ``top_p`` < 1 or ``min_p`` an engine may cut one id earlier or later, so of the few
    possible answers the one nearest to ``got`` is returned. Ids outside the distribution get -inf.
    """
    scaled_SV = logits_SV / (temperature or 1.0)
    rows_S = np.arange(len(sampled))
    top_ps = {1.0}
    if top_p < 1:
        top_ps = {top_p, min(1.0, top_p * (1 + _EDGE)), top_p * (1 - _EDGE)}
    min_ps = {min_p, min_p * (1 + _EDGE), min_p * (1 - _EDGE)}

    candidates = []
    for edge_top_p, edge_min_p in itertools.product(top_ps, min_ps):
        truncated_SV = truncate(
            scaled_SV, top_p=edge_top_p, top_k=top_k, min_p=min(edge_min_p, 1.0)
        )
        candidates.append(log_softmax(truncated_SV)[rows_S, list(sampled)])
    candidates_CS = np.stack(candidates)
    finite_CS = np.where(np.isfinite(candidates_CS), candidates_CS, -1e9)
    distance_CS = np.abs(finite_CS - np.asarray(got))
    return candidates_CS[distance_CS.argmin(axis=0), rows_S]


def truncate(scaled_SV: np.ndarray, *, top_p: float, top_k: int, min_p: float = 0.0) -> np.ndarray:
    """Set logits outside the support to -inf: by min-p first, then by top-k, then by top-p."""
    out_SV = scaled_SV.copy()
    if min_p:
        out_SV[out_SV < out_SV.max(axis=-1, keepdims=True) + np.log(min_p)] = -np.inf
    if top_k:
        kth_S = np.sort(out_SV, axis=-1)[:, -min(top_k, out_SV.shape[1])]
        out_SV[out_SV < kth_S[:, None]] = -np.inf
    if top_p < 1:
        order_SV = np.argsort(-out_SV, axis=-1)
        probs_SV = np.take_along_axis(np.exp(log_softmax(out_SV)), order_SV, axis=-1)
        # An id is in the nucleus while the mass of the more likely ids is less than top_p.
        more_likely_SV = np.cumsum(probs_SV, axis=-1) - probs_SV
        is_outside_SV = np.zeros(out_SV.shape, bool)
        np.put_along_axis(is_outside_SV, order_SV, more_likely_SV >= top_p, axis=-1)
        out_SV[is_outside_SV] = -np.inf
    return out_SV


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return log-probs over the last axis; -inf stays -inf."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def decoder(tokenizer: Any) -> Callable[[Any], str] | None:
    """Return a decoder that keeps special tokens; None without a tokenizer.

    Engines keep them when they search for stop strings.
    """
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def read_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a model's folder; None if it has none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    return read_pretrained(AutoTokenizer, folder)
