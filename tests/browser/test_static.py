"""The page's files, as any HTTP client gets them: a fixed list, guarded, cheap to ask for again."""

from __future__ import annotations

import http.client
import re

import pytest

from broker.faces.http import page as served


def ask(site, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_page_is_guarded_and_brings_no_program_but_its_own(calm):
    status, headers, body = ask(calm, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["x-frame-options"], headers["cache-control"]) == ("DENY", "no-cache")
    assert not re.search(rb"<script>|<style|style=|\son\w+=|https?://", body)


def test_every_file_that_the_page_names_is_there_and_every_file_is_named(calm):
    seen, waiting = set(), ["/"]
    while waiting:
        path = waiting.pop()
        status, headers, body = ask(calm, path)
        assert (status, headers["x-content-type-options"]) == (200, "nosniff"), path
        seen.add(path)
        named = re.findall(rb"""["'](/static/[\w.]+|\./[\w.]+)["']""", body)
        paths = {one.decode().replace("./", "/static/") for one in named}
        waiting += [one for one in paths if one not in seen]
    assert {one.rpartition("/")[2] or served.INDEX for one in seen} == set(served.NAMES)
    assert {file.name for file in served.FOLDER.iterdir()} == set(served.NAMES)


def test_who_has_a_file_already_does_not_get_it_again(calm):
    _, headers, _ = ask(calm, "/static/page.css")
    status, _, body = ask(calm, "/static/page.css", **{"If-None-Match": headers["etag"]})
    assert (status, body) == (304, b"")


@pytest.mark.parametrize("path", ["/static/", "/static/../page.py", "/static/%2e%2e/page.py", "/static//etc/passwd"])
def test_nothing_but_the_list_is_served(calm, path):
    assert ask(calm, path)[0] == 404


def test_data_becomes_text_and_never_markup():
    for file in served.FOLDER.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", file.read_text()), file
