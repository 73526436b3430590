"""Images as they come over HTTP."""

import base64
import io

from PIL import Image


def data_url(size: tuple[int, int], colour: str = "red") -> str:
    """A ``data:`` URL of a PNG file of one colour."""
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
