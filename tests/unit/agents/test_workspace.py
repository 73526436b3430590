"""What a runner prints is taken apart entry by entry, whoever wrote it."""

import base64
import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.agents.command.agent import read_verdict
from jax_agent_rl.agents.command.runner import is_inner_link, write_tree
from jax_agent_rl.agents.command.workspace import (
    Entry,
    JobResult,
    WorkspaceLimits,
    file_entries,
    pack_tree,
    read_result,
)

LIMITS = WorkspaceLimits(max_bytes=100_000, max_entries=100)
TOKEN = "0123"


def read(header, contents=b"", *, noise="", encoded=None):
    encoded = base64.b64encode(contents).decode() if encoded is None else encoded
    line = header if isinstance(header, str) else json.dumps(header)
    printed = f"{noise}{TOKEN}{line}\n{encoded}\n"
    return read_result(
        printed, TOKEN, stopped="stopped", stderr="", limits=LIMITS, path_inside="/app"
    )


def test_a_working_folder_comes_back_as_it_was():
    entries = [
        ["folder", "ü", 0o750],
        ["file", "ü/ü.txt", 0o644, 2],
        ["link", "ü/link", "../b"],
        ["file", "b", 0o700, 0],
        ["file", "\udcff", 0o600, 1],
        ["link", "absolute", "/app/b"],
    ]
    result = read({"exit_code": 0, "stdout": "out", "entries": entries}, b"abc", noise="noise")
    assert result.exit_code == 0
    assert result.stdout == "out"
    assert result.pack_problem is None
    assert result.workspace == (
        Entry(kind="folder", name="ü", mode=0o750),
        Entry(kind="file", name="ü/ü.txt", mode=0o644, data=b"ab"),
        Entry(kind="link", name="ü/link", target="../b"),
        Entry(kind="file", name="b", mode=0o700),
        Entry(kind="file", name="\udcff", mode=0o600, data=b"c"),
        Entry(kind="link", name="absolute", target="/app/b"),
    )


BAD_NAMES = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "a/../b",
    "../x",
    "a//b",
    "a/",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\x7f",
]
BAD_NAMES += ["n" * 256, "a/" * 64 + "a", "/".join(["n" * 200] * 11), "\udcc3\udcbc", "\ud800"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_name_that_leads_elsewhere_is_refused(kind, name):
    tail = {"folder": [0o755], "file": [0o644, 0], "link": ["b"]}[kind]
    result = read({"entries": [[kind, name, *tail]]})
    assert result.workspace is None
    assert result.pack_problem


@pytest.mark.parametrize(
    "entries",
    [
        [["file", "a", 0o644, 1], ["file", "a", 0o644, 1]],
        [["folder", "a", 0o755], ["link", "a", "b"]],
        [["link", "a", "."], ["file", "a/b", 0o644, 0]],
        [["file", "a", 0o644, 0], ["file", "a/b", 0o644, 0]],
        [["file", "no/such/folder", 0o644, 0]],
        [["file", "a", 0o4755, 0]],
        [["folder", "a", 0o1777]],
        [["file", "a", -1, 0]],
        [["file", "a", 0o644, -1]],
        [["file", "a", 0o644, 3]],
        [["file", "a", 0o644, 1]],
        [["file", "a", 0o644, 1 << 62]],
        [["file", "a", 0o644, 1.0]],
        [["file", "a", 0o644]],
        [["device", "a", 0o644, 0]],
        [["link", "a", "/etc/passwd"]],
        [["link", "a", "/app/../etc"]],
        [["link", "a", "/apple"]],
        [["link", "a", "../tests"]],
        [["link", "a", "here/../../tests"]],
        [["link", "a", ""]],
        [["link", "a", 1]],
        [["folder", f"{number}", 0o755] for number in range(101)],
        [["folder", f"{number:0200}", 0o755] for number in range(100)] + [["file", "a", 0o644, 2]],
        [[]],
        [["file"]],
    ],
)
def test_an_entry_that_is_none_is_refused(entries):
    result = read({"entries": entries}, b"ab")
    assert result.workspace is None
    assert result.pack_problem


def test_all_files_together_are_bounded():
    size = LIMITS.max_bytes // 2 - 600
    entries = [["file", "a", 0o644, size], ["file", "b", 0o644, size]]
    assert read({"entries": entries}, bytes(2 * size)).workspace is not None
    entries = [["file", "a", 0o644, size], ["file", "b", 0o644, size + 200]]
    assert (
        "more than 100000 bytes" in read({"entries": entries}, bytes(2 * size + 200)).pack_problem
    )


@pytest.mark.parametrize(
    ("header", "encoded"),
    [
        ("", ""),
        ("{", ""),
        ("[" * 100_000, ""),
        ("1" * 5000, ""),
        ("null", ""),
        ('{"exit_code": 1e9}', ""),
        ('{"exit_code": 99999}', ""),
        ('{"exit_code": true}', ""),
        ('{"stdout": 5}', ""),
        ('{"stdout": "%s"}' % ("x" * 20_000), ""),
        ('{"file": "%s"}' % ("1" * 5000), ""),
        ('{"unknown": 1}', ""),
        ('{"entries": {}}', ""),
        ('{"entries": [1]}', ""),
        ("x" * (5 << 20), ""),
    ],
    ids=lambda value: value[:30],
)
def test_a_result_that_is_none_stopped_the_run(header, encoded):
    result = read(header, encoded=encoded)
    assert result.stopped
    assert result.exit_code is None
    assert result.workspace is None


def test_contents_that_are_no_base64_are_refused():
    result = read({"exit_code": 0, "entries": [["file", "a", 0o644, 1]]}, encoded="%%%")
    assert result.workspace is None
    assert result.pack_problem
    assert result.exit_code == 0


def test_without_the_token_nothing_printed_is_a_result():
    printed = json.dumps({"exit_code": 0, "entries": []}) + "\n\n"
    result = read_result(
        printed, TOKEN, stopped="cut", stderr="why", limits=LIMITS, path_inside="/app"
    )
    assert result == JobResult(stopped="cut", stderr="why")


def test_sizes_in_the_header_allocate_nothing():
    entries = [["file", f"f{number}", 0o644, 1 << 30] for number in range(100)]
    tracemalloc.start()
    try:
        assert read({"entries": entries}).workspace is None
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["file", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(json_values, st.binary(max_size=20))
def test_any_entries_are_read_or_refused(entries, contents):
    result = read({"exit_code": 0, "entries": entries}, contents)
    assert result.workspace is None or all(entry.name for entry in result.workspace)


names = st.sampled_from(["a", "b", "c"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
targets = st.lists(st.sampled_from(["a", "b", "..", ".", ""]), min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(paths, st.one_of(targets, st.none()), max_size=6))
def test_links_that_are_kept_never_lead_out(tmp_path_factory, tree):
    """Decided by the kernel: every path through such links stays below the folder."""
    top = tmp_path_factory.mktemp("top")
    root = top / "x" / "app"
    root.mkdir(parents=True)
    entries = []
    folders = {""}
    for name, target in sorted(tree.items()):
        if name.rpartition("/")[0] not in folders:
            continue
        if target is None:
            folders.add(name)
            entries.append(Entry(kind="folder", name=name))
        elif target and is_inner_link(name, target, str(root)):
            entries.append(Entry(kind="link", name=name, target=target))
    packed = top / "tree"
    packed.write_bytes(pack_tree(entries))
    write_tree(packed, root)
    for entry in entries:
        for suffix in ("", "/a", "/b/a"):
            try:
                real_path = os.path.realpath(root / (entry.name + suffix), strict=True)
            except OSError:  # it leads to nothing, or in circles
                continue
            assert real_path == str(root) or real_path.startswith(f"{root}/")


@given(st.dictionaries(paths, st.binary(max_size=20), max_size=5))
def test_a_tree_is_written_as_it_was_packed(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("tree")
    try:
        entries = file_entries(files, folders=("empty/inside",))
    except ValueError:  # one of them is a file and a folder
        return
    (folder / "packed").write_bytes(pack_tree(entries))
    (folder / "out").mkdir()
    write_tree(folder / "packed", folder / "out")
    written_files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "packed":
            written_files[str(path.relative_to(folder / "out"))] = path.read_bytes()
    assert written_files == files
    assert (folder / "out" / "empty" / "inside").is_dir()


def test_files_replace_what_is_there_and_follow_no_link(tmp_path):
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "outside")
    (tmp_path / "packed").write_bytes(pack_tree(file_entries({"a": b"new"})))
    write_tree(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "new"
    assert not (tmp_path / "out" / "a").is_symlink()
    assert (tmp_path / "outside").read_text() == "kept"


# --- the reward file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1.0), ("0.5\n", 0.5), (" -2e-1 ", -0.2), (".5", 0.5), ("1.", 1.0), ("+1", 1.0)],
)
def test_a_number_in_the_reward_file_is_the_reward(text, reward):
    assert read_verdict(JobResult(exit_code=0, file=text)) == (reward, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan",
        "inf",
        "-Infinity",
        "1e999",
        "1_000",
        "１",
        "0x1",
        "1 1",
        "reward: 1",
        "true",
        "1\0",
        "9" * 4000,
    ],
)
def test_anything_else_in_the_reward_file_is_no_reward_and_is_named(text):
    reward, note = read_verdict(JobResult(exit_code=0, file=text))
    assert reward == 0.0
    assert "not a finite number" in note


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (JobResult(exit_code=0), 1.0),
        (JobResult(exit_code=3), 0.0),
        (JobResult(exit_code=None, file="1"), 0.0),
        (JobResult(exit_code=0, file_problem="a link"), 0.0),
        (JobResult(stopped="memory"), 0.0),
        (JobResult(stopped="memory", exit_code=0, file="1"), 0.0),
    ],
)
def test_without_a_reward_file_the_exit_status_decides(result, reward):
    assert read_verdict(result)[0] == reward
