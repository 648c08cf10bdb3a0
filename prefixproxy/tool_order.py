"""Whether a prompt speaks of tools by their place in the list ("the first tool"): then the list keeps its order.

English is read closely, as most prompts are English. In other languages a noun for tools and a word of rank in one
sentence are enough: wordings differ more than nouns do, and a list left alone costs time, never an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prefixproxy.prompt import Prompt, Role

_ORDINALS = frozenset(
    "first second third fourth fifth sixth seventh eighth ninth tenth last final top topmost bottom "
    "former latter earlier later earliest".split()
) | {f"{n}{'th' if n % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}" for n in range(1, 200)}
_FILLERS = frozenset("of the these those your my our all listed available given one ones two three few".split())
_MAX_FILLERS = 4
_ARRANGEMENTS = frozenset({"order", "sequence", "position"})
_USER_MENTION = re.compile("tools?")
_HEAD_MENTION = re.compile("(?:tool|function)s?")
_MAX_MENTIONS = 3000
_NOT_THE_TOOL = re.compile(r"\s+(?:call|use|using|result|response|output|invocation|turn)")
_NUMBERED = re.compile(
    r"\s{0,4}(?:#\s{0,4}|no\.?\s{0,4}|nr\.?\s{0,4}|number\s{1,4})?(?:[0-9]{1,3}|one|two|three|four|five)\b"
)
_ARRANGED_HINTS = ("order", "list", "come", "stand", "turn", "index", "left", "bottom")
_ARRANGED = re.compile(
    r"[^.\n]{0,40}?\b(?:in\s{1,4}(?:(?:the|this|that|their)\s{1,4})?(?:[a-z]{1,12}\s{1,4})?order\b"
    r"|(?:listed|comes?|stands?)\s{1,4}(?:first|second|third|last)\b"
    r"|(?:top|bottom|end|start|beginning)\s{1,4}of\s{1,4}(?:the|this|your)\s{1,4}list\b"
    r"|(?:are|were|is)\s{1,4}ordered\b|in\s{1,4}turn\b|at\s{1,4}index\s{1,4}[0-9]"
    r"|left\s{1,4}to\s{1,4}right\b|top\s{1,4}to\s{1,4}bottom\b)"
)

_TOOLS_ANYWHERE = (
    "werkzeug", "verktyg", "verktøy", "værktøj", "gereedschap", "инструмент", "інструмент", "εργαλεί", "工具", "ツール",
    "道具", "도구", "أداة", "أدوات", "כלי", "उपकरण", "เครื่องมือ",
)  # fmt: skip
"""Nouns for tools, in lower case and as far as their endings leave them; also inside of compounds."""
_TOOLS = (
    "tool", "outil", "herramient", "strument", "ferrament", "hulpmiddel", "narzędzi", "nástroj", "unealt", "unelte",
    "työkalu", "eszköz", "araç", "araci", "công cụ",
)  # fmt: skip
"""The same, at the beginning of a word."""
_FUNCTIONS = (
    "funktion", "fonction", "función", "funcion", "funzion", "funç", "functie", "funkcj", "funcți", "функци", "функці",
    "函数", "函數", "関数", "함수",
)  # fmt: skip
"""Functions are tools in a head; a user who speaks of them means code."""
_RANKED = re.compile(
    r"\berste[nrsm]?\b|\bzweite|\bdritte|\bvierte|\bletzte|\bobers?te|\bunters?te|reihenfolge|nacheinander"
    r"|der reihe nach|\bpremi[eè]re?s?\b|\bdeuxi[eè]me|\bsecond[eaio]\b|\btroisi[eè]me|\bderni[eè]r|\bordre\b"
    r"|\bprimer[oa]?\b|\bsegund[oa]|\btercer|\b[uú]ltim[oaie]s?\b|\borden\b|\bprim[oai]\b|\bterz[oa]\b|\bordine\b"
    r"|\bprimeir|\bterceir|\bordem\b|\beerste|\btweede|\bderde|\blaatste|volgorde|\bförsta|\bandra\b|\btredje"
    r"|\bsista\b|ordning\b|\bførste|\banden\b|\bsidste|\bsiste\b|rækkefølge|rekkefølge|\bpierwsz|\bdrugi|\btrzeci"
    r"|\bostatni|kolejno|\bprvn|\bdruh|\btřet|\bposledn|pořad|\bprimul|\bordinea|\bперв|\bвтор|\bтрет|\bпоследн"
    r"|поряд|\bочеред|\bперш|\bдруг|\bостанн|\bensimmäi|\btoi[ns]|\bviimei|järjesty|\belső|\bmásodik|\butolsó"
    r"|sorrend|πρώτ|δεύτερ|τελευτ|σειρά|birinci|ikinci|\bsıra|\bilk\s|đầu tiên|thứ (?:tự|nhất|hai)|第|首|最后|最後"
    r"|最初|顺序|順序|順番|順に|依次|次序|番目|첫|번째|마지막|순서|차례|الأول|الثاني|الأخير|ترتيب|ראשו|אחרו|סדר|पहल|क्रम|แรก|ลำดับ"
)
"""Words that rank things or speak of their order."""
_SENTENCE_END = re.compile(r"(?<!\d)[.!?;](?=\s)|\n|[。！？；]")
_NUMBER_BEHIND = re.compile(r"[^\W\d]{0,6}\s{0,3}(?:#|nr\.?|n[.º°]|№)?\s{0,3}[0-9]{1,3}\b")
_NUMBER_BEFORE = re.compile(r"[0-9]{1,3}(?:[.ºª°]|er?|ème|e)\s{1,3}$")
_REACH = 100
"""Characters of its sentence on each side of a noun that are looked at."""


def refers_to_positions(prompt: Prompt) -> bool:
    """Whether the head or a user speaks of tools by their place in the list ("the first tool", "tool 2"). A text with
    thousands of mentions is not searched to its end, and counts as one that does."""
    n_head = len(prompt.head)
    mentions = 0
    for i, message in enumerate(prompt.messages):
        if i >= n_head and message.role is not Role.USER:
            continue
        word = _HEAD_MENTION if i < n_head else _USER_MENTION
        for part in message.texts:
            text = part.text.lower()
            if _is_ranked_elsewhere(text, _TOOLS + _FUNCTIONS if i < n_head else _TOOLS):
                return True
            for found in word.finditer(text):
                mentions += 1
                if mentions > _MAX_MENTIONS or _is_placed(text, *found.span()):
                    return True
    return False


def _is_placed(text: str, start: int, end: int) -> bool:
    """Whether the "tools" at text[start:end] is a word of its own, with its place in a list said before or behind."""
    if text[end : end + 1].isalpha():
        return False
    behind = text[end : end + 80]
    if _NUMBERED.match(behind):
        return not text[max(0, start - 1) : start].isalnum()
    if any(hint in behind for hint in _ARRANGED_HINTS) and _ARRANGED.match(behind):
        return True
    if not text[max(0, start - 1) : start].isspace() or _NOT_THE_TOOL.match(behind):
        return False
    words = [word.lstrip("\"'`*_([") for word in text[max(0, start - 60) : start].split()[-_MAX_FILLERS - 1 :]]
    skipped = 0
    while words and (words[-1] in _FILLERS or words[-1].isdecimal()):
        words.pop()
        skipped += 1
    return bool(words) and (words[-1] in _ORDINALS or (skipped > 0 and words[-1] in _ARRANGEMENTS))


def _is_ranked_elsewhere(text: str, beginnings: tuple[str, ...]) -> bool:
    """The same in any language but English, whose own words are read more closely."""
    for noun in (*_TOOLS_ANYWHERE, *beginnings):
        for number, (start, end) in enumerate(_places(text, noun), 1):
            before, behind = text[max(0, start - _REACH) : start], text[end : end + _REACH]
            numbered = noun != "tool" and (_NUMBER_BEFORE.search(before[-12:]) or _NUMBER_BEHIND.match(behind))
            if number > _MAX_MENTIONS or numbered or _RANKED.search(_sentence(before, behind)):
                return True
    return False


def _places(text: str, noun: str) -> Iterator[tuple[int, int]]:
    start = text.find(noun)
    while start >= 0:
        end = start + len(noun)
        if noun in _TOOLS_ANYWHERE or not noun.isascii() or not text[max(0, start - 1) : start].isalpha():
            yield start, end
        start = text.find(noun, end)


def _sentence(before: str, behind: str) -> str:
    """What stands around a noun, up to the ends of its sentence."""
    *_, own = _SENTENCE_END.split(before)
    return f"{own} {_SENTENCE_END.split(behind, maxsplit=1)[0]}"
