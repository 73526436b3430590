"""Images and videos in prompts, in every form that datasets have them in."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jax_agent_rl.data.dataset import open_dataset
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.media import MAX_FRAMES, read_media, text_message, without_sources
from jax_agent_rl.utils.packages import install_command
from tests.dataset_rows import load_rows
from tests.messages import raises

RED = (255, 0, 0)
BLUE = (0, 0, 255)


def png(color: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, format="PNG")
    return stream.getvalue()


def url(color: tuple[int, int, int]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(color)).decode()


def row(content: object, **columns: object) -> dict:
    return {"data_source": "x", "prompt": [{"role": "user", "content": content}], **columns}


def written(folder: Path, *rows: dict, parquet: bool = False) -> Path:
    """The rows in a file beside ``red.png`` and ``blue.png``."""
    (folder / "red.png").write_bytes(png(RED))
    (folder / "blue.png").write_bytes(png(BLUE))
    file = folder / ("rows.parquet" if parquet else "rows.jsonl")
    if parquet:
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


def shown(message: dict) -> list:
    """Texts, and colours of what stands between them."""
    items = {kind: iter(media) for kind, media in read_media([message]).items()}
    parts = []
    for part in message["content"]:
        if part["type"] == "text":
            parts.append(part["text"])
        elif part["type"] == "image":
            parts.append(next(items["image"]).getpixel((0, 0)))
        else:
            parts.append([tuple(frame[0, 0].tolist()) for frame in next(items["video"])])
    return parts


IN_PARTS = [
    {"type": "image", "image": "red.png"},
    {"type": "image", "image": url(RED)},
    {"type": "image_url", "image_url": {"url": url(RED)}},
    {"type": "image_url", "image_url": "red.png"},
    {"type": "input_image", "image_url": url(RED)},
    {"type": "image", "path": "red.png", "image": {"path": "red.png"}},
]


@pytest.mark.parametrize("part", IN_PARTS)
def test_a_part_shows_its_image_where_it_stands(tmp_path: Path, part: dict):
    content = [{"type": "text", "text": "is "}, part, {"type": "text", "text": " red?"}]
    ((message,),) = (each["prompt"] for each in load_rows(written(tmp_path, row(content))))
    assert shown(message) == ["is ", RED, " red?"]


@pytest.mark.parametrize(
    "item",
    [
        "red.png",
        "file://red.png",
        url(RED),
        {"path": "red.png"},
        {"image": "red.png"},
        {"type": "image", "image": url(RED)},
    ],
)
def test_placeholders_show_the_items_of_verls_column_in_order(tmp_path: Path, item: object):
    rows = load_rows(written(tmp_path, row("<image>and <image>?", images=[item, "blue.png"])))
    assert shown(rows[0]["prompt"][0]) == [RED, "and ", BLUE, "?"]
    assert "images" not in rows[0], "they are in the prompt now"


def test_an_image_is_the_same_as_bytes_and_as_a_data_url(tmp_path: Path):
    as_url = row("<image>and", images=[url(RED)])
    as_bytes = row("<image>and", images=[{"bytes": png(RED), "path": "gone.png"}])
    in_part = row(
        [{"type": "image_url", "image_url": {"url": url(RED)}}, {"type": "text", "text": "and"}]
    )
    rows = [
        load_rows(written(tmp_path, each, parquet=each is as_bytes))
        for each in (as_url, as_bytes, in_part)
    ]
    assert rows[0] == rows[1] == rows[2]


def test_a_data_url_that_is_no_base64_is_named_before_the_run(tmp_path: Path):
    with raises(DataError, key=("rows.jsonl, line 1", "images[0]")):
        load_rows(written(tmp_path, row("<image>", images=["data:image/png;base64,%%%"])))


def test_bytes_as_hugging_face_stores_them_in_parquet_are_read(tmp_path: Path):
    """Absent fields of the struct are null, and an image's path is the name that it once had."""
    first = row("<image>?", images=[{"bytes": png(RED), "path": "gone.png"}])
    second = row(
        "<image><image>",
        images=[{"bytes": None, "path": "blue.png"}, {"bytes": png(RED), "path": None}],
    )
    rows = open_dataset([written(tmp_path, first, second, parquet=True)])
    assert [shown(each["prompt"][0]) for each in rows] == [[RED, "?"], [BLUE, RED]]
    assert rows.modalities == {"image"}


def test_parts_in_parquet_have_nulls_for_the_fields_of_other_parts(tmp_path: Path):
    parts = [
        {"type": "text", "text": "a", "image": None},
        {"type": "image", "text": None, "image": {"bytes": png(BLUE), "path": None}},
    ]
    (only,) = load_rows(written(tmp_path, row(parts), parquet=True))
    assert shown(only["prompt"][0]) == ["a", BLUE]


def test_parts_without_a_source_show_the_columns_too(tmp_path: Path):
    content = [{"type": "image"}, {"type": "text", "text": "?"}, {"type": "video"}]
    (only,) = load_rows(
        written(tmp_path, row(content, images=["red.png"], videos=[["blue.png", "red.png"]]))
    )
    assert shown(only["prompt"][0]) == [RED, "?", [BLUE, RED]]


def test_a_video_is_a_list_of_frames_in_each_form(tmp_path: Path):
    frames = [{"type": "image", "image": "red.png"}, url(BLUE)]
    (from_list,) = load_rows(written(tmp_path, row("<video>", videos=[frames])))
    assert shown(from_list["prompt"][0]) == [[RED, BLUE]]
    (from_part,) = load_rows(
        written(tmp_path, row("<video>", videos=[{"type": "video", "video": frames}]))
    )
    assert shown(from_part["prompt"][0]) == [[RED, BLUE]]


def test_placeholders_of_a_kind_without_a_column_are_text(tmp_path: Path):
    plain = row("an <image> tag")
    pictured = row("<image>a <video> tag", images=["red.png"])
    first, second = load_rows(written(tmp_path, plain, pictured))
    assert first == plain
    assert shown(second["prompt"][0]) == [RED, "a <video> tag"]


def test_parts_of_text_alone_become_text(tmp_path: Path):
    (only,) = load_rows(
        written(tmp_path, row([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    )
    assert only["prompt"] == [{"role": "user", "content": "ab"}]


def test_images_are_opened_when_a_trajectory_begins_not_when_rows_are_loaded(tmp_path: Path):
    file = written(tmp_path, row("<image>", images=["broken.png"]))
    (tmp_path / "broken.png").write_bytes(b"no image")
    (only,) = load_rows(file)
    with raises(ValueError, key="broken.png", fix="PNG"):
        read_media(only["prompt"])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (row("<image>", images=["a.png", "b.png"]), {"value": ("images[0]", "no file")}),
        (row("<image><image>", images=["red.png"]), {"value": ("'prompt'", "2 of 'image'")}),
        (row("?", images=["red.png"]), {"value": ("'prompt'", "0 of 'image'")}),
        (
            row([{"type": "video"}]),
            {"value": ("'prompt'", "1 of 'video'"), "fix": "<video>"},
        ),
        (
            row("<image>", images="red.png"),
            {"value": ("'images'", "'red.png'"), "fix": "a list of images"},
        ),
        (
            row("<image>", images=[3]),
            {"value": ("images[0]", 3), "fix": ("a path", "a data: URL", "bytes")},
        ),
        (row("<image>", images=[{"bytes": None}]), {"value": "images[0]", "fix": "a path"}),
        (
            row("<image>", images=["http://x/a.png"]),
            {"value": ("images[0]", "'http://x/a.png'", "downloaded")},
        ),
        (
            row([{"type": "image_url", "image_url": {"url": "https://x"}}]),
            {"value": ("prompt[0].content[0]", "'https://x'")},
        ),
        (
            row("<video>", videos=[{"video": ["red.png"], "fps": 1}]),
            {"value": ("videos[0]", "['fps']")},
        ),
        (
            row("<video>", videos=[[]]),
            {"value": ("videos[0]", "got 0"), "fix": f"1 to {MAX_FRAMES} frames"},
        ),
        (row([{"type": "audio"}]), {"value": ("prompt[0]", "'content'")}),
        (
            row(["hi"]),
            {"value": ("prompt[0]", "'content'", "'hi'"), "fix": "an object with a 'type'"},
        ),
    ],
)
def test_what_cannot_be_shown_is_named_with_file_row_and_field(
    tmp_path: Path, bad: dict, named: dict
):
    file = written(tmp_path, row("fine"), bad)
    with raises(DataError, key=f"{file}, line 2", **named):
        load_rows(file)


def test_a_video_file_without_its_decoder_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(DataError, key="videos[0]", fix=install_command("video")):
        load_rows(written(tmp_path, row("<video>", videos=["clip.mp4"])))


def test_a_video_file_gives_two_frames_a_second(tmp_path: Path):
    """Eight frames a second, each of its own grey: frames 0, 4, 8, … are seen. Compression changes
    a grey a little.
    """
    av = pytest.importorskip("av")
    greys = [10 * number for number in range(20)]
    with av.open(str(tmp_path / "clip.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 8_000_000
        for grey in greys:
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), grey, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    (only,) = load_rows(written(tmp_path, row("<video>", videos=["clip.mp4"])))
    (video,) = read_media(only["prompt"])["video"]
    assert video.shape == (5, 48, 64, 3)
    np.testing.assert_allclose(video.mean((1, 2, 3)), greys[::4], atol=4)


def test_a_damaged_video_file_is_one_error(tmp_path: Path):
    pytest.importorskip("av")
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    (only,) = load_rows(written(tmp_path, row("<video>", videos=["clip.mp4"])))
    with raises(ValueError, value="video cannot be"):
        read_media(only["prompt"])


def test_a_video_of_too_many_pixels_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jax_agent_rl.utils.media.MAX_VIDEO_PIXELS", 4 * 3 * 2)
    two, three = (
        {"role": "user", "content": [{"type": "video", "video": [png(RED)] * n}]} for n in (2, 3)
    )
    assert len(read_media([two])["video"][0]) == 2
    with raises(ValueError, key="video", value=("768 frames", "24 pixels"), fix="shorten"):
        read_media([three])


def test_a_message_is_shown_to_people_as_text_and_to_templates_without_sources():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": b"x"},
        {"type": "text", "text": "b"},
    ]
    message = {"role": "user", "content": parts}
    assert text_message(message) == {"role": "user", "content": "ab", "media": ["image"]}
    assert without_sources(message)["content"] == [parts[0], {"type": "image"}, parts[2]]
    assert text_message({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}
