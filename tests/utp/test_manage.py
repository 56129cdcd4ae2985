"""Definitions of tools over HTTP, as CommonGround's management clients post them, and by the operator's words."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Brokers, Served, Start
from tests.support.command import broker_command
from tests.support.commonground import SQLite, Tables
from tests.support.http import Answer, Web
from tests.support.postgres import PostgresServer
from tests.utp.conftest import database

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "utp_31_management_api.json").read_text())
GOOD = VECTOR["cases"][0]["yaml"]
PROJECT = "proj_v"


class Managed:
    """A broker that keeps definitions, in a store where there is one project."""

    def __init__(self, served: Served, tables: Tables) -> None:
        self.served = served
        self.web = Web(served.ready)
        self.tables = tables

    def post(self, text: str | bytes, project: str = PROJECT, **more: Any) -> Answer:
        return post(self.web, text, project, **more)

    def tools(self) -> list[dict[str, Any]]:
        return ask_operator(self.served, "_utp.tool.list", project=PROJECT)["tools"]


def post(
    web: Web, text: str | bytes, project: str = PROJECT, part: str = 'name="file"; filename="t.yaml"', **headers: str
) -> Answer:
    content = text.encode() if isinstance(text, str) else text
    body = b"--xx\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n--xx--\r\n" % (part.encode(), content)
    said = {"Content-Type": "multipart/form-data; boundary=xx"}
    said |= {name.replace("_", "-"): value for name, value in headers.items()}
    return web.ask("POST", f"/projects/{project}/tools", body, said)


def add_project(tables: Tables) -> None:
    more = {"owner_id": "owner"} if tables.kind == "postgres" else {}
    tables.insert("projects", {"project_id": PROJECT, "title": PROJECT, **more})


def ask_operator(served: Served, aid: str, **members: Any) -> dict[str, Any]:
    with served.operator() as wire:
        return wire.ask({"aid": aid, **members})


def detail(answer: Answer) -> tuple[int, str, str]:
    said = answer.json["detail"]
    return answer.status, said["error_code"], said["error_message"]


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def managed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    folder = tmp_path_factory.mktemp("managed")
    tables: Tables = SQLite(folder / "utp.sqlite3")
    if request.param == "postgres":
        tables = database(request.getfixturevalue("postgres_server"))
    brokers = Brokers(folder)
    config = f"[utp]\nstore = '{tables.kind}'\ndsn = '{tables.dsn}'"
    served = brokers.start("--http", "127.0.0.1:0", config=config)
    add_project(tables)
    yield Managed(served, tables)
    brokers.end()


@pytest.mark.parametrize("case", VECTOR["cases"], ids=lambda case: case["case"])
def test_a_recorded_exchange_is_repeated(managed: Managed, case: dict[str, Any]) -> None:
    answer = managed.post(case["yaml"], case["project_id"])
    assert (answer.status, answer.json) == (case["expect"]["status"], case["expect"]["body"])


def test_a_definition_is_written_over(managed: Managed) -> None:
    managed.post(GOOD.replace("t1", "twice"))
    answer = managed.post(GOOD.replace("t1", "twice") + "description: Better.\noptions: {envs: {k: KEY}}\n")
    assert (answer.status, answer.json["description"]) == (201, "Better.")
    kept = [one for one in managed.tools() if one["tool_name"] == "twice"]
    assert [(one["description"], one["options"]) for one in kept] == [("Better.", {"envs": {"k": "KEY"}})]


def test_what_is_not_ascii_is_kept_as_it_is(managed: Managed) -> None:
    assert managed.post(GOOD.replace("t1", "größe") + "description: naïve ☃ 𝄞\n").status == 201
    assert [one["description"] for one in managed.tools() if one["tool_name"] == "größe"] == ["naïve ☃ 𝄞"]


@pytest.mark.parametrize("project", ["nobody", "%00", "..", "a%20b", "%ED%A0%80"])
def test_an_unknown_project_is_not_found(managed: Managed, project: str) -> None:
    status, code, words = detail(managed.post(GOOD, project))
    assert (status, code) == (404, "not_found")
    assert words.startswith("project not found: ")


def test_a_definition_is_read_before_its_project_is_looked_for(managed: Managed) -> None:
    assert detail(managed.post("- 1\n", "nobody"))[:2] == (400, "bad_request")
    assert detail(managed.post(GOOD.replace("suspend", "never"), "nobody"))[:2] == (404, "not_found")


@pytest.mark.parametrize("change", [("suspend", "never"), (".cmd.tool.", ".cmd.sys."), ("t1", "fork_join")])
def test_a_tool_that_is_no_external_one_is_refused(managed: Managed, change: tuple[str, str]) -> None:
    before = managed.tools()
    assert detail(managed.post(GOOD.replace(*change)))[:2] == (400, "bad_request")
    assert managed.tools() == before


@pytest.mark.parametrize("part", ['name="other"; filename="t.yaml"', 'name="file"'])
def test_a_form_without_the_file_is_answered_as_fastapi_does(managed: Managed, part: str) -> None:
    answer = managed.post(GOOD, part=part)
    missing = {"type": "missing", "loc": ["body", "file"], "msg": "Field required", "input": None}
    assert (answer.status, answer.json) == (422, {"detail": [missing]})


def test_a_post_without_a_body_has_no_file_either(managed: Managed) -> None:
    assert managed.web.ask("POST", f"/projects/{PROJECT}/tools").status == 422


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=yy", b"junk"),
        ("multipart/form-data; boundary=xx", b"--xx\r\nno colon\r\n\r\nx\r\n--xx--\r\n"),
        ("application/json", b"{}"),
        ("text/yaml", GOOD.encode()),
    ],
)
def test_what_is_no_form_is_a_bad_request(managed: Managed, kind: str, body: bytes) -> None:
    answer = managed.web.ask("POST", f"/projects/{PROJECT}/tools", body, {"Content-Type": kind})
    assert detail(answer)[:2] == (400, "bad_request")


def test_a_form_that_is_too_long_is_refused(managed: Managed) -> None:
    assert managed.post("#" * 140_000).status == 400  # the file
    assert managed.post("#" * 3_000_000).status == 413  # the form


def test_other_methods_and_places_are_not_served(managed: Managed) -> None:
    assert managed.web.get(f"/projects/{PROJECT}/tools").status == 405
    assert managed.web.ask("POST", f"/projects/{PROJECT}/agents").status == 404
    assert managed.web.ask("POST", "/projects/a/b/tools").status == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
    ],
)
def test_a_page_from_elsewhere_cannot_have_a_browser_post_a_definition(
    managed: Managed, headers: dict[str, str]
) -> None:
    """Browsers post forms to anybody, without asking first."""
    before = managed.tools()
    assert detail(managed.post(GOOD.replace("t1", "evil"), **headers))[:2] == (403, "auth_failed")
    assert managed.tools() == before


def test_the_document_tells_of_it(managed: Managed) -> None:
    route = managed.web.get("/openapi.json").json["paths"]["/projects/{project_id}/tools"]["post"]
    assert "multipart/form-data" in route["requestBody"]["content"]
    assert "201" in route["responses"]


def test_the_log_says_who_has_defined_what(managed: Managed) -> None:
    managed.post(GOOD.replace("t1", "logged"))
    said = [json.loads(line) for line in managed.served.log.read_text().splitlines() if "tool defined" in line]
    assert [(one["project"], one["who"]) for one in said if one["tool"] == "logged"] == [(PROJECT, "http:anonymous")]


# --- whose right it is ------------------------------------------------------------------------------------------------


def token(folder: Path, name: str) -> str:
    return broker_command(folder, "token", "new", name).stdout.strip()


def test_only_operators_where_the_configuration_says_so(start: Start, tmp_path: Path) -> None:
    operators, others = token(tmp_path, "boss"), token(tmp_path, "ci")
    config = """
    [utp]
    manage = "operator"
    [[principal]]
    name = "token:boss"
    operator = true
    """
    served = start("--http", "127.0.0.1:0", config=config)
    web = Web(served.ready)
    for shown in ({}, {"Authorization": f"Bearer {others}"}):
        status, code, words = detail(post(web, GOOD, **shown))
        assert (status, code) == (403, "auth_failed")
        assert "broker utp tool add" in words
    assert detail(post(web, GOOD, Authorization="Bearer nonsense"))[:2] == (403, "auth_failed")
    made = broker_command(tmp_path, "utp", "tool", "add", "-", "--project", PROJECT, "--socket", served.path)
    assert made.returncode == 1
    ask_operator(served, "_utp.tool.add", project=PROJECT, file=GOOD, make_project=True)
    assert post(web, GOOD, Authorization=f"Bearer {operators}").status == 201


def test_from_other_machines_only_operators(start: Start, tmp_path: Path) -> None:
    others = token(tmp_path, "ci")
    web = Web(start("--http", "0.0.0.0:0", config="[utp]\ndsn = 'utp.sqlite3'").ready)
    status, code, words = detail(post(web, GOOD, Authorization=f"Bearer {others}"))
    assert (status, code) == (403, "auth_failed")
    assert "from other machines" in words
    assert detail(post(web, GOOD))[:2] == (403, "auth_failed")


def test_without_utp_there_is_nothing_to_manage(start: Start) -> None:
    served = start("--http", "127.0.0.1:0", config="")
    assert post(Web(served.ready), GOOD).status in (400, 404)
    assert "/projects/{project_id}/tools" not in Web(served.ready).get("/openapi.json").json["paths"]
    refusal = ask_operator(served, "_utp.tool.list", project=PROJECT)
    assert (refusal["ok"], refusal["type"]) == (False, "not_found")


def test_the_words_are_the_operators(managed: Managed) -> None:
    refusal = managed.served.ask({"aid": "_utp.tool.add", "project": PROJECT, "file": GOOD})
    assert (refusal["ok"], refusal["type"]) == (False, "forbidden")


# --- a store that is away ---------------------------------------------------------------------------------------------


def test_a_store_that_is_away_is_said_to_be_and_found_again(start: Start) -> None:
    server = PostgresServer().start()
    try:
        tables = database(server)
        add_project(tables)
        tables.close()
        server.kill()
        web = Web(start("--http", "127.0.0.1:0", config=f"[utp]\nstore='postgres'\ndsn='{tables.dsn}'").ready)
        status, code, _ = detail(post(web, GOOD))
        assert (status, code) == (503, "upstream_unavailable")
        server.start()
        assert post(web, GOOD).status == 201
    finally:
        server.remove()


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(start: Start) -> Served:
    return start(config="[utp]\ndsn = 'utp.sqlite3'")


def command(served: Served, home: Path, *words: str) -> tuple[int, str]:
    done = broker_command(home, "utp", "tool", *words, "--project", PROJECT, "--socket", served.path)
    return done.returncode, done.stdout + done.stderr


def test_the_operator_defines_tools_on_the_command_line(at_home: Served, tmp_path: Path) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(GOOD + "description: Counts words.\n")
    assert command(at_home, tmp_path, "add", str(file)) == (1, f"broker: project not found: {PROJECT}\n")
    code, said = command(at_home, tmp_path, "add", str(file), "--create-project")
    assert (code, said) == (0, f"{PROJECT}: t1 → cg.v1r3.{{project_id}}.{{channel_id}}.cmd.tool.svc.call\n")
    code, said = command(at_home, tmp_path, "list")
    assert code == 0
    assert "t1" in said
    assert "Counts words." in said


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"- 1\n", "YAML root must be a mapping"), (b"\xff", "is not UTF-8"), (None, "cannot be read")],
)
def test_a_file_that_will_not_do_is_refused_with_its_name_or_its_fault(
    at_home: Served, tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "tool.yaml"
    if content is not None:
        file.write_bytes(content)
    code, said = command(at_home, tmp_path, "add", str(file), "--create-project")
    assert code == 1
    assert words in said


def test_projects_of_commonground_are_made_by_commonground(managed: Managed) -> None:
    if managed.tables.kind != "postgres":
        pytest.skip("this one is ours")
    refusal = ask_operator(managed.served, "_utp.tool.add", project="new", file=GOOD, make_project=True)
    assert "POST /projects" in refusal["error"]


def test_a_caller_that_leaves_in_the_middle_of_its_form_changes_nothing(managed: Managed) -> None:
    before = managed.tools()
    with socket.create_connection((managed.web.host, managed.web.port)) as wire:
        wire.sendall(
            b"POST /projects/%b/tools HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n"
            b"Content-Type: multipart/form-data; boundary=xx\r\n\r\n--xx\r\n" % PROJECT.encode()
        )
    assert managed.tools() == before
