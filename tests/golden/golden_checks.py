"""The vocabulary of the golden cases: what is checked of the bodies that go upstream. Requests count from 1.

`sent` is a client's body, `forwarded` what the proxy made of it. The head is every system or developer message before
any other, Anthropic's `system` and the Responses API's `instructions`. `rendered` is the whole prompt as one text, with
the tools behind the first system text. Each check returns None, or says in words what is wrong.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

Body = dict[str, Any]
Check = dict[str, Any]

HEAD = ("system", "developer")
TEXT = ("text", "input_text", "output_text")
PROMPT_KEYS = ("messages", "tools", "system", "instructions", "input", "prompt")
NEEDS_AN_UPSTREAM = ("slot_is", "cached", "max_concurrent")
"""Checks of slots and concurrency: nothing that a body alone could show."""


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text_of(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(
        part["text"] if part.get("type") in TEXT else f"<|{sha256(dump(part).encode()).hexdigest()[:16]}|>"
        for part in content
    )


def message_text(message: Body) -> str:
    out = text_of(message.get("content"))
    if message.get("reasoning_content"):
        out = f"<think>{message['reasoning_content']}</think>{out}"
    for call in message.get("tool_calls") or []:
        out += f"\n<tool_call>{call['function']['name']} {call['function'].get('arguments', '')}</tool_call>"
    return out


class View:
    """One body, whatever API it was written for, as messages and tools."""

    def __init__(self, path: str, body: Body) -> None:
        self.body = body
        self.tools: list[Any] = body.get("tools") or []
        self.messages = _messages(path, body)
        at = next((i for i, m in enumerate(self.messages) if m["role"] not in HEAD), len(self.messages))
        self.head, self.tail = self.messages[:at], self.messages[at:]
        self.users = [m for m in self.messages if m["role"] in ("user", "prompt")]

    def render(self, messages: list[Body] | None = None, *, closed: bool = True) -> str:
        messages = self.messages if messages is None else messages
        tools = "\n# Tools\n" + "\n".join(map(dump, self.tools)) if self.tools else ""
        out = "" if messages and messages[0]["role"] in HEAD else f"[system]{tools}[end]\n"
        for i, m in enumerate(messages):
            out += f"[{m['role']}]{message_text(m)}{tools if i == 0 and m['role'] in HEAD else ''}[end]\n"
        return out if closed else out.removesuffix("[end]\n")

    def region(self, where: str) -> str:
        if where == "any":
            return self.render()
        if where == "tools":
            return dump(self.tools)
        chosen = {"head": self.head, "user": self.users, "first_user": self.users[:1], "last_user": self.users[-1:]}
        return "\n".join(map(message_text, chosen[where]))


def _messages(path: str, body: Body) -> list[Body]:
    top = body.get("instructions") or body.get("system")
    out = [{"role": "system", "content": top}] if top else []
    if "prompt" in body:
        return [*out, {"role": "prompt", "content": body["prompt"]}]
    if path.endswith("/responses"):
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return out + [i if "role" in i else {"role": i["type"], "content": dump(i)} for i in items]
    return out + list(body["messages"])


@dataclass
class Run:
    """What one case sent, what was forwarded, and the answers that came back."""

    sent: dict[int, View]
    forwarded: dict[int, View]
    answers: dict[int, Body]
    marker: str | None = field(default=None)


def wrong(checks: Iterable[Check], run: Run) -> str | None:
    """The first thing that is wrong."""
    return next((f"{c['check']}: {why}" for c in checks if (why := _evaluated(c, run))), None)


def _evaluated(c: Check, run: Run) -> str | None:
    name = c["check"]
    if name in NEEDS_AN_UPSTREAM:
        return None
    if name in OVER_RUN:
        return OVER_RUN[name](c, run)
    ids = list(run.sent) if c.get("requests", "all") == "all" else c["requests"]
    if name in OVER_ALL:
        return OVER_ALL[name](run, ids)
    return next((f"request {i}: {why}" for i in ids if (why := ONE[name](c, run, i))), None)


def _differ(a: str, b: str) -> str | None:
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"differ at {at}: {a[max(0, at - 30) : at + 40]!r} against {b[max(0, at - 30) : at + 40]!r}"


def _untouched(c: Check, run: Run, i: int) -> str | None:
    sent, forwarded = run.sent[i].body, run.forwarded[i].body
    added = [key for key in PROMPT_KEYS if key in forwarded and key not in sent]
    if added:
        return f"{added[0]} was added"
    keys = [key for key in sent if key not in ("stream", "stream_options")]
    return next((why for k in keys if (why := _differ(dump(sent[k]), dump(forwarded.get(k))))), None)


def _order_kept(c: Check, run: Run, i: int) -> str | None:
    sent, at = run.sent[i].region("head"), 0
    for line in run.forwarded[i].region("head").split("\n"):
        for bit in [line] if sent.find(line, at) >= 0 else re.split(r"(?<=[.!?])\s+", line):
            found = sent.find(bit, at)
            if bit.strip() and found < 0:
                return f"the head holds {bit[:80]!r}, which was not sent there"
            at = found + len(bit) if bit.strip() else at
    return None


def _roles_equal(c: Check, run: Run, i: int) -> str | None:
    sent, forwarded = run.sent[i].messages, run.forwarded[i].messages
    roles = [[m["role"] for m in messages] for messages in (sent, forwarded)]
    if roles[0] != roles[1]:
        return f"roles are {roles[1]}, sent were {roles[0]}"
    pairs = zip(sent, forwarded, strict=True)
    return "an empty text was left" if any(_has_empty(b) and not _has_empty(a) for a, b in pairs) else None


def _has_empty(message: Body) -> bool:
    content = message.get("content")
    return any(p.get("text") == "" for p in content) if isinstance(content, list) else content == ""


def _conversation_preserved(c: Check, run: Run, i: int) -> str | None:
    sent, forwarded = run.sent[i].tail, run.forwarded[i].tail
    if len(sent) != len(forwarded):
        return f"{len(forwarded)} messages behind the head, sent were {len(sent)}"
    for a, b in zip(sent, forwarded, strict=True):
        if a == b:
            continue
        if a["role"] not in ("user", "prompt") or c.get("notes") is False or {**a, "content": 0} != {**b, "content": 0}:
            return _differ(dump(a), dump(b))
        note, why = _note(a["content"], b["content"])
        lines = note.strip("\n").split("\n")
        if why or not note.startswith("\n\n") or len(lines) < 2 or run.marker not in (None, lines[0]):
            return why or f"no note behind the seam: {note[:80]!r}"
        run.marker = lines[0]
    return None


def _note(old: Any, new: Any) -> tuple[str, str | None]:
    """What was appended to a message's content, or what is wrong with it."""
    if isinstance(old, str) and isinstance(new, str):
        return new[len(old) :], None if new.startswith(old) else _differ(old, new)
    if len(new) > len(old):
        return text_of(new[len(old) :]), None if new[: len(old)] == old else _differ(dump(old), dump(new))
    a, b = old[-1], new[-1]
    same = new[:-1] == old[:-1] and {**a, "text": 0} == {**b, "text": 0} and b["text"].startswith(a["text"])
    return b["text"][len(a["text"]) :] if same else "", None if same else _differ(dump(old), dump(new))


def _lossless(c: Check, run: Run, i: int) -> str | None:
    rendered, sent = run.forwarded[i].render(), "\n".join(map(message_text, run.sent[i].messages))
    for text in c.get("except", []):
        sent = sent.replace(text, "")
    for line, n in Counter(filter(str.strip, sent.split("\n"))).items():
        lost = _missing(line, rendered) if n == 1 else line if rendered.count(line) < n else None
        if lost:
            return f"lost: {lost[:120]!r}"
    return None


def _missing(text: str, rendered: str, cuts: tuple[str, ...] = (r"(?<=[.!?])\s+", r"\s*[|;,]\s+|\s{2,}")) -> str | None:
    """The first bit of `text` that is nowhere in `rendered`; it may be parted between sentences, then fields."""
    if not text.strip() or text.strip() in rendered:
        return None
    if not cuts:
        return text
    return next((lost for bit in re.split(cuts[0], text) if (lost := _missing(bit, rendered, cuts[1:]))), None)


def _contains(c: Check, run: Run, i: int) -> str | None:
    region, text = run.forwarded[i].region(c.get("where", "any")), c["text"]
    n = region.count(text)
    if n == 0 or n != c.get("count", n):
        return f"{c.get('where', 'any')}: {text[:90]!r} is there {n} times"
    fits = {"start": region.startswith, "end": region.endswith}.get(c.get("at", ""))
    return None if fits is None or fits(text) else f"{text[:90]!r} is not at its {c['at']}"


def _absent(c: Check, run: Run, i: int) -> str | None:
    found = c["text"] in run.forwarded[i].region(c.get("where", "any"))
    return f"{c.get('where', 'any')}: {c['text'][:90]!r} is still there" if found else None


def _tools_order(c: Check, run: Run, i: int) -> str | None:
    names = [tool.get("function", tool).get("name") for tool in run.forwarded[i].tools]
    return None if names == c["names"] else f"the tools are {names}"


def _last_role(c: Check, run: Run, i: int) -> str | None:
    role = run.forwarded[i].messages[-1]["role"]
    return None if role == c["role"] else f"the last message is {role}"


def _head_equal(run: Run, ids: list[int]) -> str | None:
    heads = ["\n".join(f"{m['role']}: {text_of(m['content'])}" for m in run.forwarded[i].head) for i in ids]
    return next((why for head in heads[1:] if (why := _differ(heads[0], head))), None)


def _tools_equal(run: Run, ids: list[int]) -> str | None:
    for i in ids:
        meant = [sorted(dump(_meaning(t)) for t in view.tools) for view in (run.sent[i], run.forwarded[i])]
        if meant[0] != meant[1]:
            return f"the tools of request {i} mean something else"
    spelled = [dump(run.forwarded[i].tools) for i in ids]
    return next((why for tools in spelled[1:] if (why := _differ(spelled[0], tools))), None)


def _meaning(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _meaning(value[k], k) for k in sorted(value)}
    if isinstance(value, list):
        return sorted(value) if key == "required" else [_meaning(v) for v in value]
    return value


def _extends(c: Check, run: Run) -> str | None:
    a, b = run.forwarded[c["from"]], run.forwarded[c["to"]]
    answered = len(b.messages) > len(a.messages) and b.messages[len(a.messages)]["role"] == "assistant"
    shorter = a.render(a.messages + ([run.answers[c["from"]]] if answered else []))
    return None if b.render().startswith(shorter) else _differ(shorter, b.render())


def _extends_before_note(c: Check, run: Run) -> str | None:
    a, own = run.forwarded[c["from"]], run.sent[c["from"]].users[-1]
    at = max(i for i, m in enumerate(a.messages) if m["role"] == "user")
    shorter = a.render([*a.messages[:at], own], closed=False)
    longer = run.forwarded[c["to"]].render()
    return None if longer.startswith(shorter) else _differ(shorter, longer)


def _any_of(c: Check, run: Run) -> str | None:
    whys = [wrong(option, run) for option in c["options"]]
    return None if None in whys else f"no alternative holds: {whys}"


ONE: dict[str, Callable[[Check, Run, int], str | None]] = {
    "untouched": _untouched,
    "order_kept": _order_kept,
    "roles_equal": _roles_equal,
    "conversation_preserved": _conversation_preserved,
    "lossless": _lossless,
    "contains": _contains,
    "absent": _absent,
    "tools_order": _tools_order,
    "last_role": _last_role,
}
OVER_ALL: dict[str, Callable[[Run, list[int]], str | None]] = {"head_equal": _head_equal, "tools_equal": _tools_equal}
OVER_RUN: dict[str, Callable[[Check, Run], str | None]] = {
    "extends": _extends,
    "extends_before_note": _extends_before_note,
    "any_of": _any_of,
}
