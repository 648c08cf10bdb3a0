"""Bodies are edited by splicing: what no edit names leaves byte for byte as it came."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from prefixproxy.body import Body, edited, json_bytes
from prefixproxy.errors import BadRequest
from prefixproxy.prompt import AppendItem, Edit, Remove, SetKey, SetText, SetValue

ODD = (
    b'\n{ "n": 123456789012345678901234567890, "f":1.50 ,"e": "caf\\u00e9 \\/ \\ud800", "twice":1,\t"twice":2, '
    b'"u": "\xc3\xa9", "messages": [ {"role":"user","content":"hi"} , {"role":"assistant","content":null} ] } \n'
)


def render(raw: bytes, *edits: Edit) -> bytes:
    return Body.parse(raw).render(edits)


def test_no_edits_give_the_same_object_back() -> None:
    body = Body.parse(ODD)
    assert body.render([]) is body.raw


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (SetText(("messages", 0, "content"), 'a "b"\n'), b'"hi"', b'"a \\"b\\"\\n"'),
        (SetText(("messages", 0, "content"), "\ud800"), b'"hi"', b'"\\ud800"'),
        (SetValue(("f",), raw=b"1.500"), b"1.50", b"1.500"),
        (SetValue(("messages", 1), {"x": 1}), b'{"role":"assistant","content":null}', b'{"x":1}'),
        (SetKey((), "twice", [3]), b'"twice":2', b'"twice":[3]'),
        (SetKey((), "id_slot", 0), b"] } \n", b'],"id_slot":0 } \n'),
        (SetKey(("messages", 1), "x", 0), b"null}", b'null,"x":0}'),
        (Remove(("messages", 0)), b'{"role":"user","content":"hi"} , ', b""),
        (Remove(("messages", 1)), b' , {"role":"assistant","content":null}', b""),
        (Remove(("messages",)), ODD[ODD.index(b', "messages"') : ODD.index(b" } \n")], b""),
        (AppendItem(("messages",), {"a": 1}), b"null} ] }", b'null},{"a":1} ] }'),
    ],
)
def test_an_edit_changes_its_own_place_only(edit: Edit, old: bytes, new: bytes) -> None:
    assert ODD.count(old) == 1
    assert render(ODD, edit) == ODD.replace(old, new)


def test_removing_a_key_that_stands_twice_removes_both() -> None:
    assert render(b'{"a":1,"b":2,"a":3}', Remove(("a",))) == b'{"b":2}'


def test_of_duplicate_keys_the_last_one_is_descended_into() -> None:
    raw = b'{"a":["x"],"b":0,"a":["y"]}'
    assert render(raw, SetText(("a", 0), "z")) == b'{"a":["x"],"b":0,"a":["z"]}'
    assert Body.parse(raw).data == {"a": ["y"], "b": 0}


@pytest.mark.parametrize(
    ("raw", "gone", "items", "want"),
    [
        (b'{"l":[1,2,3]}', [0, 1, 2], [], b'{"l":[]}'),
        (b'{"l":[ 1 , 2 , 3 ]}', [0, 2], [], b'{"l":[ 2 ]}'),
        (b'{"l":[1,2,3]}', [1], [4, 5], b'{"l":[1,3,4,5]}'),
        (b'{"l":[1,2]}', [0, 1], [4], b'{"l":[4]}'),
        (b'{"l":[ ]}', [], [4, 5], b'{"l":[4,5 ]}'),
    ],
)
def test_removals_and_additions_in_one_list_leave_valid_json(
    raw: bytes, gone: list[int], items: list[int], want: bytes
) -> None:
    edits: list[Edit] = [Remove(("l", i)) for i in gone]
    assert render(raw, *edits, *(AppendItem(("l",), item) for item in items)) == want


@pytest.mark.parametrize("raw", [b"{}", b" { } ", b'{"a":1\n}', b'\xef\xbb\xbf{"a":[1]}'])
def test_new_top_level_keys_stand_behind_the_others(raw: bytes) -> None:
    out = Body.parse(render(raw, SetKey((), "stream", True), SetKey((), "é", None)))
    assert list(out.data) == [*Body.parse(raw).data, "stream", "é"]
    assert out.raw.startswith(raw.rstrip(b" \n}"))


def test_a_byte_order_mark_stays() -> None:
    assert render(b'\xef\xbb\xbf {"a":[1]}', SetValue(("a", 0), 2)) == b'\xef\xbb\xbf {"a":[2]}'


def test_surrogates_written_as_utf8_survive_an_edit_beside_them() -> None:
    assert render(b'{"a":"\xed\xa0\x80","b":1}', SetValue(("b",), 2)) == b'{"a":"\xed\xa0\x80","b":2}'


def test_values_nested_deeper_than_the_interpreter_recurses_are_skipped() -> None:
    deep = b'[ "]", ' * 1000 + b"1" + b"]" * 1000
    assert render(b'{"a":' + deep + b',"b":1}', SetValue(("b",), 2)) == b'{"a":' + deep + b',"b":2}'


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"", "line 1, column 1"),
        (b'{"a":\n  nope}', "line 2, column 3"),
        (b'{"a":1} x', "line 1, column 9"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b'{"a":"\xff"}', "byte 6"),
        (b'{"a":"\xc3', "byte 6"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a":' + b"[" * 100_000, "nested deeper"),
        (b'{"a":"tab\there"}', "line 1, column 10"),
    ],
)
def test_what_is_no_json_object_is_a_bad_request_that_says_where(raw: bytes, where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Body.parse(raw)
    assert caught.value.code == "invalid_json"
    assert where in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b'{"a":"\\ud800"}', {"a": "\ud800"}),
        (b'{"a":1e999}', {"a": float("inf")}),
        (b'{"a":' + b"1" * 5000 + b"}", {"a": float("inf")}),
        (b'\xef\xbb\xbf{"a":1}', {"a": 1}),
    ],
)
def test_what_the_server_answers_for_itself_is_not_refused(raw: bytes, data: dict[str, Any]) -> None:
    assert Body.parse(raw).data == data


@pytest.mark.parametrize(
    "edit",
    [
        SetText(("b",), "x"),
        SetText(("a", 5), "x"),
        Remove(("c", "d")),
        SetKey(("a",), "k", 1),
        AppendItem(("o",), 1),
        SetText(("n", "x"), "x"),
    ],
)
def test_an_edit_that_leads_nowhere_is_an_error_in_both_views(edit: Edit) -> None:
    body = Body.parse(b'{"a":[1],"o":{},"n":1}')
    with pytest.raises(LookupError):
        body.render([edit])
    with pytest.raises(LookupError):
        edited(body.data, [edit])


def test_the_parsed_view_shares_what_is_not_edited_and_keeps_the_original() -> None:
    data: dict[str, Any] = {"a": [{"x": 1}, {"x": 2}], "b": {"c": 1}}
    before = json.dumps(data)
    out = edited(data, [SetValue(("a", 0, "x"), raw=b"[1.0]")])
    assert out == {"a": [{"x": [1.0]}, {"x": 2}], "b": {"c": 1}}
    assert out["b"] is data["b"]
    assert out["a"][1] is data["a"][1]
    assert json.dumps(data) == before


def test_many_edits_of_one_list_are_all_done() -> None:
    raw = orjson.dumps({"messages": [{"content": str(i)} for i in range(5000)]})
    edits: list[Edit] = [SetText(("messages", i, "content"), "x") for i in range(0, 5000, 2)]
    edits += [Remove(("messages", i)) for i in range(1, 5000, 2)]
    assert Body.parse(render(raw, *edits)).data == {"messages": [{"content": "x"}] * 2500}


def test_json_bytes_falls_back_where_orjson_refuses() -> None:
    assert json_bytes({"b": 1, "a": "é"}) == '{"b":1,"a":"é"}'.encode()
    assert json_bytes(["\ud800", 2**70]) == b'["\xed\xa0\x80",%d]' % 2**70


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b' {"a" : 1.0E-2 ,"b":2}', b"1.0E-2"),
        (b'\xef\xbb\xbf{"a":1,"\\u0061":{"n": 123456789012345678901}}', b'{"n": 123456789012345678901}'),
        (b'{"b":{"a":0},"a":"\\ud800"}', b'"\\ud800"'),
    ],
)
def test_a_member_is_the_clients_own_bytes(raw: bytes, value: bytes) -> None:
    assert Body.parse(raw).member("a") == value


def test_a_member_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Body.parse(b'{"b":{"a":0}}').member("a")
