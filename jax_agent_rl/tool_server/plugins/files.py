"""Local pages as text, one window at a time, and zooming into the images of a task.

Only pages below ``page.root`` can be opened: there is no network.

::

    <page>open guide/index.html</page>   <page>click 3</page>   <page>find tensor</page>
    <page>next</page>   <page>back</page>

An image is zoomed into by a tool call, with the arguments ``bbox_2d`` and ``target_image``::

    <tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [x1, y1, x2, y2],
                                                 "target_image": 1}}</tool_call>

The coordinates are pixels, or fractions if none is above 1. Every returned crop becomes the next
image, so that a model can zoom into a crop. ``extra_fields.images`` are ``data:`` URLs or files
below ``image.root``.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup
from PIL import Image

from jax_agent_rl.checks import is_number
from jax_agent_rl.config.commands import ImageSettings
from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.plugins import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import NO_PATH, last_tag, parse_tool_call, resolve_file
from jax_agent_rl.utils.files import read_regular_file
from jax_agent_rl.utils.media import FORMATS

_SUFFIXES = (".html", ".htm", ".md", ".txt")
_MAX_BYTES = 10 << 20


@dataclass(kw_only=True, slots=True)
class Browser:
    """A trajectory's current page, and those that it came from.

    Attributes:
        name: path below the root; empty if no page is open.
        links: targets of the numbered links: names of pages, or external addresses.
        position: character at which the visible window begins.
        history: names of earlier pages, latest last.
    """

    name: str = ""
    text: str = ""
    links: list[str] = field(default_factory=list)
    position: int = 0
    history: list[str] = field(default_factory=list)


class PageTool(ServerTool[tuple[str, str], Browser]):
    """Text browser. ``extra_fields.page`` is a trajectory's first page."""

    name = "page"
    usage = (
        "<page>open FILE</page>, <page>click N</page>, <page>find TEXT</page>, <page>next</page>,"
        " <page>back</page>."
    )
    stateful = True

    async def start(self) -> None:
        root = Path(self.context.settings.page.root or "")
        if not root.is_dir():
            raise ConfigError(f"page.root={str(root)!r}: no such folder")
        self._root = root.resolve()

    def parse_action(self, action: str) -> tuple[str, str] | None:
        text = last_tag(action, "page")
        if text is None:
            return None
        command, _, argument = text.partition(" ")
        return command.lower(), argument.strip()

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> Browser:
        browser = Browser()
        if isinstance(extra.get("page"), str):
            await self._visit(browser, extra["page"])
        return browser

    async def close(self, environment: Browser) -> None:
        environment.text = ""
        environment.links = []

    async def act(self, action: ToolAction[tuple[str, str], Browser]) -> ToolObservation:
        command, argument = action.parsed
        browser = action.environment
        match command:
            case "open":
                await self._visit(browser, argument)
            case "click":
                await self._visit(browser, _link(browser, argument))
            case "back":
                if not browser.history:
                    raise ToolError("there is no page before this one")
                await self._visit(browser, browser.history.pop(), forward=False)
            case "next":
                last_position = max(0, len(browser.text) - 1)
                next_position = browser.position + self.context.settings.page.page_chars
                browser.position = min(next_position, last_position)
            case "find":
                browser.position = _find(browser, argument)
            case _:
                raise ToolError(f"unknown command {command[:50]!r}; {self.usage}")
        return ToolObservation(text=self._window(browser))

    async def _visit(self, browser: Browser, name: str, *, forward: bool = True) -> None:
        path = self._path(name)
        try:
            text, links = await self.context.threads.run(lambda: render_page(path), name=self.name)
        except OSError as error:
            # The error's own text contains the path on this machine.
            raise ToolError(f"{name[:200]!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ToolError(f"{name[:200]!r} cannot be read: {error}") from error
        if forward and browser.name:
            browser.history.append(browser.name)
        browser.name = str(path.relative_to(self._root))
        browser.text = text
        browser.links = [self._resolve(path, link) for link in links]
        browser.position = 0

    def _path(self, name: str) -> Path:
        path = resolve_file(self._root, name.lstrip("/"))
        if path is None or path.suffix not in _SUFFIXES:
            raise ToolError(f"there is no page {name[:200]!r}")
        return path

    def _resolve(self, page: Path, link: str) -> str:
        """Return a link as a name below the root.

        Links that lead elsewhere stay unchanged; they cannot be opened.
        """
        try:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                return link
            path = page  # a link to a heading of the same page
            if parts.path:
                base = self._root if parts.path.startswith("/") else page.parent
                path = (base / unquote(parts.path).lstrip("/")).resolve()
        except NO_PATH:
            return link
        if not path.is_relative_to(self._root):
            return link
        return str(path.relative_to(self._root))

    def _window(self, browser: Browser) -> str:
        start = browser.position
        end = min(start + self.context.settings.page.page_chars, len(browser.text))
        heading = f"[{browser.name}: characters {start} to {end} of {len(browser.text)}]"
        return f"\n<observation>{heading}\n{browser.text[start:end]}\n</observation>\n"


def _link(browser: Browser, argument: str) -> str:
    """Return the target of a link by its number, counted from 1."""
    count = len(browser.links)
    # The length first: int() of a very long text is slow, or refused.
    is_number = argument.isdecimal() and len(argument) <= 9
    if not is_number or not 1 <= int(argument) <= count:
        raise ToolError(f"there is no link {argument[:20]!r}; this page has {count} links")
    return browser.links[int(argument) - 1]


def _find(browser: Browser, text: str) -> int:
    """Return the position of the next match.

    The search begins at the window's second character, then again at the page's beginning.
    """
    if text:
        page_text = browser.text.lower()
        for start in (browser.position + 1, 0):
            match_position = page_text.find(text.lower(), start)
            if match_position >= 0:
                return match_position
    raise ToolError(f"{text[:100]!r} is not on this page")


def render_page(path: Path) -> tuple[str, list[str]]:
    """Return a page's text with its links numbered, and their targets.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    source = read_regular_file(path, _MAX_BYTES)
    if path.suffix in (".md", ".txt"):
        return source.decode("utf-8", "replace"), []

    page = BeautifulSoup(source, "html.parser")
    for element in page(["script", "style", "template", "noscript"]):
        element.decompose()

    links = []
    for anchor in page.find_all("a", href=True):
        links.append(str(anchor["href"]))
        anchor.append(f" [{len(links)}]")

    lines = []
    for line in page.get_text("\n").splitlines():
        words = line.split()
        if words:
            lines.append(" ".join(words))
    return "\n".join(lines), links


# --- images ---------------------------------------------------------------------------------------

_NAMES = ("zoom_in", "image_zoom_in_tool", "crop_image", "crop_image_normalized")


class ImageZoomTool(ServerTool[Mapping[str, Any], list[Image.Image]]):
    """Zooms into images; the environment is the list of images, crops included."""

    name = "image_zoom"
    usage = (
        '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [x1, y1, x2, y2], "target_image":'
        " 1}}</tool_call>"
    )
    stateful = True

    def parse_action(self, action: str) -> Mapping[str, Any] | None:
        call = parse_tool_call(action)
        if call is None:
            return None
        name, arguments = call
        return arguments if name in _NAMES else None

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> list[Image.Image]:
        sources = extra.get("images")
        if not isinstance(sources, list) or not sources:
            raise ToolError("the task has no images: extra_fields.images must be a list")
        settings = self.context.settings.image
        return await self.context.threads.run(
            lambda: [_read(source, settings) for source in sources], name=self.name
        )

    async def close(self, environment: list[Image.Image]) -> None:
        for image in environment:
            image.close()

    async def act(
        self, action: ToolAction[Mapping[str, Any], list[Image.Image]]
    ) -> ToolObservation:
        images = action.environment
        index = _index(action.parsed.get("target_image", 1), len(images))
        image = images[index]
        box = _box(action.parsed.get("bbox_2d"), image.size)
        max_side = self.context.settings.image.max_side
        crop, url = await self.context.threads.run(
            lambda: _crop(image, box, max_side), name=self.name
        )

        images.append(crop)
        size = f"{crop.width}x{crop.height}"
        text = f"Here is the cropped image, image {len(images)}. (Image Size: {size})\n<image>"
        return ToolObservation(text=text, image=[url])


def _index(target: object, count: int) -> int:
    """Parse the number of an image, counted from 1, into its index."""
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
    left, top, right, bottom = value
    if all(0 <= v <= 1 for v in value):  # fractions of the image
        left *= width
        top *= height
        right *= width
        bottom *= height
        value = [left, top, right, bottom]

    left = max(0, math.floor(left))
    top = max(0, math.floor(top))
    right = min(width, math.ceil(right))
    bottom = min(height, math.ceil(bottom))
    if left >= right or top >= bottom:
        raise ToolError(f"bbox_2d={value} holds nothing of the image, which is {width}x{height}")
    return left, top, right, bottom


def _crop(
    image: Image.Image, box: tuple[int, int, int, int], max_side: int
) -> tuple[Image.Image, str]:
    """Return the crop, no side longer than ``max_side`` pixels, and its ``data:`` URL."""
    crop = image.crop(box).convert("RGB")
    crop.thumbnail((max_side, max_side))
    data = io.BytesIO()
    crop.save(data, format="PNG")
    return crop, "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _read(source: object, settings: ImageSettings) -> Image.Image:
    """Read an image of the task.

    Raises:
        ToolError: it is too large, cannot be read, or is nowhere to be found.
    """
    try:
        data = _bytes(source, settings)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        # The size is in the file's head: a huge image is refused before it is decoded.
        if image.width * image.height > settings.max_pixels:
            raise ToolError(
                f"an image is {image.width}x{image.height}, more than"
                f" image.max_pixels={settings.max_pixels}"
            )
        image.load()
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
        binascii.Error,
    ) as error:
        raise ToolError(
            f"extra_fields.images: {str(source)[:60]!r} cannot be read: {error}"
        ) from error
    return image


def _bytes(source: object, settings: ImageSettings) -> bytes:
    """Return the contents of a ``data:`` URL, or of a file below ``image.root``."""
    if isinstance(source, str) and source.startswith("data:image/"):
        return base64.b64decode(source.partition(",")[2], validate=True)
    if isinstance(source, str) and settings.root is not None:
        path = resolve_file(Path(settings.root).resolve(), source)
        if path is not None:
            return read_regular_file(path, _MAX_BYTES)
    raise ToolError(
        f"extra_fields.images: {str(source)[:60]!r} is neither a data: URL nor a file below"
        " image.root"
    )
