"""YAML of others is read with bounds, wherever it comes from."""

import datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config import load
from jax_agent_rl.config.overrides_script import MAX_CHARACTERS as MAX_SCRIPT
from jax_agent_rl.config.overrides_script import read_overrides
from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.utils import hub
from jax_agent_rl.utils.plugins import read_entries
from jax_agent_rl.utils.yaml_text import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NODES,
    compose_yaml,
    load_yaml,
)

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 6)
)
"""A million values in 500 characters."""
REFUSED = {
    "aliases of aliases": LAUGHS,
    "aliases that are merged": LAUGHS + "z: {<<: [&m {a: *a5}, *m]}",
    "an alias of itself": "a: &a [*a]",
    "a key twice": "a: 1\nb: 2\na: 3",
    "a key twice, quoted": "{a: 1, 'a': 2}",
    "levels": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "values": "- x\n" * MAX_NODES,
    "characters": "a: " + "x" * MAX_CHARACTERS,
    "a long number": "a: " + "9" * 5000,
    "a number to the base 60": "a: 1" + ":10" * 1000,
    "no date": "a: 2020-13-45",
    "an object": "a: !!python/object/apply:os.system [ls]",
    "no YAML": "a: [",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_beyond_a_bound_is_an_error_of_yaml(kind):
    with pytest.raises(yaml.YAMLError):
        load_yaml(REFUSED[kind])


def test_aliases_merges_numbers_and_dates_are_read():
    text = "a: &a {b: 1e-5, c: 2020-01-02}\nd: {<<: *a, b: 2}\ne: [*a, *a]"
    expected = {"b": 1e-5, "c": datetime.date(2020, 1, 2)}
    assert load_yaml(text) == {"a": expected, "d": expected | {"b": 2}, "e": [expected, expected]}


KEYS = st.text("abc", min_size=1, max_size=3)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(TREES)
def test_what_is_written_as_yaml_is_read_back(tree):
    assert load_yaml(yaml.safe_dump(tree)) == tree


@given(st.text("ab&*[]{}:,-<!|> \n'\"#?%19e", max_size=60))
def test_any_text_is_a_value_or_an_error_of_yaml(text):
    for read in (load_yaml, compose_yaml):
        try:
            read(text)
        except yaml.YAMLError:
            pass


def read_card(path, monkeypatch):
    (path.parent / "README.md").write_text(f"---\n{path.read_text()}\n---\n# a dataset\n")
    monkeypatch.setattr(hub, "download_snapshot", lambda *_: path.parent)
    hub.dataset_files("owner/name", None, name="one", suffixes=(".parquet",))


READERS = {
    "a configuration": lambda path, _: load(path),
    "a base of a configuration": lambda path, _: load(
        write(path.parent / "c.yaml", f"base: {path.name}")
    ),
    "an override": lambda path, _: load(
        write(path.parent / "c.yaml", "{}"), [f"seed={path.read_text()}"]
    ),
    "settings of verl": lambda path, _: read_overrides(path),
    "overrides of verl": lambda path, _: read_overrides(
        write(path.parent / "run.sh", f"a.b='{path.read_text()}'")
    ),
    "tools, users, MCP servers": lambda path, _: read_entries(
        path, key="tools.config", name="tools"
    ),
    "a dataset card": read_card,
}


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", ["aliases of aliases", "an alias of itself", "a key twice", "levels", "no date"]
)
def test_every_reader_of_yaml_is_bounded(reader, kind, tmp_path, monkeypatch):
    path = write(tmp_path / "file.yaml", REFUSED[kind])
    with pytest.raises(JaxAgentRLError, match="valid YAML"):
        READERS[reader](path, monkeypatch)


DOUBLING = "a=xxxxxxxxxx\n" + "a=$a$a\n" * 40 + "m.n=$a"
DOUBLING_ARRAY = "a=(x)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 40 + 'm.n="${a[@]}"'


@pytest.mark.parametrize(
    "text", [DOUBLING, DOUBLING_ARRAY, "a=x\n" + "a+=$a\n" * 40, "#" * (MAX_SCRIPT + 1)]
)
def test_variables_of_a_script_that_hold_each_other_are_bounded(text, tmp_path):
    with pytest.raises(ConfigError, match="characters"):
        read_overrides(write(tmp_path / "run.sh", text))


def test_a_quote_that_is_never_closed_is_found_at_once(tmp_path):
    with pytest.raises(ConfigError, match="never closed"):
        read_overrides(write(tmp_path / "run.sh", '"' + "$(a)" * 1000))


def test_arithmetic_that_python_cannot_parse_stays_as_it_is(tmp_path):
    overrides = read_overrides(write(tmp_path / "run.sh", f"x.y=$(({'9*' * 20_000}9))"))
    assert overrides["x.y"].unresolved
