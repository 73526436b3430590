"""The report in a real browser: it opens, loads nothing, shows, filters, colours, and lets nothing
out of its texts.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jax_agent_rl.observe.report.command import write_report
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.utils.text import printable
from tests.report_runs import HOSTILE, decode, make_run, open_browser, step_line
from tests.trajectories import session, trajectory

WIDTHS = (390, 768, 1280, 1920)
CHECKS = Path(__file__).with_name("report_page_checks.js").read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Address of the report of a run with hostile texts."""
    run = make_run(tmp_path_factory.mktemp("report") / "run", hostile=True)
    return write_report(run, decode=decode).as_uri()


def show_ids(ids) -> str:
    return "".join(f"[{i}]" for i in ids)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


class Page:
    """The report in a tab of its own.

    Attributes:
        troubles: errors and messages of its scripts, and everything it asked the network for.
    """

    def __init__(self, browser, address: str, scheme: str = "light") -> None:
        self.tab = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        self.tab.set_default_timeout(10_000)
        self.troubles: list[str] = []
        self.tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.tab.on("console", lambda message: self.troubles.append(message.text))
        self.tab.on("request", lambda request: self.troubles.append(request.url))
        self.tab.goto(address)
        self.troubles.remove(address.partition("#")[0])

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_inner_texts()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def listed(self) -> list[str]:
        return self.texts(".row .id")

    def choose(self, label: str, value: str) -> None:
        self.tab.get_by_label(label, exact=True).select_option(value)


@pytest.fixture
def page(browser, report):
    page = Page(browser, report)
    yield page
    page.tab.close()
    assert page.troubles == []


def test_the_curves_are_drawn_first(page):
    titles = page.tab.locator(".card h2").all_text_contents()
    assert titles[0] == "Reward"
    assert "Entropynats" in titles
    assert titles[-1] == "own_metric"
    assert page.tab.locator(".card polyline").count() >= 5
    assert page.texts(".tile b")[0] == "3 of 5"


def test_pointing_at_a_step_shows_values_and_a_click_its_trajectories(page):
    picture = page.tab.locator(".card", has_text="Reward").first.locator("svg")
    box = picture.bounding_box()
    page.tab.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + 40)
    assert page.texts("#tip") == ["step 3"]
    page.tab.mouse.click(box["x"] + 0.98 * box["width"], box["y"] + 40)
    assert page.listed() == [f"train-3-0-{n}" for n in range(5)]


def test_pointing_at_a_step_of_a_long_run_shows_a_value_in_every_chart(browser, tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    for step in range(1, 2001):
        measurements = {
            "entropy": step * 7919 % 1009 / 1009,
            "loss": step * 6007 % 997 / 997,
            "kl": step * 523 % 499 / 499,
        }
        run_dir.add_metrics(step_line(step, **measurements))
    page = Page(browser, write_report(run_dir.path, decode=show_ids).as_uri())
    assert page.tab.locator("svg[aria-label='Tool errors'] rect").count() == 286
    box = page.tab.locator(".card", has_text="Reward").first.locator("svg").bounding_box()
    for place in (0.3, 0.5, 0.77):
        page.tab.mouse.move(box["x"] + place * box["width"], box["y"] + 40)
        values = page.texts(".pane > .charts .legend b")
        assert len(values) >= 10
        assert "–" not in values
    assert page.troubles == []


def test_the_timeline_has_both_rows_and_the_traced_trajectories(page):
    page.press("2")
    names = page.tab.locator("svg .name").all_text_contents()
    assert names == ["learner", "engines", "train-1-0-0", "train-1-0-1"]
    page.tab.locator("svg .name.link").first.click()
    assert page.texts(".bar h2") == ["train-1-0-0"]


@pytest.mark.parametrize(
    ("label", "value", "numbers"),
    [
        ("tool error", "timeout", [2, 7, 12]),
        ("tool error", "any", [2, 4, 7, 9, 12, 14]),
        ("ended with", "response_length", [3, 8, 13]),
        ("a turn stopped by", "eos", range(15)),
        ("split", "train", range(15)),
    ],
)
def test_filters_by_name(page, label, value, numbers):
    page.press("3")
    page.choose(label, value)
    assert page.listed() == [f"train-{1 + n // 5}-0-{n % 5}" for n in numbers]


def test_filters_by_number_and_text_hold_together_and_are_cleared(page):
    page.press("3")
    page.tab.get_by_label("least reward").fill("0.25")
    page.tab.get_by_label("first step").fill("2")
    assert page.listed() == ["train-2-0-0", "train-2-0-3", "train-3-0-0", "train-3-0-3"]
    page.tab.get_by_placeholder("text, id or group").fill("hello")
    assert page.listed() == ["train-2-0-0", "train-3-0-0"]
    page.tab.get_by_text("clear filters").click()
    assert page.texts(".status span") == ["15 of 15 trajectories"]


def test_best_and_worst_first(page):
    page.press("3")
    page.choose("order", "-reward")
    assert page.listed()[0] == "train-1-0-0"
    page.choose("order", "reward")
    assert page.listed()[0] == "train-1-0-2"


def test_keys_walk_through_trajectories_and_tokens(page):
    page.press("3", "j", "j", "k")
    assert page.texts(".bar h2") == ["train-1-0-1"]
    page.tab.locator(".toks").nth(1).focus()
    page.press("ArrowRight", "ArrowRight")
    tip = page.texts("#tip")[0]
    assert "<|im_end|>" in tip
    assert "log-prob" in tip
    assert "-1.000" in tip
    assert "p = 0.37" in tip


def test_pointing_at_a_token_shows_id_text_and_numbers(page):
    page.press("3")
    page.tab.locator(".toks").nth(1).locator("span").first.hover()
    lines = page.texts("#tip")[0].split("\n")
    assert lines[0] == "hello␣"
    assert {
        "id\t4",
        "position\t0",
        "learner's\t-1.500 (gap 0.5)",
        "advantage\t1.000",
        "version\t0",
    } <= set(lines)


def test_colours_say_what_the_mode_says(page):
    page.press("3")

    def colours() -> list[str]:
        spans = page.tab.locator(".turn:not(:first-of-type) .toks span")
        return spans.evaluate_all("all => all.map((one) => one.style.background)")

    seen = {}
    for mode in ("mask", "log-prob", "advantage", "version", "gap"):
        page.tab.get_by_role("button", name=mode, exact=True).click()
        seen[mode] = colours()
        assert page.tab.locator(".modes [aria-pressed=true]").inner_text() == mode
    assert len({tuple(c) for c in seen.values()}) == 5
    sampled = seen["mask"][0]
    inserted = seen["mask"][2]
    assert sampled != inserted
    assert seen["mask"] == [sampled, sampled, inserted, sampled, sampled]
    assert all(seen[mode][2] == "" for mode in ("log-prob", "advantage", "version", "gap"))


def test_a_gap_that_rounding_would_make_is_hardly_painted(browser, tmp_path: Path):
    run = make_run(tmp_path / "run")
    first, *other_lines = (run / "trajectories.jsonl").read_text().splitlines()
    near = json.loads(first) | {
        "rollout_logprobs": [-0.1234995, -0.7, 0.0, -1.0, -1.0],
        "old_logprobs": [-0.1235005, -0.7, 0.0, -1.0, -1.0],
    }
    (run / "trajectories.jsonl").write_text("\n".join([json.dumps(near), *other_lines]) + "\n")
    page = Page(browser, write_report(run, decode=decode).as_uri() + "#trajectory=train-1-0-0")
    page.tab.get_by_role("button", name="gap", exact=True).click()
    spans = page.tab.locator(".turn:not(:first-of-type) .toks span")
    painted = spans.evaluate_all("all => all.map((one) => one.style.background)")
    assert painted[0] == painted[1]
    assert "0%" in painted[0]
    spans.first.hover()
    assert "(gap 1.0e-6)" in page.texts("#tip")[0]
    assert page.troubles == []


def test_a_session_shows_which_segment_left_which_and_then_their_tokens(browser, tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.add_metrics(step_line(1))
    run_dir.add_trajectories(1, "train", [session()])
    page = Page(browser, write_report(run_dir.path, decode=show_ids).as_uri() + "#trajectory=g-0")
    first, second, third = page.texts(".session li")
    assert first == "segment 1 calls 1, 5 · 3 trained tokens (43 %)"
    assert second.endswith("leaves segment 1 after turn 1 (shared ids: 4)")
    assert third.endswith(
        "in the prompt (shared ids: 1): message 1 of 1 (user) has 'help' where the recorded one"
        " (user) has 'question'"
    )
    assert page.texts(".detail h3") == ["segment 1", "segment 2", "segment 3"]
    indents = page.tab.locator(".session li").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().left)"
    )
    assert indents[0] < indents[1] == indents[2]
    assert [text.strip() for text in page.texts(".toks")[:4]] == ["[1][3]", "[4][2]", "[7]", "[5]"]
    assert page.troubles == []


def test_the_legend_says_what_was_trained_on(browser, tmp_path: Path):
    run = make_run(tmp_path / "run")
    learning = trajectory([1], [4, 2, 7, 8, 5], mask=[1, 1, 0, 0, 1], group="learning")
    learning = replace(
        learning, turns=tuple(replace(turn, learn_appended=True) for turn in learning.turns)
    )
    token_values = {learning.trajectory_id: {"advantages": [0.5, 0.5, -1.0, 0.25, 0.5]}}
    RunDir(run).add_trajectories(1, "train", [learning], token_values=token_values)
    address = write_report(run, decode=decode).as_uri() + "#trajectory="
    sampled = "sampled by the policy ({}trained on)"
    inserted = "inserted: tool results, template"
    for name, legend in {
        "train-1-0-0": [sampled.format(""), inserted],
        "train-1-0-3": [sampled.format("not "), inserted],
        "learning-0": [sampled.format(""), inserted + " (trained on)"],
    }.items():
        page = Page(browser, address + name)
        assert page.texts(".scale span") == legend
        assert page.troubles == []
    page.tab.get_by_role("button", name="advantage", exact=True).click()
    page.tab.locator(".toks").nth(2).locator("span").first.hover()
    tip = page.texts("#tip")[0].split("\n")
    assert {"kind\tinserted", "advantage\t-1.000"} <= set(tip)
    painted = page.tab.locator(".turn:not(:first-of-type) .toks span")
    assert all(painted.evaluate_all("all => all.map((one) => one.style.background)"))


def test_a_mode_without_numbers_is_off(page):
    page.press("3", "j", "j", "j")
    assert page.texts(".bar h2") == ["train-1-0-3"]
    assert page.tab.get_by_role("button", name="advantage", exact=True).is_disabled()


def test_a_letter_of_two_tokens_is_one_letter(page):
    page.press("3", "j", "j", "j")
    assert page.texts(".toks")[1] == "éworld "


def test_a_group_is_shown_as_a_tree_and_a_leaf_opens_its_trajectory(page):
    page.press("3", "t")
    assert page.tab.locator(".node").count() == 8
    assert page.tab.locator(".edge").count() == 4
    page.tab.locator(".node").nth(2).click()
    assert page.texts(".bar h2") == ["train-1-0-1"]


def test_what_a_model_wrote_is_shown_and_never_runs(page):
    page.press("3", "j", "j", "j", "j")
    assert page.texts(".bar h2") == ["train-1-0-4"]
    token_text = " ".join(page.texts(".toks"))
    for text in HOSTILE[:4]:
        assert text in token_text
    assert printable(HOSTILE[4]) in token_text, (
        "what is hidden or turns the text round is spelt out as on the terminal"
    )
    assert HOSTILE[4] not in token_text
    for mode in ("log-prob", "version", "tree"):
        page.tab.get_by_role("button", name=mode, exact=True).click()
    page.tab.locator(".node").first.hover()
    page.press("2")
    page.tab.locator("svg rect[rx='2']").first.hover()
    assert page.tab.evaluate("window.owned") is None
    assert page.tab.locator("#body img").count() == 0


def test_the_keys_are_listed(page):
    page.press("?")
    help_text = page.texts("#help")[0]
    assert "walk through the tokens" in help_text
    assert "[object" not in help_text
    assert {"1", "j", "/", "?"} <= set(page.texts("#help kbd"))
    page.press("Escape")
    assert not page.tab.locator("#help").is_visible()


def test_light_and_dark_follow_the_system_and_can_be_changed(browser, report):
    grounds = []
    for scheme in ("light", "dark"):
        page = Page(browser, report, scheme)
        grounds.append(page.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.press("l")
    grounds.append(page.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] == grounds[2] != grounds[1]


def test_a_link_opens_its_trajectory(browser, report):
    page = Page(browser, report + "#trajectory=train-3-0-4")
    assert page.texts(".bar h2") == ["train-3-0-4"]
    place = page.tab.locator(".rows").bounding_box()
    row = page.tab.locator(".row[aria-selected=true]").bounding_box()
    assert (
        place["y"] <= row["y"] and row["y"] + row["height"] <= place["y"] + place["height"] + 1
    ), "it is seen in the list"


def test_list_and_trajectory_have_room_and_no_label_is_cut_at_any_width(page):
    page.press("3")
    for width in WIDTHS:
        for height in (844, 420):
            page.tab.set_viewport_size({"width": width, "height": height})
            rows = page.tab.locator(".rows").bounding_box()
            assert rows["height"] >= 4 * 44
            assert rows["width"] >= 300
            assert page.tab.locator(".detail").bounding_box()["height"] >= 4 * 44
        if page.tab.get_by_role("button", name="filters", exact=True).is_visible():
            page.tab.get_by_role("button", name="filters", exact=True).click()
        for key in "123":
            page.press(key)
            assert page.tab.evaluate(f"{CHECKS}; cutTexts()") == [], (width, key)


def test_on_a_phone_a_touched_trajectory_comes_into_view(page):
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.press("3")
    page.tab.locator(".row .id", has_text="train-1-0-2").click()
    assert page.tab.locator(".bar h2").bounding_box()["y"] < 100
    assert page.texts(".bar h2") == ["train-1-0-2"]
    page.tab.get_by_role("button", name="next trajectory").click()
    assert page.texts(".bar h2") == ["train-1-0-3"]
    page.tab.get_by_role("button", name="list", exact=True).click()
    row = page.tab.locator(".row[aria-selected=true]").bounding_box()
    assert 0 < row["y"] < 800


def test_every_control_has_a_name_of_its_own(page):
    """The names are those of the browser's accessibility tree, which a screen reader gets."""
    session = page.tab.context.new_cdp_session(page.tab)

    def names() -> list[str]:
        labels = []
        for node in session.send("Accessibility.getFullAXTree")["nodes"]:
            role = node.get("role", {}).get("value")
            focusable = any(
                each["name"] == "focusable" and each["value"]["value"]
                for each in node.get("properties", ())
            )
            if focusable and role != "RootWebArea" and not node["ignored"]:
                labels.append(f"{role} {node.get('name', {}).get('value', '')}".strip())
        return labels

    controls = set()
    for keys in ("1", "2", "3", "t", "?"):
        page.press(keys)
        listed = names()
        assert all(" " in control for control in listed), (keys, listed)
        fields = [
            control
            for control in listed
            if control.startswith(("spinbutton", "searchbox", "combobox", "button"))
        ]
        assert len(fields) == len(set(fields)), (keys, fields)
        controls |= set(listed)
    expected = {"first step", "last step", "least reward", "greatest reward"}
    assert {f"spinbutton {name}" for name in expected} | {"button light or dark theme"} <= controls
    assert {
        "tab Curves",
        "listbox trajectories",
        "group tokens of turn 1",
        "link trajectory train-1-0-0",
    } <= controls


def test_arrow_keys_home_and_end_move_between_tabs(page):
    tabs = page.tab.get_by_role("tab")

    def state() -> list[tuple]:
        """Return, by tab: selected, reached by the Tab key, focused, its panel is seen."""
        return tabs.evaluate_all(
            "tabs => tabs.map((tab) => [tab.ariaSelected === 'true', tab.tabIndex === 0,"
            " tab === document.activeElement,"
            " !document.getElementById(tab.getAttribute('aria-controls')).hidden])"
        )

    tabs.first.focus()
    for key, place in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowRight", 0),
        ("ArrowLeft", 2),
        ("Home", 0),
        ("End", 2),
    ]:
        page.press(key)
        assert state() == [[n == place] * 4 for n in range(3)], key
    page.press("1")
    assert [selected for selected, *_ in state()] == [True, False, False]
    panels = page.tab.get_by_role("tabpanel", include_hidden=True)
    assert panels.evaluate_all("all => all.map((one) => one.getAttribute('aria-labelledby'))") == [
        "tab-curves",
        "tab-timeline",
        "tab-trajectories",
    ]


def test_keys_point_to_a_step_of_a_chart_and_open_it(page):
    chart = page.tab.get_by_role("slider", name="Reward", exact=True)
    page.tab.get_by_role("tab", name="Curves").focus()
    page.press("Tab")
    for key, step in [
        ("Home", 1),
        ("ArrowLeft", 1),
        ("ArrowRight", 2),
        ("End", 3),
        ("ArrowLeft", 2),
    ]:
        page.press(key)
        assert chart.get_attribute("aria-valuetext") == f"step {step}: mean {0.1 * step:.1f}"
        assert (
            page.tab.locator(".card", has_text="Entropy").locator(".legend b").inner_text()
            == f"{1 / step:.3g}"
        )
    page.press("Enter")
    assert page.listed() == [f"train-2-0-{n}" for n in range(5)]


def test_arrow_keys_walk_through_the_list(page):
    page.press("3")
    page.tab.get_by_role("listbox").focus()
    for key, name in [
        ("ArrowDown", "train-1-0-1"),
        ("End", "train-3-0-4"),
        ("ArrowUp", "train-3-0-3"),
        ("Home", "train-1-0-0"),
    ]:
        page.press(key)
        assert page.texts(".bar h2") == [name]
        active = page.tab.get_by_role("listbox").get_attribute("aria-activedescendant")
        assert page.texts(f"#{active} .id") == [name]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_texts_are_readable(browser, report, scheme):
    page = Page(browser, report, scheme)
    measured = 0

    def look(state: str) -> None:
        nonlocal measured
        contrast = page.tab.evaluate(f"{CHECKS}; paleTexts()")
        assert contrast["pale"] == [], state
        measured += contrast["measured"]

    page.tab.locator("summary").click()
    look("curves")
    page.press("2")
    look("timeline")
    page.press("3")
    for number in range(5):  # with errors, cut off, hostile
        for mode in ("mask", "log-prob", "advantage", "version", "gap"):
            button = page.tab.get_by_role("button", name=mode, exact=True)
            if button.is_enabled():
                button.click()
                look(f"trajectory {number}, {mode}")
        page.press("j")
    page.tab.locator(".row").nth(2).hover()
    look("a row pointed at")
    page.tab.locator(".toks").nth(1).locator("span").first.hover()
    look("a token pointed at")
    page.press("t")
    look("tree")
    page.press("?")
    look("keys")
    assert measured > 1000


def test_evaluation_is_work_of_the_engines(browser, tmp_path: Path):
    run = make_run(tmp_path / "run")
    began = step_line(3)["phase_seconds"][-1][2]
    RunDir(run).add_metrics(
        {
            "kind": "evaluation",
            "step": 3,
            "accuracy": 0.5,
            "phase_seconds": [["evaluate", began, began + 10]],
        }
    )
    page = Page(browser, write_report(run, decode=decode).as_uri() + "#timeline")
    blocks = page.tab.locator("svg[aria-label=timeline] rect:not(.lane)")
    attributes = blocks.evaluate_all(
        "all => all.map((one) => [+one.getAttribute('y'), +one.getAttribute('opacity'),"
        " one.getAttribute('fill')])"
    )
    learner = [block for block in attributes if block[0] == 24]
    engines = [block for block in attributes if block[0] == 54]
    assert learner[-1][1] < 0.5 < engines[-1][1]
    assert learner[-1][2] == engines[-1][2] != engines[0][2]
    blocks.nth(len(learner) + len(engines) - 1).hover()
    assert page.texts("#tip")[0].startswith("engines · evaluation after step 3")
    assert page.troubles == []


def test_a_run_that_has_only_begun_opens(browser, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    page = Page(browser, write_report(run, decode=decode).as_uri())
    assert "No step has been finished yet." in page.texts("#body")[0]
    page.press("2", "3", "j", "t", "c")
    assert "No trajectory has been written yet." in page.texts("#body")[0]
    assert page.troubles == []


def test_thousands_of_trajectories_make_a_list_of_few_elements(browser, tmp_path: Path):
    run = make_run(tmp_path / "run", steps=600)
    page = Page(browser, write_report(run, limit=0, decode=decode).as_uri() + "#trajectories")
    assert page.texts(".status span") == ["2400 of 2400 trajectories"]
    assert page.tab.locator(".row").count() < 60
    page.tab.locator(".rows").evaluate("list => list.scrollTop = list.scrollHeight")
    page.tab.locator(".row .id", has_text="train-600-0-3").wait_for()
    assert page.troubles == []
