"""A tiny random Qwen2.5-VL or Qwen3.5 with a tokenizer and processors of its own, and
transformers' word on what it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jax_agent_rl.utils.weight_transfer import LogprobProbe

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_SPECIAL = 256  # after one id per byte
EOS = FIRST_SPECIAL + 2
IMAGE = FIRST_SPECIAL + 5
VIDEO = FIRST_SPECIAL + 6
VOCABULARY = FIRST_SPECIAL + 8
PIXELS = (56 * 56, 112 * 112)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "{{ '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# 'tool' #}"
)


def write_processors(folder: Path) -> None:
    """Tokenizer, chat template, and how images and frames are cut into patches."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    size = {"size": {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}}
    for name, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
        settings = {
            f"{kind}_processor_type": f"Qwen2VL{kind.capitalize()}Processor",
            **patches,
            **size,
        }
        (folder / f"{name}_config.json").write_text(json.dumps(settings))


_QWEN2_5_VL: dict[str, Any] = {
    "text_config": {
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    },
    "vision_config": {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2},
}
_QWEN3_5: dict[str, Any] = {
    "text_config": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {"patch_size": 14, "num_position_embeddings": 25},
}
KINDS = {"Qwen2_5_VL": _QWEN2_5_VL, "Qwen3_5": _QWEN3_5}
"""What differs, by transformers' name."""


def write_model(folder: Path, seed: int, kind: str = "Qwen2_5_VL") -> Path:
    """A model folder; random, far from its initialisation (where norms are one and biases zero)."""
    import torch
    import transformers

    own = KINDS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"bos_token_id": None, "eos_token_id": EOS}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    tower = {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**sizes, **heads, **ids, **limits, **own["text_config"]},
        vision_config={**sizes, **tower, **own["vision_config"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=FIRST_SPECIAL + 3,
        vision_end_token_id=FIRST_SPECIAL + 4,
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    write_processors(folder)
    return folder


def picture(seed: int, width: int = 70, height: int = 50) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def positions(ids: Sequence[int], grids: Mapping[int, Sequence[Sequence[int]]]) -> list[list[int]]:
    """Time, row and column of every id, [3][T], as published with Qwen2.5-VL.

    Text goes on after the largest position so far. (transformers 5 goes on after the picture's
    height and width alone, so that what follows a video of more groups than rows would stand before
    its end.)

    Args:
        grids: (groups, rows, columns) of merged patches of each item, in order, by placeholder.
    """
    grids_left = {placeholder: list(items) for placeholder, items in grids.items()}
    coordinates: list[tuple[int, int, int]] = []
    while len(coordinates) < len(ids):
        start = 1 + max((max(place) for place in coordinates), default=-1)
        if not grids_left.get(ids[len(coordinates)]):
            coordinates.append((start, start, start))
            continue
        placeholder = ids[len(coordinates)]
        groups, rows, columns = grids_left[placeholder].pop(0)
        step = (
            2 if placeholder == VIDEO else 1
        )  # a group is 2 frames, a second at 2 a second, and 2 positions a second
        for group, row, column in np.ndindex(groups, rows, columns):
            coordinates.append((start + step * group, start + row, start + column))
    return [list(axis) for axis in zip(*coordinates, strict=True)]


class VisionReference:
    """transformers on a folder; ids hold every placeholder as often as the model reads it."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self._torch = torch
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._folder = folder

    def logprobs(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """float64 [T, V]: log-probs of what follows each id."""
        from transformers import AutoImageProcessor, AutoVideoProcessor

        inputs: dict[str, Any] = {}
        if media.get("image"):
            processor = AutoImageProcessor.from_pretrained(self._folder)
            inputs |= processor(images=list(media["image"]), return_tensors="pt")
        if media.get("video"):  # this processor needs torchvision
            processor = AutoVideoProcessor.from_pretrained(self._folder)
            videos = [np.stack([np.asarray(frame) for frame in video]) for video in media["video"]]
            inputs |= processor(videos=videos, do_sample_frames=False, return_tensors="pt")
        grids = {}
        for kind, placeholder in (("image", IMAGE), ("video", VIDEO)):
            if f"{kind}_grid_thw" in inputs:
                sizes = inputs[f"{kind}_grid_thw"].tolist()
                grids[placeholder] = [(t, h // 2, w // 2) for t, h, w in sizes]
        position_ids = self._torch.tensor(positions(ids, grids))[:, None]
        with self._torch.no_grad():
            logits = self.model(
                self._torch.tensor([list(ids)]), position_ids=position_ids, **inputs
            ).logits[0]
        return self._torch.log_softmax(logits.double(), -1).numpy()

    def greedy(
        self, ids: Sequence[int], media: Mapping[str, Sequence[Any]], count: int
    ) -> tuple[list[int], list[float]]:
        """The most likely continuation and its log-probs."""
        ids = list(ids)
        values = []
        for _ in range(count):
            last = self.logprobs(ids, media)[-1]
            ids.append(int(last.argmax()))
            values.append(float(last.max()))
        return ids[-count:], values

    def probe(self, ids: Sequence[int]) -> LogprobProbe:
        """What it says of a text, for an update with its weights."""
        values = self.logprobs(ids, {})
        return LogprobProbe(
            ids=(tuple(ids),),
            log_probs=(tuple(values[range(len(ids) - 1), list(ids[1:])].tolist()),),
        )
