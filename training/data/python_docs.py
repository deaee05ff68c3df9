"""The built-in source: questions and answers from the documentation that every Python carries.

Two bodies of text, read at run time: the language reference that `help()` shows (`pydoc_data.topics`), cut
into sections and entries, and the docstrings of standard modules. The pairs depend on the Python version
alone. Pairs from one section, or of one docstring, share a group, so that a held-out split never sees half of
one.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache

from training.data.formats import Conversation, exchange

# Modules that import quickly and without side effects on every platform.
_MODULES = """
    argparse array ast asyncio base64 bisect builtins calendar cmath collections collections.abc
    concurrent.futures configparser contextlib copy csv dataclasses datetime decimal difflib dis
    email.message enum fnmatch fractions functools glob graphlib gzip hashlib heapq hmac html http.client
    inspect io ipaddress itertools json keyword linecache locale logging math mimetypes numbers operator os
    os.path pathlib pickle platform pprint queue random re sched secrets selectors shelve shlex shutil
    signal socket stat statistics string struct subprocess sys tarfile tempfile textwrap threading time
    timeit tokenize traceback types typing unicodedata unittest unittest.mock urllib.parse urllib.request
    uuid warnings weakref xml.etree.ElementTree zipfile zlib
""".split()  # noqa: SIM905 - a list of ninety lines otherwise

_HEADING = re.compile(r"(?m)^(?P<title>\S.*)\n(?P<rule>[*=\-~^\"])(?P=rule){2,}$")
_CODE = re.compile(r'"([^"\n]{1,40})"')
_RULE = re.compile(r"[=\-+*]{5,}")
_ENTRY = re.compile(r"(?s)(?P<names>\S[^\n]*(?:\n\S[^\n]*)*)\n\n(?P<body>   .*)")
_MAX_ANSWER = 700  # characters, about 200 tokens: several pairs share a row of a small model
_MIN_ANSWER = 40


@cache
def pairs() -> tuple[Conversation, ...]:
    """Every question with its answer, in a fixed order, no answer twice."""
    seen: set[str] = set()
    unique: list[Conversation] = []
    for question, answer, group in (*_reference(), *_docstrings()):
        if len(answer) >= _MIN_ANSWER and answer not in seen:
            seen.add(answer)
            unique.append(exchange(question, answer, group=group))
    return tuple(unique)


def texts() -> list[str]:
    """The questions and answers as plain text, to train a tokenizer on."""
    return [str(message["content"]) for pair in pairs() for message in pair.messages]


def _reference() -> Iterator[tuple[str, str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        for title, text in _sections(str(topics[name])):
            group = f"section {title.lower()}"
            prose: list[str] = []
            for block in _blocks(text):
                entry = _ENTRY.fullmatch(block)
                if entry is None or not _is_signature(entry["names"]):
                    prose.append(block)
                    continue
                yield from _entry(entry["names"], textwrap.dedent(entry["body"]), title, group)
            for part, answer in enumerate(_chunks("\n\n".join(prose))):
                yield _prose_question(title, answer, first=part == 0), answer, group


def _sections(text: str) -> Iterator[tuple[str, str]]:
    headings = list(_HEADING.finditer(text))
    for index, heading in enumerate(headings):
        end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
        yield heading["title"].replace('"', ""), text[heading.end() : end].strip("\n")


def _blocks(text: str) -> list[str]:
    """Paragraphs, an unindented one together with the indented ones that belong to it."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.strip() or _RULE.fullmatch(paragraph.strip()):
            continue
        if paragraph.startswith("   ") and blocks:
            blocks[-1] += f"\n\n{paragraph}"
        else:
            blocks.append(paragraph.rstrip())
    return blocks


def _is_signature(names: str) -> bool:
    """Whether unindented lines name what the indented ones below explain, and are no sentence before an example."""
    lines = names.splitlines()
    return len(lines) <= 6 and not any(
        line.endswith((".", ":", ",", ";")) or len(line) > 75 or ("(" not in line and len(line.split()) > 4)
        for line in lines
    )


def _entry(names: str, body: str, title: str, group: str) -> Iterator[tuple[str, str, str]]:
    signatures = " / ".join(line.strip() for line in names.splitlines())
    for part, answer in enumerate(_chunks(body)):
        if part == 0 and "(" in signatures:
            yield f"What does `{signatures}` do in Python?", answer, group
        elif part == 0:
            yield f"What does the Python reference on {title} say about {signatures}?", answer, group
        else:
            yield f"What more is there to know about `{signatures}`{_about(answer)}?", answer, group


def _prose_question(title: str, answer: str, *, first: bool) -> str:
    if first:
        return f"What does the Python reference say about {title}?"
    return f"What else does the Python reference on {title} explain{_about(answer)}?"


def _about(answer: str) -> str:
    """A hint at what part of the subject an answer covers: the first names it quotes, else how it begins."""
    names = list(dict.fromkeys(_CODE.findall(answer)))[:3]
    if names:
        return " about " + ", ".join(f"`{name}`" for name in names)
    return f' after "{" ".join(answer.split()[:5])}"'


def _chunks(text: str) -> Iterator[str]:
    """Whole paragraphs up to _MAX_ANSWER characters; a longer paragraph is cut between lines."""
    chunk = ""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.rstrip().splitlines()
        pieces = [paragraph.rstrip()] if len(paragraph) <= _MAX_ANSWER else lines
        for number, piece in enumerate(pieces):
            joint = "\n\n" if number == 0 else "\n"
            if chunk and len(chunk) + len(piece) > _MAX_ANSWER:
                yield textwrap.dedent(chunk).strip("\n")
                chunk = piece
            else:
                chunk = f"{chunk}{joint}{piece}" if chunk else piece
    if chunk.strip():
        yield textwrap.dedent(chunk).strip("\n")


def _docstrings() -> Iterator[tuple[str, str, str]]:
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(vars(module)):
            value = vars(module)[name]
            if name.startswith("_") or not callable(value) or getattr(value, "__module__", None) is None:
                continue
            owner = module_name if module_name != "builtins" else ""
            qualified = f"{owner}.{name}".lstrip(".")
            yield from _documented(qualified, value, "do" if inspect.isroutine(value) else "represent")
            if inspect.isclass(value):
                for member_name in sorted(vars(value)):
                    member = vars(value)[member_name]
                    if not member_name.startswith("_") and inspect.isroutine(
                        getattr(value, member_name, None)
                    ):
                        yield from _documented(f"{qualified}.{member_name}", member, "do")


def _documented(qualified: str, value: object, verb: str) -> Iterator[tuple[str, str, str]]:
    """Questions on the docstring that an object holds itself, not on one that it inherits."""
    doc = getattr(value, "__doc__", None)
    if not isinstance(doc, str):
        return
    for part, answer in enumerate(_chunks(inspect.cleandoc(doc))):
        if part == 0:
            yield f"What does `{qualified}` {verb} in Python?", answer, f"docstring {qualified}"
        else:
            yield (
                f"What more is there to know about `{qualified}`{_about(answer)}?",
                answer,
                f"docstring {qualified}",
            )
