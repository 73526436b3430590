"""The server's own tools, as agents use them: through the service, in a real sandbox."""

import base64
import io
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.plugins import interpreters
from jax_agent_rl.tool_server.plugins.base import Failure
from tests.capabilities import needs_bwrap
from tests.messages import raises
from tests.ports import free_port
from tests.tool_serving import agent, text_of

# --- python ---------------------------------------------------------------------------------------


@needs_bwrap
async def test_python_runs_fresh_each_time_with_input_and_errors_shown():
    async with agent("tools=[python]", stdin="from the task") as act:
        assert (
            text_of(await act("<python>x = 6 * 7; print(x)</python>"))
            == "\n<result>\n42\n</result>\n"
        )
        reply = await act("<python>print(x)</python>")
        assert "NameError: name 'x' is not defined" in text_of(reply)
        assert 'File "/tmp/main.py", line 1' in text_of(reply)
        assert reply.observation["metrics"] == {"failed": 1.0}
        assert reply.valid
        assert not reply.open
        assert (await act("```python print(3)```")).observation == "\n```result\n3\n```\n", (
            "plain text alone"
        )
        reply = await act(
            '<tool_call>{"name": "python", "arguments": {"code": "print(5)"}}</tool_call>'
        )
        assert "\n5\n" in text_of(reply)
        assert "from the task" in text_of(await act("<python>print(input())</python>"))
        assert "mine" in text_of(await act("<python>print(input())</python>\n```input\nmine\n```"))
        assert "(exit code 3)" in text_of(await act("<python>raise SystemExit(3)</python>"))
    async with agent("tools=[python]", "limits.wall_seconds=1") as act:
        assert "ended: it ran for more than 1 second" in text_of(
            await act("<python>while True: pass</python>")
        )


@needs_bwrap
async def test_stateful_python_remembers_and_shows_last_values():
    async with agent("tools=[stateful_python]") as act:
        assert (
            text_of(await act("<python>x = [1]\ndef f(): return len(x)</python>"))
            == "\n<result>\n\n</result>\n"
        )
        assert "3" in text_of(await act("<python>x.append(2); x.append(3)\nf()</python>"))
        reply = await act("<python>print('before')\n1 / 0</python>")
        assert "before" in text_of(reply)
        assert 'File "<action 3>", line 2, in <module>\n    1 / 0' in text_of(reply)
        assert "SyntaxError" in text_of(await act("<python>def</python>"))
        assert "[1, 2, 3]" in text_of(await act("<python>x</python>")), (
            "errors keep what was defined"
        )
        assert "EOFError" in text_of(await act("<python>input()</python>"))
        assert "hello" in text_of(
            await act("<python>import subprocess; subprocess.run(['echo', 'hello'])</python>")
        )
        pickled = (
            "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)"
        )
        assert "\nA\n" in text_of(await act(f"<python>{pickled}</python>"))


@needs_bwrap
@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import os; os._exit(1)", ""),
        ("while True: pass", "ended: it ran for more than 3 seconds"),
        ("while True: print('x' * 999)", "ended: it wrote more than 262144 bytes"),
        ("import os; os.close(1)", ""),
        ("import os; os.kill(os.getpid(), 9)", ""),
        ("import sys; sys.stdout = None; import os; os.closerange(0, 50)", ""),
    ],
)
async def test_a_session_that_ends_reports_it_and_restarts(code, note):
    limits = ["limits.wall_seconds=3"] if "3 seconds" in note else []
    async with agent("tools=[stateful_python]", *limits) as act:
        await act("<python>x = 1</python>")
        reply = await act(f"<python>{code}</python>")
        assert note in text_of(reply)
        assert "(the session ended; the next action starts a new one" in text_of(reply)
        assert "NameError" in text_of(await act("<python>x</python>"))


@needs_bwrap
@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = 7",
        "import os\nif os.fork() == 0: 1 / 0",
    ],
)
async def test_a_session_survives_what_code_does_to_its_streams_and_forks(code):
    async with agent("tools=[stateful_python]") as act:
        await act("<python>x = 41</python>")
        await act(f"<python>{code}</python>")
        assert "42" in text_of(await act("<python>import os; os.system(f'echo {x + 1}')</python>"))


# --- bash -----------------------------------------------------------------------------------------


@needs_bwrap
async def test_bash_keeps_its_state_and_survives_broken_commands():
    async with agent("tools=[bash]") as act:
        await act("<bash>mkdir d; cd d; name=world</bash>")
        assert "/tmp/d\nhello world" in text_of(await act("```bash\npwd\necho hello $name\n```"))
        for broken in (
            "echo 'unclosed",
            "if",
            "cat <<X",
            "false",
            "no-such-command",
            "cat; read line",
        ):
            await act(f"<bash>{broken}</bash>")
        assert "/tmp/d" in text_of(await act("<bash>pwd</bash>"))
        assert "no-such-command: command not found" in text_of(
            await act("<bash>no-such-command</bash>")
        )
        assert "the session ended" in text_of(await act("<bash>exit 3</bash>"))
        assert (
            text_of(await act("<bash>pwd; echo [$name]</bash>"))
            == "\n<result>\n/tmp\n[]\n</result>\n"
        )


# --- judge ----------------------------------------------------------------------------------------

ADDS = "<python>a, b = map(int, input().split())\nprint(a + b)</python>"


@needs_bwrap
async def test_the_judge_rewards_the_share_of_tests_passed():
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    async with agent("tools=[judge]") as act:
        reply = await act(ADDS, public_tests=tests)
        assert (reply.done, reply.observation["reward"]) == (True, 1.0)
        assert reply.observation["metrics"] == {"tests_passed": 2, "tests": 2}
        reply = await act(ADDS.replace("a + b", "3"), public_tests=json.dumps(tests))
        assert (reply.done, reply.observation["reward"]) == (False, 0.5)
        assert "1 of 2 tests passed.\nTest 2 failed.\nInput: 3 4\n\nExpected: 7\nGot: 3" in text_of(
            reply
        )


@needs_bwrap
async def test_the_judge_takes_asserts_and_cannot_be_skipped_by_exiting_early():
    async with agent("tools=[judge]") as act:
        source = "<python>def add(a, b): return a + b</python>"
        asserts = ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]
        reply = await act(source, tests=asserts)
        assert reply.observation["reward"] == 0.5
        assert "AssertionError" in text_of(reply)
        assert (await act("<python>raise SystemExit(1)</python>", tests=asserts)).observation[
            "reward"
        ] == 0.0
        assert (await act("<python>import sys; sys.exit(0)</python>", tests=asserts)).observation[
            "reward"
        ] == 0.0


@needs_bwrap
@pytest.mark.parametrize("tests", [None, [], "{", {"inputs": ["a"], "outputs": []}, [1], 5])
async def test_a_task_without_proper_tests_is_an_error_not_a_reward(tests):
    async with agent("tools=[judge]") as act:
        reply = await act(ADDS, public_tests=tests)
        assert reply.error is Failure.TOOL
        assert "public_tests" in text_of(reply)


@needs_bwrap
async def test_tests_that_a_silent_program_passes_are_an_error():
    async with agent("tools=[judge]") as act:
        reply = await act(ADDS, public_tests={"inputs": ["a", "b"], "outputs": ["", "\n"]})
        assert reply.error is Failure.TOOL
        assert "print nothing" in text_of(reply)


# --- sql ------------------------------------------------------------------------------------------


@pytest.fixture
def databases(tmp_path):
    with sqlite3.connect(tmp_path / "shop.sqlite") as connection:
        connection.execute("CREATE TABLE item (name TEXT, price REAL)")
        connection.executemany(
            "INSERT INTO item VALUES (?, ?)", [("pen", 1.5), ("ink", None)] + [("x", 0)] * 60
        )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "other.sqlite").write_bytes((tmp_path / "shop.sqlite").read_bytes())
    (tmp_path.parent / "outside.sqlite").write_bytes(b"")
    return tmp_path


@needs_bwrap
async def test_sql_answers_with_rows_and_turns_left_and_the_solution_ends(databases):
    task = {"db_id": "shop", "turns_left": 2}
    async with agent("tools=[sql]", f"sql.databases={databases}", "sql.max_rows=3", **task) as act:
        text = text_of(await act("<sql>SELECT * FROM item LIMIT 2</sql>"))
        assert (
            text == "\n\n<observation>name | price\npen | 1.5\nink | NULL\n"
            "<reminder>You have 2 turns left to complete the task.</reminder></observation>\n\n"
        )
        assert "(more rows; the first 3 are shown)" in text_of(
            await act("<sql>SELECT * FROM item</sql>")
        )
        assert "(no rows)" in text_of(await act("<sql>SELECT * FROM item WHERE 0</sql>"))
        refused = await act("<sql>SELECT * FROM nope</sql>")
        assert "Error: no such table: nope" in text_of(refused)
        assert refused.observation["metrics"] == {"failed": 1.0}
        assert "pen" in text_of(await act("<sql>SELECT name FROM item</sql>", db_id="other"))
        reply = await act("<solution>SELECT 1</solution>")
        assert (reply.done, reply.valid, reply.observation) == (True, False, "")
        assert (await act("<sql>SELECT\0 1</sql>")).error is None


@needs_bwrap
@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("DELETE FROM item", "attempt to write a readonly database"),
        ("ATTACH '/tmp/evil.sqlite' AS e; SELECT 1", "one statement"),
        ("SELECT load_extension('x')", "not authorized"),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n",
            "ended: it ran for more",
        ),
        (
            "SELECT hex(zeroblob(900000000))",
            "Error|ended: it",
        ),  # no memory, or out of time before that shows
    ],
)
async def test_hostile_queries_are_stopped(databases, query, words):
    content = (databases / "shop.sqlite").read_bytes()
    async with agent("tools=[sql]", f"sql.databases={databases}", db_id="shop") as act:
        assert re.search(words, text_of(await act(f"<sql>{query}</sql>")))
    assert (databases / "shop.sqlite").read_bytes() == content


@needs_bwrap
@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "../outside",
        "../outside.sqlite",
        "/etc/passwd",
        "",
        None,
        5,
        "a\0b",
        "x" * 5000,
        "\ud800",
    ],
    ids=ascii,
)
async def test_only_databases_of_the_folder_can_be_named(databases, name):
    async with agent("tools=[sql]", f"sql.databases={databases}") as act:
        assert (await act("<sql>SELECT 1</sql>", db_id=name)).error is Failure.TOOL


# --- pages ----------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    root = tmp_path / "site"
    (root / "guide").mkdir(parents=True)
    (root / "index.html").write_text(
        "<title>T</title><script>evil()</script><h1>Home</h1><a href='guide/a.html'>The"
        " <b>guide</b></a><a href='https://example.org/'>away</a><a href='../secret.txt'>up</a>"
    )
    (root / "guide" / "a.html").write_text(
        "<p>Guide</p><a href='../index.html#top'>home</a>" + "<p>word</p>" * 100
    )
    (root / "note.md").write_text("# Note")
    (root / "odd.html").write_text(
        "<a href='a%00b'>a</a><a href='http://['>b</a><a href='" + "x" * 9999 + "'>c</a>Odd"
    )
    (root / "data.bin").write_text("binary")
    (tmp_path / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    return root


async def test_pages_are_opened_clicked_searched_and_gone_back_from(site):
    async with agent(
        "tools=[page]", f"page.root={site}", "page.page_chars=100", page="index.html"
    ) as act:
        text = text_of(await act("<page>open index.html</page>"))
        assert "Home" in text and "[1]" in text and "evil" not in text
        assert "[guide/a.html: characters 0 to 100 of" in text_of(await act("<page>click 1</page>"))
        assert "characters 100 to 200" in text_of(await act("<page>next</page>"))
        assert "Guide" in text_of(await act("<page>find guide</page>"))
        assert "Home" in text_of(await act("<page>click 1</page>"))
        assert "guide/a.html" in text_of(await act("<page>back</page>"))
        assert "# Note" in text_of(await act("<page>open note.md</page>"))
        assert "Odd" in text_of(await act("<page>open odd.html</page>"))


@pytest.mark.parametrize(
    "command",
    [
        "open ../secret.txt",
        "open link.txt",
        "open /etc/passwd",
        "open data.bin",
        "open nope.html",
        "open guide",
    ]
    + [
        "open a\0b.html",
        "open " + "x" * 5000 + ".html",
        "open \ud800.txt",
        "click " + "9" * 5000,
        "find \0",
    ]
    + [
        "open https://example.org/",
        "click 2",
        "click 3",
        "click 9",
        "click x",
        "find absent",
        "find",
        "dance",
        "",
    ],
)
async def test_nothing_outside_the_folder_can_be_opened(site, command):
    async with agent("tools=[page]", f"page.root={site}") as act:
        await act("<page>open index.html</page>")
        reply = await act(f"<page>{command}</page>")
        assert reply.error is Failure.TOOL
        assert "secret" not in text_of(reply).replace("secret.txt", "")


# --- images ---------------------------------------------------------------------------------------


def data_url(image):
    data = io.BytesIO()
    image.save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def decoded(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def zoom(*box, target=1):
    arguments = {"bbox_2d": list(box), "target_image": target}
    return f"<tool_call>{json.dumps({'name': 'zoom_in', 'arguments': arguments})}</tool_call>"


@pytest.fixture
def quarters():
    """40 x 20; its right half is red."""
    image = Image.new("RGB", (40, 20), "blue")
    image.paste("red", (20, 0, 40, 20))
    return image


async def test_zooming_returns_the_crop_and_can_go_on_from_it(quarters):
    async with agent("tools=[image_zoom]", images=[data_url(quarters)]) as act:
        reply = await act(zoom(10, 0, 30, 20))
        (url,) = reply.observation["image"]
        assert decoded(url).size == (20, 20)
        assert "Image Size: 20x20" in text_of(reply)
        assert [decoded(url).getpixel((x, 0)) for x in (9, 10)] == [(0, 0, 255), (255, 0, 0)]
        (url,) = (await act(zoom(0.5, 0, 1, 1, target=2))).observation["image"]
        assert decoded(url).size == (10, 20)
        assert decoded(url).getpixel((0, 0)) == (255, 0, 0)
        assert decoded((await act(zoom(-5, -5, 999, 999))).observation["image"][0]).size == (40, 20)


async def test_large_crops_are_scaled_down(quarters):
    async with agent("tools=[image_zoom]", "image.max_side=10", images=[data_url(quarters)]) as act:
        assert decoded((await act(zoom(0, 0, 40, 20))).observation["image"][0]).size == (10, 5)


@pytest.mark.parametrize(
    "action",
    [
        zoom(5, 5, 5, 9),
        zoom(9, 9, 1, 1),
        zoom(1, 2, 3),
        zoom("a", 0, 1, 1),
        zoom(0, 0, 1, 1, target=2),
    ]
    + [zoom(0, 0, 1, 1, target="one"), zoom(50, 0, 60, 10), zoom(0, 0, 1, True)]
    + [zoom(0, 10**400, 1, 10**401)],
)
async def test_boxes_that_make_no_sense_are_explained(quarters, action):
    async with agent("tools=[image_zoom]", images=[data_url(quarters)]) as act:
        assert (await act(action)).error is Failure.TOOL


async def test_numbers_without_an_end_make_no_call(quarters):
    async with agent("tools=[image_zoom]", images=[data_url(quarters)]) as act:
        assert (await act(zoom(0, 0, 1, float("inf")))).error is Failure.INVALID


@pytest.mark.parametrize(
    "images",
    [
        None,
        [],
        ["data:image/png;base64,AAAA"],
        ["data:image/png;base64,%"],
        [1],
        ["/etc/passwd"],
        ["a\0b"],
    ],
)
async def test_images_that_cannot_be_read_are_explained(images):
    async with agent("tools=[image_zoom]") as act:
        reply = await act(zoom(0, 0, 1, 1), images=images)
        assert reply.error is Failure.TOOL
        assert "extra_fields.images" in text_of(reply)


async def test_files_are_read_below_the_root_only_and_bombs_refused(quarters, tmp_path):
    (tmp_path / "root").mkdir()
    quarters.save(tmp_path / "root" / "q.png")
    quarters.save(tmp_path / "outside.png")
    async with agent("tools=[image_zoom]", f"image.root={tmp_path / 'root'}") as act:
        for source in ("../outside.png", "a\0b.png", "x" * 5000, "\ud800"):
            assert (await act(zoom(0, 0, 1, 1), images=[source])).error is Failure.TOOL
        assert (await act(zoom(0, 0, 1, 1), images=["q.png"])).error is None
    async with agent("tools=[image_zoom]", "image.max_pixels=799") as act:
        reply = await act(zoom(0, 0, 1, 1), images=[data_url(quarters)])
        assert "40x20, more than image.max_pixels=799" in text_of(reply)


# --- MCP ------------------------------------------------------------------------------------------

SERVER = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def fail() -> str:
    raise ValueError("inside")

@server.tool()
def die() -> str:
    os._exit(1)

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_tools_of_a_stdio_mcp_server_are_called_and_a_dead_one_comes_back(tmp_path):
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    command = json.dumps([sys.executable, str(program)])
    async with agent(
        "tools=[mcp]", f"mcp.servers={{test: {command}}}", "mcp.call_seconds=20", "step_seconds=50"
    ) as act:
        assert (
            text_of(await act(call("add", a=2, b=3))) == "\n<tool_response>\n5\n</tool_response>\n"
        )
        assert "5" in text_of(await act(call("test.add", a=2, b=3)))
        reply = await act(call("fail"))
        assert reply.observation["metrics"] == {"failed": 1.0}
        assert reply.valid
        assert (await act(call("add", a="two", b=3))).observation["metrics"] == {"failed": 1.0}
        reply = await act(call("nope"))
        assert reply.error is Failure.TOOL
        assert "available tools: ['add', 'die', 'fail']" in text_of(reply)
        assert (await act(call("die"))).error is Failure.TOOL
        assert "5" in text_of(await act(call("add", a=2, b=3)))


async def test_tools_of_an_http_mcp_server_are_called(tmp_path):
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, program, str(port)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        while "running on" not in process.stderr.readline():
            assert process.poll() is None
        async with agent(
            "tools=[mcp]", f"mcp.servers={{test: 'http://127.0.0.1:{port}/mcp'}}"
        ) as act:
            assert "5" in text_of(await act(call("add", a=2, b=3)))
    finally:
        process.kill()
        process.wait()


async def test_an_mcp_server_that_is_not_there_is_named_with_its_address():
    with raises(ConfigError, key=("test", "http://127.0.0.1:9/mcp"), value="cannot be reached"):
        async with agent("tools=[mcp]", "mcp.servers={test: 'http://127.0.0.1:9/mcp'}"):
            raise AssertionError("never reached")


def test_programs_that_run_inside_the_sandbox_need_no_package(tmp_path):
    """They run in an isolated interpreter without site packages."""
    isolated = [sys.executable, "-I", "-S", "-c"]
    folder = Path(__file__).parents[3] / "jax_agent_rl" / "tool_server"
    for program in ("plugins/kernel.py", "sandbox/guard.py", "sandbox/program_side.py"):
        check = f"import runpy; runpy.run_path({str(folder / program)!r}, run_name='checked')"
        subprocess.run([*isolated, check], check=True)
    sqlite3.connect(tmp_path / "database.sqlite").close()
    request = json.dumps({"query": "SELECT 1 AS one", "max_rows": 1})
    command = [*isolated, interpreters.query_program().decode()]
    ran = subprocess.run(command, input=request, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout == "one\n1\n", ran.stderr
