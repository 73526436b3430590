"""One form for images and videos, whatever a tool made of them."""

import base64
import http.server
import io
import threading

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile

from jax_agent_rl.utils.media import (
    FORMATS,
    as_frames,
    as_image,
    check_media,
    media_source,
    read_images,
    read_media,
)
from tests.messages import raises


def test_what_is_transparent_stands_on_white():
    clear = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert as_image(clear).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 8, 7])
    assert as_image(palette).getpixel((0, 0)) == (9, 8, 7)
    palette.info["transparency"] = 0
    assert as_image(palette).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "YCbCr", "I;16", "LA"])
def test_every_mode_becomes_rgb(mode: str):
    assert as_image(Image.new(mode, (3, 2))).mode == "RGB"


def test_a_photograph_is_turned_upright():
    """Orientation 6 of EXIF: the camera was held on its side."""
    photograph = Image.new("RGB", (3, 2))
    photograph.getexif()[0x0112] = 6
    assert as_image(photograph).size == (2, 3)


def test_arrays_are_pictures_too():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(np.asarray(as_image(pixels)), pixels)
    video = np.stack([pixels, pixels[::-1]])
    np.testing.assert_array_equal(as_frames(video), video)
    np.testing.assert_array_equal(as_frames([Image.fromarray(frame) for frame in video]), video)


@pytest.mark.parametrize(
    ("convert", "item", "named"),
    [
        (as_image, "cat.png", {"value": "str", "fix": "PIL image or an array"}),
        (
            as_image,
            np.zeros((2, 2), np.uint8),
            {"value": "uint8 [2, 2]", "fix": "uint8 [height, width, 3]"},
        ),
        (as_image, np.zeros((2, 2, 3)), {"value": "got float64"}),
        (as_image, Image.new("RGB", (0, 4)), {"value": "0 x 4"}),
        (as_frames, "clip.mp4", {"value": "str", "fix": "sequence of frames"}),
        (as_frames, [], {"value": "got 0"}),
        (
            as_frames,
            [Image.new("RGB", (2, 2)), Image.new("RGB", (2, 3))],
            {"value": 2, "fix": "one size"},
        ),
    ],
)
def test_what_is_no_picture_is_named(convert, item, named: dict):
    with raises(ValueError, **named):
        convert(item)


def test_the_wrong_one_of_several_is_counted_out():
    good = Image.new("RGB", (2, 2))
    check_media({"image": (good,), "video": ([good],)})
    with raises(ValueError, key="image 2 of 2", value="NoneType"):
        check_media({"image": (good, None)})


# --- files that come over HTTP --------------------------------------------------------------------


def encode_image(image: Image.Image, kind: str) -> str:
    stream = io.BytesIO()
    image.save(stream, format=kind)
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_the_listed_formats_are_read(kind: str):
    (image,) = read_images(
        [f"data:image/x;base64,{encode_image(Image.new('RGB', (4, 3), 'red'), kind)}"]
    )
    assert image.size == (4, 3) and image.mode == "RGB"


@pytest.mark.parametrize("kind", ["EPS", "PDF", "TIFF", "BMP", "ICO", "PPM"])
def test_files_of_other_formats_reach_no_reader(kind: str, monkeypatch):
    text = encode_image(Image.new("RGB", (4, 3)), kind)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", None)
    with raises(ValueError, fix=("PNG", "JPEG", "WEBP", "GIF")):
        read_images([text])


def test_bytes_and_text_of_a_file_are_the_same_image():
    text = encode_image(Image.effect_noise((4, 3), 90), "PNG")
    images = read_images([base64.b64decode(text), text, f"data:image/png;base64,{text}"])
    assert len({image.tobytes() for image in images}) == 1


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "image": "a.png"}, ("image", "a.png")),
        (
            {"type": "image", "image": {"bytes": b"x", "path": None}},
            ("image", {"bytes": b"x", "path": None}),
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
            ("image", "data:x"),
        ),
        ({"type": "image_url", "image_url": "data:x"}, ("image", "data:x")),
        ({"type": "input_image", "image_url": "data:x"}, ("image", "data:x")),
        ({"type": "video", "video": ["a.png"]}, ("video", ["a.png"])),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, ("video", "a.mp4")),
        ({"type": "image"}, ("image", None)),
        ({"type": "text", "text": "image"}, None),
        ({"type": "input_audio"}, None),
        ({}, None),
    ],
)
def test_a_part_in_each_notation_names_its_source(part: dict, expected: tuple | None):
    assert media_source(part) == expected


def test_small_files_with_many_pixels_are_refused_before_any_is_unpacked(monkeypatch):
    large_image = encode_image(Image.new("1", (4000, 4000)), "PNG")
    assert len(large_image) < 10_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    with raises(ValueError, value=("48000000 pixels", 32000000)):
        read_images([large_image] * 3)
    with raises(ValueError, value=("9000 x 2000 pixels", 16000000)):
        read_images([encode_image(Image.new("1", (9000, 2000)), "PNG")])
    with raises(ValueError, value=("65 images", 64)):
        read_images([""] * 65)


@pytest.mark.parametrize("text", ["no base64!", base64.b64encode(b"no image").decode(), ""])
def test_what_is_no_image_file_is_one_error(text: str):
    with pytest.raises(ValueError, match="image cannot be"):
        read_images([text])


def test_an_image_file_cut_short_is_one_error():
    file_bytes = base64.b64decode(encode_image(Image.effect_noise((64, 64), 90), "PNG"))
    with pytest.raises(ValueError, match="image cannot be"):
        read_images([base64.b64encode(file_bytes[: len(file_bytes) // 2]).decode()])


def test_a_playlist_in_place_of_a_video_is_not_followed():
    pytest.importorskip("av")
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/part.ts"
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n"
        with pytest.raises(ValueError, match="video cannot be"):
            read_media(
                [{"role": "user", "content": [{"type": "video", "video": playlist.encode()}]}]
            )
        server.shutdown()
    assert asked == []
