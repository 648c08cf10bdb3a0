"""Rule files: what is read, what is refused and how; what the rules know, and what they must leave alone."""

from __future__ import annotations

import re
import tomllib

import pytest
from prompting import head_text, prompt_of

from prefixproxy.errors import UsageError
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.volatile.examples import failure
from prefixproxy.volatile.files import builtin_files, builtin_fragments, load_rules
from prefixproxy.volatile.patterns import PatternError, check_cost, compiled
from prefixproxy.volatile.rules import STATEMENTS, Rule

RULES = load_rules()
AGENT = "You are a coding agent. Read files before you change them. Keep changes small."

GOOD = """
[[rule]]
name = "shift"
where = "line"
pattern = 'shift:\\s\\w{1,20}'
treatment = "move"
evidence = "labelled"
why = "The night shift."
"""


EXAMPLE = 'example = { before = "%s", after = "%s", note = "%s" }\nwhy = "The'


def cut_at_first_sight(head: str) -> bool:
    return head_text(Stabiliser(RULES).apply(prompt_of(head, "u:Hi"), 0.0).prompt) != head


def moved(*heads: str) -> list[str]:
    """What each of these requests tells in its note; each has another question."""
    stabiliser = Stabiliser(RULES)
    done = [stabiliser.apply(prompt_of(head, f"u:Question {i}"), float(i)) for i, head in enumerate(heads)]
    return ["\n".join(one.notes) for one in done]


# Files


def test_a_users_file_adds_a_rule_and_another_setting_takes_it_away() -> None:
    assert "shift" in {r.name for r in load_rules([("mine.toml", GOOD)]).rules}
    assert "shift" not in {r.name for r in load_rules([("mine.toml", GOOD)], frozenset({"shift"})).rules}
    assert "clock" not in {r.name for r in load_rules(disabled=frozenset({"clock"})).rules}


def test_the_number_of_a_rule_without_a_name_is_told() -> None:
    nameless = GOOD.replace('name = "shift"', "")
    with pytest.raises(UsageError, match=r"mine\.toml: rule 2: name: missing"):
        load_rules([("mine.toml", GOOD + nameless)])


def test_an_example_that_comes_out_is_accepted_and_that_of_a_disabled_rule_not_run() -> None:
    good = GOOD.replace('why = "The', EXAMPLE % ("Shift: night\\nBe kind.", "Be kind.", "Shift: night"))
    later = GOOD.replace(
        'why = "The',
        'example = { earlier = "A\\nShift: x\\nB", before = "A\\nShift: y\\nB", after = "A\\nB" }\nwhy = "The',
    )
    bad = GOOD.replace('why = "The', EXAMPLE % ("x", "y", ""))
    for text, disabled in ((good, ""), (later, ""), (bad, "shift")):
        assert load_rules([("mine.toml", text)], frozenset({disabled} - {""})).rules


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.name)
def test_our_own_examples_come_out_as_users_must(rule: Rule) -> None:
    assert failure(rule, RULES) == ""


def test_a_users_rule_acts() -> None:
    stabiliser = Stabiliser(load_rules([("mine.toml", GOOD)]))
    done = stabiliser.apply(prompt_of(f"Shift: night\n{AGENT}", "u:Hi"), 0.0)
    assert (head_text(done.prompt), done.notes, done.relocations[0].rule) == (AGENT, ("Shift: night",), "shift")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "shift"', "", r"mine\.toml: rule 1: name: missing"),
        ('where = "line"', 'where = "everywhere"', r"mine\.toml: rule 'shift': where: must be one of"),
        ('where = "line"', "", r"rule 'shift': where: missing; one of"),
        ('treatment = "move"', 'treatment = "drop"', r"rule 'shift': treatment: must be one of"),
        ('treatment = "move"', 'treatment = "strip"', r"rule 'shift': treatment: must be \"strip\" where"),
        ('evidence = "labelled"', "evidence = 3", r"rule 'shift': evidence: must be one of"),
        ('why = "The night shift."', 'why = ""', r"rule 'shift': why: must be a text"),
        ('why = "The night shift."', 'why = "a\\nb"', r"rule 'shift': why: must be one line"),
        ('why = "The night shift."', 'because = "x"', r"rule 'shift': because: unknown field"),
        ("pattern = 'shift:\\s\\w{1,20}'", "pattern = '('", r"rule 'shift': pattern: it is no regular expression"),
        ("pattern = 'shift:\\s\\w{1,20}'", "pattern = 'x*'", r"rule 'shift': pattern: it matches the empty text"),
        ("pattern = 'shift:\\s\\w{1,20}'", "pattern = '(a+)+b'", r"rule 'shift': pattern: it nests a repeat"),
        ("pattern = 'shift:\\s\\w{1,20}'", "pattern = '(?&nothing)'", r"rule 'shift': pattern: there is no fragment"),
        ('where = "line"', 'where = "fence"\nvalue = "x"', r"rule 'shift': value: has no meaning where"),
        ('where = "line"', 'where = "section"', r"rule 'shift': body: where = \"section\" needs"),
        ('where = "line"', 'where = "labelled_value"', r"rule 'shift': value: missing"),
        ('where = "line"', 'where = "line"\nidentity = "strict"', r"rule 'shift': identity: the pattern has no group"),
        ('where = "line"', 'where = "line"\nneeds = "shift"', r"rule 'shift': needs: must be a list of texts"),
        ('where = "line"', 'where = "line"\nexample = { before = "x" }', r"rule 'shift': example: must be a table"),
        (
            "[[rule]]",
            "[[companion]]\nname = 3\npattern = 'x'\n[[rule]]",
            r"mine\.toml: companion 1: name: must be a text",
        ),
        (
            'why = "The',
            EXAMPLE % ("Shift: night\\nBe kind.", "Be kind.", "night"),
            r"rule 'shift': example: the note is",
        ),
        ('why = "The', EXAMPLE % ("Shift:\\nBe kind.", "Be kind.", ""), r"rule 'shift': example: .* finds nothing"),
        ('why = "The', EXAMPLE % ("A\\nShift: x\\nB", "A\\nB", ""), r"rule 'shift': example: .* waits for `earlier`"),
        ("[[rule]]", "[rule]", r"mine\.toml: rule: must be \[\[rule\]\] tables"),
        ("[[rule]]", "[[rules]]", r"mine\.toml: rules: unknown"),
        ("[[rule]]", "[[rule", r"mine\.toml: this is no TOML"),
        ('name = "shift"', 'name = "clock"', r"mine\.toml: rule 'clock': name: another rule has this name"),
    ],
)
def test_what_is_wrong_is_named_by_file_rule_and_field(old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError, match=complaint):
        load_rules([("mine.toml", GOOD.replace(old, new))])


def test_a_file_named_like_ours_is_checked_like_any_other() -> None:
    with pytest.raises(UsageError, match="nests a repeat"):
        load_rules([("rules/hermes.toml", GOOD.replace("shift:\\s\\w{1,20}", "(a+)+b"))])


def test_a_rule_that_cannot_be_disabled_is_named() -> None:
    with pytest.raises(UsageError, match=r"stabilise\.disabled: there is no rule 'clok'"):
        load_rules(disabled=frozenset({"clok"}))


# Patterns


@pytest.mark.parametrize("pattern", [r"(a*)*b", r"(a|b*)+c", r"(?:x\w{1,9}){2,}", r"(?:\s*\w*)*"])
def test_nested_repeats_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="nests"):
        check_cost(re.compile(pattern))


@pytest.mark.parametrize("pattern", [".*a.*b", "(?:a?){20}b", "a?" * 20, r"(?:a|b|ab){18}", r"(?=.*a.*b.*c)x"])
def test_patterns_with_too_many_ways_to_match_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="too many ways"):
        check_cost(re.compile(pattern))


@pytest.mark.parametrize("pattern", [r"(\w)\1", r"(a)?(?(1)b|c)"])
def test_back_references_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="refers back"):
        check_cost(re.compile(pattern))


@pytest.mark.parametrize("pattern", [r"shift:\s.*", r"(?:\w{1,9}+;){1,8}+x", r"(?>a*)b.{0,9}", r"(?:ab){2,5}c?"])
def test_patterns_with_few_ways_to_match_are_taken(pattern: str) -> None:
    check_cost(re.compile(pattern))


def test_fragments_in_a_circle_are_refused() -> None:
    with pytest.raises(PatternError, match="circle"):
        compiled("(?&a)", {"a": "(?&b)", "b": "(?&a)"})


def test_every_pattern_of_ours_keeps_to_the_bound() -> None:
    fragments, n = builtin_fragments(), 0
    for _, text in builtin_files():
        for table in [t for tables in tomllib.loads(text).values() for t in tables]:
            for key in {
                "pattern",
                "mention",
                "doubt",
                "value",
                "inside",
                "lead",
                "body",
                "until",
                "names_lane",
            } & table.keys():
                check_cost(compiled(table[key], fragments))
                n += 1
    assert n > 60


# Rules


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.name)
def test_the_example_of_a_rule_is_what_it_does(rule: Rule) -> None:
    example = rule.example
    assert example is not None
    stabiliser = Stabiliser(RULES)
    if example.earlier:
        seen = stabiliser.apply(prompt_of(example.earlier, "u:One"), 0.0)
        assert head_text(seen.prompt) == example.earlier
    done = stabiliser.apply(prompt_of(example.before, "u:Two"), 1.0)
    assert head_text(done.prompt) == example.after
    assert "\n".join(done.notes) == example.note
    assert [r.rule for r in done.relocations] == [rule.name]


def test_every_rule_needs_the_evidence_it_names() -> None:
    for rule in RULES.rules:
        assert rule.example is not None
        if rule.evidence == "observed":
            assert rule.example.earlier, rule.name
        if rule.where in STATEMENTS and rule.needs:
            told = (rule.example.note or rule.example.before).lower()
            assert any(word in told for word in rule.needs), rule.name


CLOCKS = """Current time: 20:37
Current Time: 8:37:19 PM
Current date and time: Saturday, March 14, 2026 at 20:37:19 CET
Current date/time is 03/14/2026 08:37 PM (Central European Standard Time).
The current UTC time is 2026-03-14T20:37:19Z.
The current time in Oslo is 20:37.
The time is 8:37 p.m.
It is currently Saturday, 14 March 2026, 20:37 CET.
It's 8:37 PM on Saturday, March 14, 2026.
Now is 2026-03-14T20:37:19+01:00.
Right now it is 20:37:19.
Today is Saturday, March 14, 2026 at 8:37 PM.
Today's date is 2026-03-14 and the current time is 20:37:19.
Date and time: Sat, 14 Mar 2026 20:37:19 +0100
Local time: Sat Mar 14 20:37:19 CET 2026
User's local time: 20:37:19 (Europe/Oslo)
Server time (UTC): 2026-03-14 20:37:19
Current time in ISO 8601 UTC format: 2026-03-14T10:00:00.000Z
current_datetime: 2026-03-14T20:37:19.123456
currentTime = "2026-03-14T20:37:19Z"
[Current time: 2026-03-14 20:37 CET]
**Current time:** 20:37 CET
- Current date and time: 14/03/2026 20:37:19
# Current time: 20:37:19
Note: the current time is 20:37.
Current timestamp: 1773520639
Unix time: 1773520639123
Timestamp: 2026-03-14T20:37:19Z
Time: 2026-03-14 20:37:19
Date: 2026-03-14 | Time: 20:37:19
Conversation started: Sunday, April 26, 2026 03:15 PM
Session started at 2026-03-14 15:15 UTC.
<current_time>20:37:19</current_time>
<timestamp>2026-03-14T20:37:19Z</timestamp>
Aktuelle Uhrzeit: Samstag, 14. März 2026, 20:37 Uhr
Heure actuelle : samedi 14 mars 2026 à 20h37
Fecha y hora actual: sábado, 14 de marzo de 2026, 20:37:19
Data e hora atual: 14/03/2026 20:37
Ora corrente: 20:37:19
Huidige tijd: 20:37:19
当前时间：2026年3月14日 20:37:19
現在の日時: 2026年3月14日(土) 20時37分
현재 시간: 2026년 3월 14일 20:37:19
Current timestamp 2026-03-14T20:37:19Z
The time is now 20:37.
Current time: Sat 14 Mar 20:37:19 CET 2026
Şu anki zaman: 14.03.2026 20:37:19
Nykyinen aika: 14.3.2026 20:37:19
Nykyinen aika: 14.3.2026 klo 20.37.19
Nykyinen aika: lauantai 14.3.2026 klo 20.37
Nuvarande tid: 14.3.2026 kl. 20.37
Aktuální čas: 14.03.2026 20:37:19
Aktuální čas: 14. 3. 2026 20:37:19
Aktuální čas: sobota 14. 3. 2026, 20:37
Current time: 14.03.2026 20.37.19
Thời gian hiện tại: 14/03/2026 20:37:19
वर्तमान समय: 14/03/2026 20:37:19
الوقت الحالي: 14/03/2026 20:37:19
Waktu saat ini: 14/03/2026 20:37:19
Поточний час: 14.03.2026 20:37:19""".split("\n")

IDS = """Lane: red
lane_id=3
Lane 3 of 5
Lane: 3/5
Lane: red | 2026-03-14 10:00:00
Run id: run-77  Lane: 1 of 5  Session: 5e0c1f3a-0000-4000-8000-000000000001
[lane=red] [run=77] [10:00:01]
[lane 3/5 · run run-77 · 10:02:11]
Run 77 / lane 3 / 2026-03-14 10:00
Session ID: abc
Your session id is s-12.
Thread: thread_abc123
thread_id=abc run_id=xyz
Conversation ID: conv-9
Request ID: req_01
X-Request-ID: 8f3a9c12
message_id: 4821
Trace ID: 4bf92f3577b34da6a3ce929d0e0e4736
Worker: 3 of 5
Agent ID: agent-7
Session 5e0c1f3a started at 10:00:00""".split("\n")


@pytest.mark.parametrize("line", [*CLOCKS, *IDS])
def test_a_labelled_line_acts_at_first_sight_on_either_border(line: str) -> None:
    for head in (f"{line}\n{AGENT}", f"{AGENT}\n\n{line}"):
        done = Stabiliser(RULES).apply(prompt_of(head, "u:Hi"), 0.0)
        assert (head_text(done.prompt), done.notes) == (AGENT, (line,))


BARE_LABELS = ("Time:", "Date: ")
"""Believed at the border only."""


@pytest.mark.parametrize("line", [line for line in (*CLOCKS, *IDS) if not line.startswith(BARE_LABELS)])
def test_a_labelled_line_inside_the_head_waits_until_it_was_seen_to_change(line: str) -> None:
    changed = line.translate(str.maketrans("1379", "2488")).replace("red", "blue").replace("abc", "def")
    assert changed != line
    one, two = (f"{AGENT}\n{value}\nBe brief." for value in (line, changed))
    assert moved(one, two, two) == ["", changed, changed]


DATES = """Today's date: 2026-03-14
Today's date is March 14, 2026.
Today is Saturday, 14 March 2026.
Current date: Sat Mar 14 2026
The date is 14.03.2026.
Heute ist Samstag, 14. März 2026.
今天是2026年3月14日""".split("\n")


@pytest.mark.parametrize("line", DATES)
def test_a_date_without_a_time_moves_once_seen_to_change(line: str) -> None:
    changed = line.replace("14", "15")
    one, two = (f"{value}\n{AGENT}" for value in (line, changed))
    assert moved(one, one, two, two) == ["", "", changed, changed]


SENTENCES = [
    ("You are X. Current time is 10:00:01. Be brief.\nMore.", "Current time is 10:00:01."),
    (
        "You are X. It is now 10:00:01 on Saturday, March 14, 2026. Be brief.",
        "It is now 10:00:01 on Saturday, March 14, 2026.",
    ),
    ("Help the user (they are busy). The current time is 8:01 p.m. Be brief.", "The current time is 8:01 p.m."),
]


@pytest.mark.parametrize(("head", "sentence"), SENTENCES)
def test_a_sentence_that_is_nothing_but_the_statement_moves_alone(head: str, sentence: str) -> None:
    other = sentence.replace("01", "02")
    assert moved(head, head.replace(sentence, other)) == ["", other]


def test_a_sentence_at_the_border_of_the_head_acts_at_first_sight() -> None:
    assert moved("Current time is 10:00:01. You are X.") == ["Current time is 10:00:01."]
    assert moved("You are X. The current time is 10:00:01.") == ["The current time is 10:00:01."]


def test_blocks_leave_whole_with_what_introduces_them() -> None:
    lead = "Here is useful information about the environment:"
    block = f"# Environment\n\n{lead}\n<env>\n  Working directory: /srv/%s\n</env>"
    head = f"{AGENT}\n\n{block}\n\n# Rules\nBe brief."
    assert moved(head % "a", head % "b") == ["", block % "b"]


def test_a_git_snapshot_ends_where_it_ends() -> None:
    block = (
        "gitStatus: This is the git status at the start of the conversation.\nCurrent branch: %s\n\nMain branch: "
        'main\n\nGit user: Ann\n\nStatus:\n M a.py\nR  b.py -> "c d.py"\n?? e/\n\nRecent commits:\n0a1b2c3 Start'
    )
    head = f"{AGENT}\n\n{block}\n\nA commit needs a reason.\nNever push."
    stabiliser = Stabiliser(RULES)
    stabiliser.apply(prompt_of(head % "main", "u:One"), 0.0)
    done = stabiliser.apply(prompt_of(head % "topic", "u:Two"), 1.0)
    assert done.notes == (block % "topic",)
    assert head_text(done.prompt).split() == f"{AGENT}\n\nA commit needs a reason.\nNever push.".split()


def test_an_instruction_that_leads_to_a_block_stays() -> None:
    block = "<env>\n  Working directory: /srv/%s\n</env>"
    for lead in ("You are an agent. Here is your environment:", "Never leave the workspace of this environment:"):
        head = f"{AGENT}\n{lead}\n{block}\nBe brief."
        assert moved(head % "a", head % "b") == ["", block % "b"]


def test_what_is_doubtful_moves_once_seen_to_change() -> None:
    head = f"%s You are on duty.\n{AGENT}"
    assert moved(head % "It is 11:45 PM.", head % "It is 11:46 PM.") == ["", "It is 11:46 PM."]
    head = f"{AGENT}\n\nSession ID: %s"
    assert moved(head % "none", head % "s-18") == ["", "Session ID: s-18"]


def test_a_heading_stays_where_more_stands_below_it() -> None:
    head = "# Context\n<env>\n  Working directory: /srv/%s\n</env>\nMore context.\n\n# Rules\nBe brief."
    assert moved(head % "a", head % "b")[1].startswith("<env>")


def test_a_value_below_its_heading_leaves_alone_where_more_text_follows_it() -> None:
    head = f"{AGENT}\n\n## Current Time\n2026-03-14 10:00:0%d\nUse it for reminders.\n\n## Rules\nBe brief."
    assert moved(head % 1, head % 2) == ["", "2026-03-14 10:00:02"]
    alone = head.replace("Use it for reminders.\n", "")
    assert moved(alone % 1, alone % 2) == ["", "## Current Time\n2026-03-14 10:00:02"]


def test_two_clocks_block_first_sight_only() -> None:
    head = f"Current time: 10:00:0%d\n{AGENT}\nLocal time: 11:00:0%d"
    assert moved(head % (1, 1), head % (1, 2), head % (2, 2)) == [
        "",
        "Local time: 11:00:02",
        "Current time: 10:00:02\nLocal time: 11:00:02",
    ]


NEVER = {
    "contract": (AGENT + "\n<contract>\nSigned at 10:00:0%d\nCurrent date: 2024-03-0%d\n</contract>",),
    "document": (AGENT + "\n<document>\nCurrent time: 10:00:0%d\n</document>",),
    "fence": (AGENT + "\n```\nCurrent time: 10:00:0%d\n```",),
    "open fence": (AGENT + "\n~~~yaml\nlane: %d\nsession_id: s-%d",),
    "docstring": (AGENT + '\n"""\nCurrent time: 10:00:0%d\n"""',),
    "quotation": (AGENT + "\n> Current time: 10:00:0%d",),
    "quoted": (AGENT + '\nIf asked, say "Current time: 10:00:0%d".',),
    "abbreviation": (AGENT + "\nThe tool returns e.g. Current time: 10:00:0%d.",),
    "few shot": (AGENT + "\n\nExamples:\nUser: wake me\nCurrent time: 10:00:0%d",),
    "dialogue": (AGENT + "\nUser: wake me\nCurrent time: 10:00:0%d\nAssistant: done",),
    "instruction": (AGENT + "\nPass session_id=s-%d in every call and write below /runs/lane-%d.",),
    "use of an id": ("Session s-%d: write results to /runs/s-%d/.\n" + AGENT,),
    "role": (AGENT + "\nPretend the current time is 10:00:0%d.",),
    "document date": (AGENT + "\nEffective date: 2024-03-0%d\nParties: A and B",),
    "mail": (AGENT + "\nAuthor: Ann\nDate: 2026-03-14 10:0%d\nSubject: maps",),
    "deadline": (AGENT + "\nDeadline: 2026-03-14 10:0%d",),
    "schedule": ("Opening time: 0%d:00\n" + AGENT,),
    "transcript": (AGENT + "\n00:01:1%d --> 00:01:15\nhello",),
    "log": (AGENT + "\n2026-03-14T10:41:0%dZ INFO start",),
    "version": (AGENT + "\nVersion: 1.2.%d",),
    "code": (AGENT + "\nstart = datetime(2024, 1, %d)",),
    "agenda": (AGENT + "\n\nToday's meetings:\n- 10:0%d standup",),
    "table": (AGENT + "\n| Current time | 10:0%d |",),
    "quoted sentence": (AGENT + "\nSay «Good day. It is now 10:00:0%d. Sit down.» to each.",),
    "bracketed order": (AGENT + "\nCurrent time: 10:00:0%d (never read it out)",),
    "code in a line": (AGENT + "\nStart with `Log. Current time is 10:00:0%d. End.` each time.",),
    "behind e.g.": (AGENT + "\nIt opens with a stamp, e.g.\nCurrent time: 10:00:0%d",),
    "paper": (AGENT + "\n\n# Minutes\nDate: 2026-03-1%d\nAll agreed.",),
    "letter": (AGENT + "\n\nTo: Ann\nDate: 2026-03-1%d\nDear Ann",),
    "quotation of lines": (AGENT + '\nSay "Good day.\nCurrent time: 10:00:0%d\nGoodbye."',),
    "ticket": (AGENT + "\n<ticket>\nRequest ID: 471%d\n</ticket>",),
    "format fence": (AGENT + '\n\nReturn request metadata like this:\n```json\n{"message_id": "%d"}\n```',),
    "steps": (AGENT + "\nStep %d\nCut the paper.",),
    "order": ("Order number: 1234%d\n" + AGENT,),
    "commit": (AGENT + "\nBase commit: 9f8e7d%d",),
    "prose": ("It is %d:00 PM and the rain falls.\n" + AGENT,),
    "one word": ("Session: morning yoga %d\n" + AGENT,),
    "json": (AGENT + '\nAnswer like {"request_id": "r-%d", "time": "12:00:0%d"}',),
}


@pytest.mark.parametrize("head", [h for heads in NEVER.values() for h in heads], ids=list(NEVER))
def test_what_only_looks_volatile_stays_even_when_it_changes(head: str) -> None:
    n = head.count("%d")
    assert moved(*(head % ((i,) * n) for i in (1, 2, 3))) == ["", "", ""]


ONCE = [
    AGENT + "\nAnswer like this:\nrequest_id: r-1\ntime: 12:00:00",
    AGENT + "\n\nOutput format:\nSession: s-1\nTime: 12:00:00",
    AGENT + "\n\nExamples:\nUser: wake me\n\nCurrent time: 07:00",
    "You are a clerk in 1924. The current time is 09:00. Stay in that moment.\n" + AGENT,
    AGENT + "\nKnowledge cutoff: 2024-06\nCurrent date: 2026-03-14",
    AGENT + "\nCurrent time: 09:00:00\nThe line to Leipzig is open.",
    "It is 11:45 PM. You are a watchman.\n" + AGENT,
    "Es ist 23:45 Uhr. Du bist ein Nachtwächter.\n" + AGENT,
    AGENT + "\n\nAgent: gpt-4",
    AGENT + "\n\nNode: 22",
    AGENT + "\n\nRun: python3.12",
    AGENT + "\n\nThread: none",
    AGENT + "\n\nLane: ____",
    AGENT + "\n\nThe worker id is unknown.",
    "Message 4\n" + AGENT,
    AGENT + "\n\nCurrent date: 10.03.24",
    AGENT + "\n\nmeta:\n  request_id: r-1\n  timestamp: 2026-03-14T20:37:19Z",
]


@pytest.mark.parametrize("head", ONCE)
def test_what_may_be_an_example_or_a_role_does_not_act_at_first_sight(head: str) -> None:
    assert not cut_at_first_sight(head)


def test_a_text_full_of_clocks_is_a_log() -> None:
    head = "\n".join(f"Current time: 10:{i // 60:02}:{i % 60:02}" for i in range(600))
    assert not cut_at_first_sight(head)


def test_a_head_with_more_spans_than_a_head_has_is_a_table() -> None:
    table = f"{AGENT}\n" + "\n".join(f"Current time: 10:00:%02d\nRow {i}." for i in range(200))
    assert moved(*(table % ((i,) * 200) for i in (1, 2))) == ["", ""]


HOSTILE = [
    "current " * 80 + ":",
    "the current date and time is " + "2026-" * 90,
    "Lane: " + "a" * 480 + " |",
    "1 1 1 1 " * 64,
    "Current time: " + "(" * 400,
    "x-anthropic-billing-header: " + "a=b; " * 90,
    "Session: " + "s-1 | Session: " * 30,
    "Mon " * 128,
    "Today is " + "March " * 80,
    ". " * 300 + "Current time is 10:00 x",
    "<env" + " a" * 200 + ">",
    "# " * 250,
    "10:00:00 " * 55,
    "\u3000" * 300 + "10:00",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_hostile_lines_by_the_thousand_are_read_in_bounded_time(line: str) -> None:
    head = "\n".join(f"{line}{i}" for i in range(1500)) + "\n" + line * 200
    assert not Stabiliser(RULES).apply(prompt_of(head, "u:Hi"), 0.0).edits


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "rule = []\n"])
def test_a_file_without_a_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^mine\.toml: there is no rule in it"):
        load_rules([("mine.toml", text)])
