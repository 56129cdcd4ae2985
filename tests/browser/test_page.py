"""The page at `/`, used as people use it: looked at, typed into, with and without a token, on a phone, by keyboard."""

from __future__ import annotations

import json
import socket
import stat

from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import OPERATOR, Page
from tests.observe.conftest import Site
from tests.support.config import toolhost

ECHO, SEGV = "AID.DEMO.ECHO.v1", "AID.FAULT.SEGV.v1"
EVIL = "<img src=x onerror=document.body.dataset.pwned=1>"


def row(page: Page, tool: str) -> list[str]:
    """What the table of tools says of it."""
    found = [one for one in page.all("#tools tbody tr") if one.text.startswith(tool)]
    return found[0].text.split("\n") if found else []


# --- looking ----------------------------------------------------------------------------------------------------------


def test_the_page_loads_without_a_complaint_and_asks_nobody_but_its_broker(form):
    form.eventually(lambda: "demo" in form.text("#pools"))
    form.press("Operator")
    form.press("Close")
    form.choose("write_text")
    assert form.complaints() == []
    asked = form.asked()
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(form.url)] == []


def test_a_call_over_the_socket_shows_in_the_numbers_of_its_tool_and_in_the_histogram(page):
    assert "No tool has been called yet" in page.text("#tools")
    with page.site.broker.wire() as wire:
        for _ in range(40):
            assert wire.ask({"aid": ECHO, "inputs": {"n": 1}})["ok"]
        page.eventually(lambda: "40" in " ".join(row(page, ECHO)).split())
        assert "1 connection" in page.text("#facts")
    assert "machina 40" in page.text("#latency")
    assert page.all("#latency rect.bar")
    assert page.text("#now .tile:nth-child(2) .value").split()[1] in ("µs", "ms")


def test_where_there_is_nothing_yet_the_page_says_how_there_will_be(page):
    assert "Nothing has gone wrong" in page.text("#errors")
    assert "broker lease issue" in page.text("#leases")
    assert "broker call" in page.text("#tools")


def test_a_paused_pool_is_seen_and_goes_on_when_the_operator_says_so(page, token):
    assert page.show_token(token) == "It is an operator's."
    page.press("Pause pool demo")
    assert "Pause demo?" in page.text("dialog[open]")
    page.press("Do it")
    page.eventually(lambda: "demo\npaused" in page.text("#pools"))
    with page.site.broker.wire() as wire:
        wire.send({"aid": ECHO, "inputs": {}})
        page.eventually(lambda: page.text("#now .tile:nth-child(5) .value") == "1")
        page.press("Resume pool demo")
        assert wire.reply()["ok"]
    page.eventually(lambda: "demo\nready" in page.text("#pools"))


def test_pools_of_each_caller_are_seen_apart_and_paused_together(start, where, look, token):
    hosts = toolhost("demo", where["demo_plugin"], isolate="principal")
    page = look(Site(start("--http", "127.0.0.1:0", config=OPERATOR + hosts)))
    page.site.broker.call(ECHO)
    page.site.call(ECHO)
    page.eventually(lambda: "demo@uid:" in page.text("#pools") and "demo@http:anonymous" in page.text("#pools"))
    page.show_token(token)
    page.press("Pause pool demo@http:anonymous")
    page.press("Do it")
    page.eventually(lambda: page.text("#pools").count("paused") == len(page.all("#pools .pool")) > 1)


# --- trying a tool ----------------------------------------------------------------------------------------------------


def test_the_form_is_made_from_the_schema_and_the_artifact_of_its_call_opens(form):
    form.choose("write_text_artifact")
    assert [one.text.split()[0] for one in form.all("#try .fields label")] == ["text", "filename"]
    assert "required" in form.all("#try .fields label")[0].text
    assert "Defaults to note.txt" in form.text("#try .fields")
    form.field("text").send_keys("from the page\nwith two lines")
    form.field("filename").send_keys("seen.txt")
    form.press("Call")
    assert form.reply() == "200 ok"
    assert "request " in form.text("#try .facts")
    assert json.loads(form.text("#try pre"))["filename"] == "seen.txt"
    form.one("#try .artifacts a").click()
    form.eventually(lambda: len(form.browser.window_handles) == 2)
    form.browser.switch_to.window(form.browser.window_handles[1])
    form.eventually(lambda: form.text("body") == "from the page\nwith two lines")


def test_an_example_fills_the_form_and_what_was_typed_is_there_again_after_a_reload(form):
    form.choose("echo_json")
    form.press("Echo message twice")
    assert [form.field(name).get_attribute("value") for name in ("message", "n")] == ["hello", "2"]
    form.field("message").send_keys(" again")
    form.browser.refresh()
    form.eventually(lambda: form.all("#try .fields label"))
    assert form.field("message").get_attribute("value") == "hello again"


def test_a_wrong_input_is_refused_in_the_brokers_words_at_the_field_that_they_name(form):
    form.choose("write_text_artifact")
    form.one("#as-json").click()
    form.one("#raw").clear()
    form.one("#raw").send_keys('{"text": 5}')
    form.press("Call")
    assert form.reply() == "400 invalid_input"
    assert "input.text: 5 is not of type" in form.text("#try .reply .trouble")
    form.one("#raw").send_keys("oops")
    form.press("Call")
    assert "This is not JSON" in form.text("#raw-trouble")


def test_fields_of_every_kind_become_the_json_that_the_schema_speaks_of(start, where, look):
    schema = {
        "type": "object",
        "properties": {
            "whole": {"type": "integer", "maximum": 9},
            "part": {"type": "number"},
            "flag": {"type": "boolean"},
            "pick": {"enum": ["one", 2]},
            "list": {"type": "array", "items": {"type": "string"}},
            "word": {"type": "string"},
            "left": {"type": "string"},
        },
        "required": ["whole"],
    }
    card = f'[[tool]]\nname = "{ECHO}"\nschema = {_toml(schema)}\n'
    site = Site(start("--http", "127.0.0.1:0", config=card + toolhost("demo", where["demo_plugin"])))
    page = look(site)
    page.choose(ECHO)
    typed = {"whole": "12", "part": "0.5", "flag": "true", "pick": "2", "list": '["a"]', "word": 'x"y'}
    for name, value in typed.items():
        page.field(name).send_keys(value)
    page.press("Call")
    assert page.reply() == "400 invalid_input"
    assert "input.whole: 12 is greater than the maximum of 9" in page.text("#try .fields")
    assert page.focused() == page.field("whole").get_attribute("id")
    page.field("whole").clear()
    page.field("whole").send_keys("7", Keys.CONTROL, Keys.ENTER)
    page.eventually(lambda: page.reply() == "200 ok")
    sent = {"whole": 7, "part": 0.5, "flag": True, "pick": 2, "list": ["a"], "word": 'x"y'}
    assert json.loads(page.text("#try pre")) == sent


def _toml(value):
    """JSON, as TOML has it on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


# --- operating --------------------------------------------------------------------------------------------------------


def test_a_crash_shows_opens_the_breaker_and_an_operator_with_a_token_closes_it(page, token):
    for _ in range(3):
        assert not page.site.broker.call(SEGV)["ok"]
    page.eventually(lambda: "crash" in page.text("#errors"))
    assert "killed by SIGSEGV" in page.text("#errors")
    page.eventually(lambda: "open, probe in" in page.text("#tools"))
    assert page.text("#now .tile:nth-child(6) .value") == "1"
    first = page.text("#tools .pill")
    page.eventually(lambda: page.text("#tools .pill") not in (first, ""))  # it counts down

    page.press(f"Reset the breaker of {SEGV}")
    page.eventually(lambda: "this is the operator's" in page.text("#notices"))
    assert "open" in page.text("#tools .pill")

    assert page.show_token("tbk_nobody") == (
        "there is no such token (Authorization: Bearer …); `broker token new NAME` makes one"
    )
    assert page.show_token(token) == "It is an operator's."
    page.press(f"Reset the breaker of {SEGV}")
    page.eventually(lambda: page.text("#tools .pill") == "closed")
    assert token not in page.browser.current_url
    assert page.browser.execute_script("return localStorage.length") == 0


def test_beyond_loopback_the_page_opens_and_shows_nothing_without_a_token(start, where, look, token):
    config = OPERATOR + toolhost("demo", where["demo_plugin"])
    site = Site(start("--http", "0.0.0.0:0", config=config))
    page = look(site, "refused")
    assert "a token is needed" in page.text("#banners")
    assert "demo" not in page.text("#pools")
    page.show_token(token)
    page.eventually(lambda: page.text("#link") == "live" and "demo" in page.text("#pools"))
    page.choose("write_text_artifact")
    page.field("text").send_keys("only for the token")
    page.press("Call")
    assert page.reply() == "200 ok"
    page.one("#try .artifacts a").click()  # a link carries no token: the page does
    page.eventually(lambda: len(page.browser.window_handles) == 2)
    page.browser.switch_to.window(page.browser.window_handles[1])
    page.eventually(lambda: page.text("body") == "only for the token")


def test_a_lease_issued_on_the_page_opens_one_call_of_its_form(start, where, look, token):
    config = "[lease]\nenforce = true\n" + OPERATOR + toolhost("demo", where["demo_plugin"])
    page = look(Site(start("--http", "127.0.0.1:0", config=config)))
    page.choose("AID.FILE.WRITE.v1")
    page.one("#raw").clear()
    page.one("#raw").send_keys('{"path": "a.txt", "text": "hi"}')
    page.press("Call")
    assert page.reply() == "403 lease_required"
    page.show_token(token)
    page.one("#lease-tool").send_keys("AID.FILE.WRITE.v1")
    page.press("Issue a lease")
    page.eventually(lambda: "AID.FILE.WRITE.v1" in page.text("#leases .leases"))
    page.press("Use in the form")
    page.press("Call")
    page.eventually(lambda: page.reply() == "200 ok")
    page.eventually(lambda: "No lease is alive" in page.text("#leases"))


# --- what others write ------------------------------------------------------------------------------------------------


def test_markup_in_the_name_error_and_output_of_a_tool_is_text_and_nothing_else(start, look, tmp_path):
    program = tmp_path / "evil"
    program.write_text(
        "#!/usr/bin/env python3\nimport json, sys\nfine = '\"ok\"' in sys.stdin.read().replace('\\\\', '')\n"
        f"evil = {EVIL!r}\n"
        "print(json.dumps({'status': 'OK', 'output_json': json.dumps({evil: evil})} if fine else"
        " {'status': 'TOOL_ERROR', 'error': evil}))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    card = f'[[tool]]\nname = "{EVIL}"\ndescription = "{EVIL}"\nexamples = [{{ title = "{EVIL}", input = {{}} }}]\n'
    breaker = '[breaker]\nin_a_row = 2\ncount_tool_errors = ["*"]\n'
    command = f'[[oneshot]]\nname = "{EVIL}"\ncommand = ["{program}"]\n'
    page = look(Site(start("--http", "127.0.0.1:0", config=breaker + command + card)))
    page.choose("img")
    page.one("#raw").clear()
    page.one("#raw").send_keys('{"ok": 1}')
    page.press("Call")
    assert page.reply() == "200 ok"
    assert json.loads(page.text("#try pre")) == {EVIL: EVIL}
    page.one("#raw").clear()
    for _ in range(2):
        page.press("Call")
        page.eventually(lambda: page.reply().startswith("500") and page.text("#try button.main") == "Call")
    assert page.text("#try .reply .trouble") == EVIL
    page.eventually(lambda: EVIL in page.text("#errors"))
    page.eventually(lambda: EVIL in page.text("#tools"))
    for place in ("#try .about", "#try .examples"):
        assert EVIL in page.text(place), place
    assert page.all("img:not([src='/static/icon.svg'])") == []
    assert page.browser.execute_script("return document.body.dataset.pwned ?? 'safe'") == "safe"


# --- anywhere, anyhow -------------------------------------------------------------------------------------------------


def test_by_keyboard_alone_tab_reaches_the_form_and_enter_calls(form):
    form.one("body").send_keys(Keys.TAB)
    assert form.browser.execute_script("return document.activeElement.textContent") == "Skip to the tool form"
    form.keys(Keys.ENTER)
    form.eventually(lambda: form.focused() == "try")
    form.keys(Keys.TAB)
    assert form.focused() == "tool"
    form.keys("echo_json")
    form.eventually(lambda: form.all("#tool-list [aria-selected=true]"))
    form.keys(Keys.ENTER)
    form.eventually(lambda: form.all("#try .fields label"))
    for _ in range(9):
        if form.focused() == form.field("message").get_attribute("id"):
            break
        form.keys(Keys.TAB)
    form.keys("typed")
    form.browser.switch_to.active_element.send_keys(Keys.CONTROL, Keys.ENTER)
    assert form.reply() == "200 ok"
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert form.browser.execute_script(outline) == "solid", "whoever has no mouse sees where they are"


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    for _ in range(3):
        page.site.broker.call(SEGV)
    page.site.broker.call(ECHO)
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.choose("write_text_artifact")
    page.field("text").send_keys("x" * 300)
    page.field("filename").send_keys("y" * 120)
    page.press("Call")
    assert page.reply() == "200 ok"
    assert page.text("#try .artifacts a") == "y" * 120
    page.eventually(lambda: row(page, SEGV) and "open" in page.text("#tools"))
    wide = (
        "return [...document.querySelectorAll('main *, header *')].filter(one => one.checkVisibility() &&"
        " one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.places, .options, .away, thead'))"
        ".map(one => one.outerHTML.slice(0, 120))"
    )
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert page.browser.execute_script(wide) == []


def test_the_stream_comes_back_after_the_broker_was_started_again_on_the_same_port(start, where, look):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    config = toolhost("demo", where["demo_plugin"])
    first = start("--http", place, config=config)
    page = look(Site(first))
    first.call(ECHO)
    page.eventually(lambda: row(page, ECHO))
    first.stop()
    page.eventually(lambda: page.text("#link") == "lost")
    assert "cannot be reached" in page.text("#banners")
    assert "draining" in page.text("#banners"), "that was its last word"
    start("--http", place, config=config)
    page.eventually(lambda: page.text("#link") == "live")
    page.eventually(lambda: "No tool has been called yet" in page.text("#tools"))
    assert page.text("#banners") == ""
