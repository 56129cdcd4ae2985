"""A real Chromium, without a window, and brokers whose page it opens."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.conftest import Brokers
from tests.observe.conftest import Site
from tests.support.command import broker_command
from tests.support.config import toolhost

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,900")
BUTTON = """return [...document.querySelectorAll("button")].find((one) => one.checkVisibility() &&
    [one.textContent.trim(), one.ariaLabel].includes(arguments[0]))"""
FIELD = """return [...document.querySelectorAll("#try .fields label")].find((one) =>
    one.firstElementChild.textContent === arguments[0])?.control"""
OPERATOR = '[[principal]]\nname = "token:ops"\noperator = true\n'


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary, driver = next(filter(None, map(shutil.which, CHROMIUM)), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("there is no chromium with its chromedriver here; `make test-browser` installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


class Page:
    """The page, as somebody sees it who looks and types."""

    def __init__(self, browser: webdriver.Chrome, site: Site, link: str) -> None:
        self.browser = browser
        self.site = site
        self.url = f"http://127.0.0.1:{site.port}/"
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(self.url)
        self.eventually(lambda: self.text("#link") == link)

    def eventually(self, check: Callable[[], Any], seconds: float = 10.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = check()
            except StaleElementReferenceException:  # it has just been drawn anew
                found = None
            if found:
                return found
            assert time.monotonic() < deadline, f"did not happen in time; the page says:\n{self.text('body')}"
            time.sleep(0.05)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def press(self, name: str) -> None:
        """The button that says so, or is called so to those who do not see it."""
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button := self._button(name))
        button.click()

    def _button(self, name: str) -> WebElement:
        return self.eventually(lambda: self.browser.execute_script(BUTTON, name))

    def keys(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        return str(self.browser.execute_script("return document.activeElement.id"))

    def choose(self, tool: str) -> None:
        box = self.one("#tool")
        box.clear()
        box.send_keys(tool)
        self.eventually(lambda: self.all("#tool-list [aria-selected=true]"))
        box.send_keys(Keys.ENTER)
        self.eventually(lambda: not self.all("#tool-list:not([hidden])"))

    def field(self, name: str) -> WebElement:
        return self.eventually(lambda: self.browser.execute_script(FIELD, name))

    def reply(self) -> str:
        """The answer's status, once it is there."""
        return str(self.eventually(lambda: self.text("#try .reply .pill")))

    def show_token(self, token: str) -> str:
        """What the page says to it."""
        self.press("Operator")
        self.one("#token").send_keys(token)
        self.press("Use it")
        said = str(self.eventually(lambda: self.text("dialog[open] .said")))
        self.press("Close")
        return said

    def complaints(self) -> list[str]:
        return [str(entry["message"]) for entry in self.browser.get_log("browser")]

    def asked(self) -> list[str]:
        """The addresses of all requests so far."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]


Open = Callable[..., Page]


@pytest.fixture
def look(chromium: webdriver.Chrome) -> Iterator[Open]:
    """Opens the page of a broker."""
    yield lambda site, link="live": Page(chromium, site, link)
    for other in chromium.window_handles[1:]:
        chromium.switch_to.window(other)
        chromium.close()
    chromium.switch_to.window(chromium.window_handles[0])
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_script("sessionStorage.clear()")
    chromium.get("about:blank")


@pytest.fixture
def token(tmp_path: Path) -> str:
    return broker_command(tmp_path, "token", "new", "ops").stdout.strip().split()[-1]


@pytest.fixture
def site(start: Any, where: dict[str, str], token: str) -> Site:  # noqa: ARG001
    """Demo and fault tools, a breaker that opens soon; whoever shows the token is an operator."""
    hosts = toolhost("demo", where["demo_plugin"], max=2) + toolhost("fault", where["fault_plugin"], max=2)
    return Site(start("--http", "127.0.0.1:0", config=f"[breaker]\nin_a_row = 3\n{OPERATOR}{hosts}"))


@pytest.fixture
def page(look: Open, site: Site) -> Page:
    return look(site)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One broker with the tools that it brings itself, for tests that only use the form."""
    brokers = Brokers(tmp_path_factory.mktemp("calm"))
    yield Site(brokers.start("--http", "127.0.0.1:0"))
    brokers.end()


@pytest.fixture
def form(look: Open, calm: Site) -> Page:
    return look(calm)
