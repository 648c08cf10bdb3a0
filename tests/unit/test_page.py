"""The page as it is served: one response that is complete, closed to everything else, and in step with the package."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

import httpx
import pytest

from prefixproxy.app import create_app
from prefixproxy.page import SCRIPTS, assemble, load_page
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.types import Kind, MissReason

FOLDER = files("prefixproxy").joinpath("page")
SOURCES = {each.name: each.read_text(encoding="utf-8") for each in FOLDER.iterdir()}
SCRIPT = "\n".join(SOURCES[name] for name in SCRIPTS)


def html() -> str:
    return load_page().body.decode()


def element(name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", html(), flags=re.DOTALL)
    assert found
    return found.group(1)


def directives() -> dict[str, str]:
    policy = load_page().headers["content-security-policy"]
    return {name: value for name, _, value in (part.partition(" ") for part in policy.split("; "))}


def test_every_file_of_the_page_is_in_it() -> None:
    assert set(SOURCES) == {*SCRIPTS, "index.html", "page.css"}
    assert "/*STYLE*/" not in html()
    assert "/*SCRIPT*/" not in html()
    for name in SCRIPTS:
        assert SOURCES[name] in html()


def test_only_the_style_and_the_script_that_are_there_may_act() -> None:
    for name, directive in (("style", "style-src"), ("script", "script-src")):
        digest = b64encode(sha256(element(name).encode()).digest()).decode()
        assert directives()[directive] == f"'sha256-{digest}'"
    assert directives()["default-src"] == "'none'"
    assert directives()["connect-src"] == "'self'"
    assert directives()["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in load_page().headers["content-security-policy"]


def test_nothing_is_loaded_from_anywhere() -> None:
    links = re.findall(r"""\b(?:src|href)\s*=\s*["']([^"']*)""", html())
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    urls = set(re.findall(r"https?://[\w.]+", html()))
    assert urls == {"http://www.w3.org"}, "names of XML, nothing is asked there"
    assert "@import" not in html()


def test_text_never_becomes_markup_and_markup_carries_no_code() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in SCRIPT
    markup = SOURCES["index.html"]
    assert re.findall(r"\s(?:on\w+|style)\s*=", markup) == []


def test_every_element_the_script_asks_for_is_there() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', SOURCES["index.html"])
    asked = set(re.findall(r"byId\('([\w-]+)'\)", SCRIPT))
    assert len(ids) == len(set(ids))
    assert asked
    assert asked <= set(ids)


@pytest.mark.parametrize(("name", "values"), [("KINDS", Kind), ("MISS_REASONS", MissReason)])
def test_the_filters_offer_every_value(name: str, values: type[Kind] | type[MissReason]) -> None:
    found = re.search(rf"const {name} = \[(.*?)\]", SOURCES["store.js"], flags=re.DOTALL)
    assert found
    assert re.findall(r"'(\w+)'", found.group(1)) == [value.value for value in values]


@pytest.mark.parametrize("part", ["css", "script"])
def test_what_would_end_its_own_element_is_refused(part: str) -> None:
    css, scripts = ("</STYLE>", [""]) if part == "css" else ("", ["'</script>'"])
    with pytest.raises(ValueError, match="would end the element"):
        assemble("/*STYLE*//*SCRIPT*/", css, scripts)


def client(**overrides: Any) -> httpx.AsyncClient:
    settings = {"state.path": ":memory:", "upstreams": [{"name": "local", "url": "http://127.0.0.1:1"}], **overrides}
    proxy = create_app(load_settings(packaged_config("default.toml"), settings, {}))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=proxy.app), base_url="http://proxy")


@pytest.mark.anyio
async def test_the_page_needs_no_key_and_what_it_shows_does() -> None:
    async with client(**{"server.api_keys": ["secret"]}) as http:
        page = await http.get("/prefixproxy/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.content == load_page().body
        for path in ("status", "requests", "trend", "events", "admission", "admission/schema"):
            assert (await http.get(f"/prefixproxy/{path}")).status_code == 401, path


@pytest.mark.anyio
async def test_a_page_that_did_not_change_is_not_sent_again() -> None:
    async with client() as http:
        first = await http.get("/prefixproxy/")
        again = await http.get("/prefixproxy/", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.anyio
async def test_the_slash_may_be_forgotten() -> None:
    async with client() as http:
        answer = await http.get("/prefixproxy")
        assert (answer.status_code, answer.headers["location"]) == (307, "http://proxy/prefixproxy/")


@pytest.mark.anyio
async def test_every_admission_setting_is_described() -> None:
    async with client() as http:
        schema = (await http.get("/prefixproxy/admission/schema")).json()["properties"]
        assert set(schema) == set((await http.get("/prefixproxy/admission")).json())
        assert schema["queue_limit"]["minimum"] == 1
        assert all(one["description"] for one in schema.values())


@pytest.mark.anyio
async def test_a_time_that_is_none_is_refused() -> None:
    async with client() as http:
        assert (await http.get("/prefixproxy/trend?since=0")).json()["steps"] == []
        answer = await http.get("/prefixproxy/trend?since=yesterday")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
