from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from training.submit.log_lines import LogParser, lines_of_rank, parse_line

PREFIX = "\x1b[36m(RayTrainWorker pid=452, ip=10.244.2.3)\x1b[0m "
GROUP = [
    "(TrainController pid=300) Started training worker group of size 2: ",
    "(TrainController pid=300) - (ip=10.244.2.3, pid=452) world_rank=0, local_rank=0, node_rank=0",
    "(TrainController pid=300) - (ip=10.244.3.5, pid=452) world_rank=1, local_rank=0, node_rank=1",
]


def feed(*lines: str) -> LogParser:
    parser = LogParser()
    parser.feed("".join(f"{line}\n" for line in lines).encode())
    return parser


def test_colours_and_rays_prefix_are_read() -> None:
    line = parse_line(PREFIX + 'x @finetune {"event": "progress", "step": 3}')
    assert (line.actor, line.pid, line.ip) == ("RayTrainWorker", 452, "10.244.2.3")
    assert line.event == {"event": "progress", "step": 3}


def test_a_line_without_prefix_is_the_drivers() -> None:
    assert parse_line("(not a prefix) hello").pid is None


def test_damaged_events_are_text() -> None:
    for raw in ('@finetune {"event": "pro', "@finetune [1]", '@finetune {"step": 1}', "@finetune "):
        assert parse_line(raw).event is None


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=("Cs",))), max_size=8),
    st.data(),
)
def test_lines_do_not_depend_on_where_the_bytes_were_cut(lines: list[str], data: st.DataObject) -> None:
    raw = "".join(f"{line}\n" for line in lines).encode()
    whole = [line.text for line in LogParser().feed(raw)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    parser, pieces = LogParser(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        pieces += [line.text for line in parser.feed(raw[start:end])]
    assert pieces == whole


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    parser = LogParser()
    parser.feed(data)
    parser.close()
    parser.first_failure()


def test_ranks_are_told_by_address_and_process() -> None:
    parser = LogParser()
    text = [*GROUP, PREFIX + "from zero", "(RayTrainWorker pid=452, ip=10.244.3.5) from one"]
    lines = parser.feed("".join(f"{line}\n" for line in text).encode())
    assert lines_of_rank(lines, parser, 1) == ["from one"]
    assert lines_of_rank(lines, parser, 0) == ["from zero"]


def failure(rank: int, error: str, **more: object) -> str:
    return "@finetune " + json.dumps(
        {"event": "failure", "rank": rank, "host": f"w{rank}", "error": error, **more}
    )


def test_the_cause_comes_before_its_consequences() -> None:
    parser = feed(
        failure(0, "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234"),
        failure(1, "Traceback (most recent call last):\n  File 'loop.py'\nValueError: row 7 is empty"),
    )
    first = parser.first_failure()
    assert first is not None
    assert (first.rank, first.host) == (1, "w1")
    assert first.text.endswith("ValueError: row 7 is empty")
    assert first.headline() == "First failure: rank 1 on w1"


def test_of_two_causes_the_earlier_one_wins() -> None:
    parser = feed(failure(0, "ValueError: late", time=20.0), failure(1, "ValueError: early", time=10.0))
    first = parser.first_failure()
    assert first is not None
    assert first.text == "ValueError: early"


def test_without_an_event_the_first_traceback_is_taken_from_mixed_lines() -> None:
    one = "(RayTrainWorker pid=452, ip=10.244.3.5) "
    parser = feed(
        *GROUP,
        PREFIX + "Traceback (most recent call last):",
        one + "Traceback (most recent call last):",
        PREFIX + '  File "loop.py", line 1, in train',
        one + '  File "loop.py", line 9, in train',
        PREFIX + "torch.distributed.DistBackendError: NCCL error",
        one + "KeyError: 'text'",
        one + "something else",
    )
    first = parser.first_failure()
    assert first is not None
    assert first.rank == 1
    assert (
        first.text
        == "Traceback (most recent call last):\n  File \"loop.py\", line 9, in train\nKeyError: 'text'"
    )


def test_nothing_failed() -> None:
    assert feed(*GROUP).first_failure() is None
