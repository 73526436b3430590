"""Zooming into the images of a task.

``<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [x1, y1, x2, y2], "target_image": 1}}</tool_call>``, with
coordinates in pixels, or fractions if none is above 1. Every returned crop becomes the next image, so that a model can
zoom into a crop. ``extra_fields.images`` are ``data:`` URLs or files below ``image.root``.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from jax_agent_rl.config.servers import ImageSettings
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import parse_tool_call, resolve_file
from jax_agent_rl.utils.media import FORMATS
from jax_agent_rl.validation import is_number

_NAMES = ("zoom_in", "image_zoom_in_tool", "crop_image", "crop_image_normalized")


class ImageZoomTool(ServerTool[Mapping[str, Any], list[Image.Image]]):
    """Zooms into images; the environment is the list of images, crops included."""

    name = "image_zoom"
    usage = '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [x1, y1, x2, y2], "target_image": 1}}</tool_call>'
    stateful = True

    def parse_action(self, action: str) -> Mapping[str, Any] | None:
        call = parse_tool_call(action)
        return call[1] if call is not None and call[0] in _NAMES else None

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> list[Image.Image]:
        sources = extra.get("images")
        if not isinstance(sources, list) or not sources:
            raise ToolError("the task has no images: extra_fields.images must be a list")
        settings = self.context.settings.image
        return await self.context.threads.run(lambda: [_read(source, settings) for source in sources], name=self.name)

    async def close(self, environment: list[Image.Image]) -> None:
        for image in environment:
            image.close()

    async def act(self, action: ToolAction[Mapping[str, Any], list[Image.Image]]) -> ToolObservation:
        images = action.environment
        image = images[_index(action.parsed.get("target_image", 1), len(images))]
        box = _box(action.parsed.get("bbox_2d"), image.size)
        side = self.context.settings.image.max_side
        crop, url = await self.context.threads.run(lambda: _crop(image, box, side), name=self.name)
        images.append(crop)
        size = f"{crop.width}x{crop.height}"
        text = f"Here is the cropped image, image {len(images)}. (Image Size: {size})\n<image>"
        return ToolObservation(text=text, image=[url])


def _index(target: object, count: int) -> int:
    if isinstance(target, str) and target.isdecimal() and len(target) < 9:
        target = int(target)
    if isinstance(target, bool) or not isinstance(target, int) or not 1 <= target <= count:
        raise ToolError(f"target_image={target!r} must be an integer from 1 to {count}")
    return target - 1


def _box(value: object, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Parse a box in pixels, clipped to the image and at least one pixel wide and high."""
    if not (isinstance(value, list) and len(value) == 4 and all(is_number(v) for v in value)):
        raise ToolError(f"bbox_2d={str(value)[:100]} must be four numbers [x1, y1, x2, y2]")
    width, height = size
    if all(0 <= v <= 1 for v in value):
        value = [v * extent for v, extent in zip(value, (width, height) * 2, strict=True)]
    left, top, right, bottom = value
    left, top = max(0, math.floor(left)), max(0, math.floor(top))
    right, bottom = min(width, math.ceil(right)), min(height, math.ceil(bottom))
    if left >= right or top >= bottom:
        raise ToolError(f"bbox_2d={value} holds nothing of the image, which is {width}x{height}")
    return left, top, right, bottom


def _crop(image: Image.Image, box: Sequence[int], side: int) -> tuple[Image.Image, str]:
    """Return the crop, no side longer than ``side``, and its ``data:`` URL."""
    crop = image.crop((box[0], box[1], box[2], box[3])).convert("RGB")
    crop.thumbnail((side, side))
    data = io.BytesIO()
    crop.save(data, format="PNG")
    return crop, "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _read(source: object, settings: ImageSettings) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(_bytes(source, settings)), formats=FORMATS)
        if image.width * image.height > settings.max_pixels:
            raise ToolError(
                f"an image is {image.width}x{image.height}, more than image.max_pixels={settings.max_pixels}"
            )
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, binascii.Error) as error:
        raise ToolError(f"extra_fields.images: {str(source)[:60]!r} cannot be read: {error}") from error
    return image


def _bytes(source: object, settings: ImageSettings) -> bytes:
    if isinstance(source, str) and source.startswith("data:image/"):
        return base64.b64decode(source.partition(",")[2], validate=True)
    if isinstance(source, str) and settings.root is not None:
        path = resolve_file(Path(settings.root).resolve(), source)
        if path is not None:
            return path.read_bytes()
    raise ToolError(f"extra_fields.images: {str(source)[:60]!r} is neither a data: URL nor a file below image.root")
