"""Names that no file can have are answered like those that none has: no crash, and no path of this
machine.
"""

import pytest

from jax_agent_rl.tool_server.plugins.base import Failure
from tests.capabilities import needs_bwrap
from tests.tool_serving import agent, text_of

IMPOSSIBLE = [
    "n" * 300 + ".html",
    "d/" * 2100 + "a.html",
    "a\0b.html",
    "a.html/b.html",
    "circle.html",
    "locked/a.html",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.html").write_text(
        "<a href='%00'>x</a><a href='http://['>y</a><a href='" + "n" * 300 + "'>z</a>"
    )
    (tmp_path / "circle.html").symlink_to("circle.html")
    return tmp_path


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_a_page_that_cannot_be_is_not_there(folder, name):
    async with agent("tools=[page]", f"page.root={folder}") as act:
        reply = await act(f"<page>open {name}</page>")
        assert reply.error is Failure.TOOL
        assert "there is no page" in text_of(reply)
        assert str(folder) not in text_of(reply)


async def test_links_that_lead_nowhere_are_shown_and_cannot_be_followed(folder):
    async with agent("tools=[page]", f"page.root={folder}") as act:
        assert "x [1]" in text_of(await act("<page>open a.html</page>")).replace("\n", " ")
        for number in (1, 2, 3):
            assert (await act(f"<page>click {number}</page>")).error is Failure.TOOL


async def test_a_page_that_cannot_be_read_is_named_as_the_model_named_it(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("jax_agent_rl.tool_server.plugins.files.render_page", refuse)
    async with agent("tools=[page]", f"page.root={folder}") as act:
        reply = await act("<page>open a.html</page>")
        assert "'a.html' cannot be read: Permission denied" in text_of(reply)
        assert str(folder) not in text_of(reply)


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_an_image_that_cannot_be_is_not_there(folder, name):
    call = '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [0, 0, 1, 1]}}</tool_call>'
    async with agent("tools=[image_zoom]", f"image.root={folder}", images=[name]) as act:
        reply = await act(call)
        assert reply.error is Failure.TOOL
        assert "nor a file below image.root" in text_of(reply)
        assert str(folder) not in text_of(reply)


@needs_bwrap
@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_a_database_that_cannot_be_is_not_there(folder, name):
    async with agent("tools=[sql]", f"sql.databases={folder}", db_id=name) as act:
        reply = await act("<sql>SELECT 1</sql>")
        assert reply.error is Failure.TOOL
        assert "there is no such database" in text_of(reply)
        assert str(folder) not in text_of(reply)


@needs_bwrap
@pytest.mark.parametrize(
    ("tool", "action"),
    [
        ("python", "<python>print('a\0b')</python>"),
        ("python", "<python>print(input())</python>```input\na\0b\n```"),
        ("stateful_python", "<python>print('a\0b')</python>"),
        ("bash", "<bash>echo a\0b</bash>"),
        ("judge", "<python>print('a\0b')</python>"),
        ("sql", "<sql>SELECT 'a\0b'</sql>"),
    ],
)
async def test_a_nul_byte_is_no_crash(tool, action, tmp_path):
    (tmp_path / "db.sqlite").write_bytes(b"")
    fields = {"db_id": "db", "tests": {"inputs": ["a\0b"], "outputs": ["a\0b"]}}
    settings = [f"sql.databases={tmp_path}"] if tool == "sql" else []
    async with agent(f"tools=[{tool}]", *settings, **fields) as act:
        assert (await act(action)).error is None
