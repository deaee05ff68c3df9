import subprocess
import sys
from collections import defaultdict

from training.data import python_docs

DIGEST = (
    "import hashlib; from training.data import python_docs; "
    "print(hashlib.sha256(repr([(p.group, p.messages) for p in python_docs.pairs()]).encode()).hexdigest())"
)


def test_thousands_of_pairs_of_a_question_and_an_answer() -> None:
    pairs = python_docs.pairs()
    assert len(pairs) > 3000
    assert sum(len(text) for text in python_docs.texts()) > 1_000_000
    for pair in pairs:
        assert [message["role"] for message in pair.messages] == ["user", "assistant"]
        assert pair.messages[0]["content"].endswith("?")
        assert 40 <= len(pair.messages[1]["content"]) <= 1500
        assert pair.messages[1]["content"].strip()


def test_no_answer_twice_and_questions_say_what_they_ask_for() -> None:
    pairs = python_docs.pairs()
    answers = [pair.messages[1]["content"] for pair in pairs]
    questions = [pair.messages[0]["content"] for pair in pairs]
    assert len(set(answers)) == len(answers)
    assert len(set(questions)) > 0.95 * len(questions)


def test_known_entries() -> None:
    by_question = {pair.messages[0]["content"]: pair.messages[1]["content"] for pair in python_docs.pairs()}
    assert "first character capitalized" in by_question["What does `str.capitalize()` do in Python?"]
    assert (
        "Assert statements" in by_question["What does the Python reference say about The assert statement?"]
    )
    assert by_question["What does `os.chdir` do in Python?"].startswith(
        "Change the current working directory"
    )


def test_a_section_is_one_group() -> None:
    groups: dict[str, list[str]] = defaultdict(list)
    for pair in python_docs.pairs():
        assert pair.group is not None
        groups[pair.group].append(str(pair.messages[0]["content"]))
    assert len(groups["section string methods"]) > 40
    assert len(groups) > 1000


def test_same_pairs_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
