"""Reads a folder of NCCL logs into facts per process, in one pass and in memory that does not grow with the
logs.

Lines are attributed by the ``host:pid`` that NCCL prints in front, so a file may hold several processes in
any interleaving. Every fact keeps the file and line number where it was first seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from training.transport import diagnosis, nccl_lines
from training.transport.evidence import Evidence
from training.transport.nccl_lines import Channel

LOG_GLOB = "*.log"
_CHUNK_BYTES = 1 << 20
#: NCCL builds a line in 1024 bytes plus its arguments; a line beyond this is no NCCL line.
_MAX_LINE_BYTES = 1 << 16
_MAX_CACHED_PREFIXES = 4096
_MAX_DAMAGED = 20
_INFO = b" NCCL INFO "
_WARN = b" NCCL WARN "
_RAY_DEDUPLICATION = re.compile(rb"\[repeated \d+x across cluster\]")

Process = tuple[str, int]


@dataclass(slots=True)
class CommunicatorView:
    """A communicator as one of its processes printed it.

    ``identity`` is equal on all ranks of the communicator and differs between communicators, as far as the
    NCCL version prints enough for that; None when it prints nothing.
    """

    identity: tuple[str, ...] | None
    rank: int
    size: int
    num_started: int = 0
    num_completed: int = 0
    evidence: Evidence | None = None

    @property
    def is_root(self) -> bool:
        """Whether it was not split from another one."""
        return self.identity is not None and "split" not in self.identity


@dataclass(slots=True)
class ChannelLine:
    """A channel line of one process, how often it was printed, and where first."""

    channel: Channel
    number: tuple[int, int]
    evidence: Evidence
    count: int = 1


@dataclass(slots=True)
class ChannelGroup:
    """Equal channels of one process: how often each (channel, connection) number was printed."""

    evidence: Evidence
    numbers: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])


@dataclass(slots=True)
class ProcessLog:
    """What one process logged."""

    process: Process
    first_line: Evidence
    providers: dict[str, Evidence] = field(default_factory=dict[str, Evidence])
    networks: dict[str, Evidence] = field(default_factory=dict[str, Evidence])
    num_network_lines: int = 0
    communicators: dict[tuple[tuple[str, ...] | None, int, int], CommunicatorView] = field(
        default_factory=dict[tuple[tuple[str, ...] | None, int, int], CommunicatorView]
    )
    #: Messages about network channels, with how often and where first. A process has few different ones.
    channel_lines: dict[bytes, ChannelLine] = field(default_factory=dict[bytes, "ChannelLine"])
    num_nodes: int = 0
    symptoms: dict[str, Evidence] = field(default_factory=dict[str, Evidence])
    plugin_version: str | None = None
    pointers: dict[bytes, CommunicatorView] = field(default_factory=dict[bytes, CommunicatorView])

    def channels(self) -> dict[Channel, ChannelGroup]:
        """The network channels, those that differ only in their number taken together."""
        channels: dict[Channel, ChannelGroup] = {}
        for line in self.channel_lines.values():
            channels.setdefault(line.channel, ChannelGroup(line.evidence)).numbers[line.number] += line.count
        return channels

    @property
    def num_communicators(self) -> int:
        return sum(max(c.num_started, c.num_completed) for c in self.communicators.values())


@dataclass(slots=True)
class LogSet:
    """All logs of one attempt."""

    processes: dict[Process, ProcessLog] = field(default_factory=dict[Process, ProcessLog])
    files: list[str] = field(default_factory=list[str])
    #: Sentences about files and lines that are not whole: cut off, glued together, collapsed, unreadable.
    damage: list[str] = field(default_factory=list[str])
    symptoms: dict[str, Evidence] = field(default_factory=dict[str, Evidence])
    nccl_version: str | None = None
    num_bytes: int = 0

    def report_damage(self, sentence: str) -> None:
        if len(self.damage) < _MAX_DAMAGED:
            self.damage.append(sentence)


def read_logs(directory: Path) -> LogSet:
    """Read every ``*.log`` of a folder, in name order."""
    logs = LogSet()
    for path in sorted(directory.glob(LOG_GLOB)):
        try:
            _FileReader(logs, path).read()
        except OSError as error:
            logs.report_damage(f"{path.name} cannot be read: {error.strerror or error}")
    return logs


class _FileReader:
    def __init__(self, logs: LogSet, path: Path) -> None:
        self.logs = logs
        self.path = path
        self.line_number = 0
        self.by_prefix: dict[bytes, ProcessLog] = {}
        self.last_prefix = b""
        self.last_process: ProcessLog | None = None

    def read(self) -> None:
        self.logs.files.append(self.path.name)
        for lines in self._chunks():
            self._read_lines(lines)

    def _chunks(self) -> Iterator[list[bytes]]:
        """Lists of whole lines without their line ends."""
        rest = b""
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                self.logs.num_bytes += len(chunk)
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > _MAX_LINE_BYTES:
                    self.logs.report_damage(
                        f"{self.path.name} holds a line of more than {_MAX_LINE_BYTES} bytes"
                    )
                    rest = rest[-_MAX_LINE_BYTES:]
                yield lines
        if rest:
            self.logs.report_damage(f"{self.path.name} is cut off: its last line has no line end")
            yield [rest]

    def _read_lines(self, lines: list[bytes]) -> None:
        # The loop of the reader: neighbours mostly have the same prefix, and most lines decide nothing.
        number = self.line_number
        prefix, process = self.last_prefix, self.last_process
        length = len(prefix)
        for line in lines:
            number += 1
            if process is None or not line.startswith(prefix):
                self.line_number = number
                in_front, separator, _ = line.partition(_INFO)
                if not separator:
                    if line:
                        self._other_line(line)
                    continue
                process = self._process(in_front, line)
                if process is None:
                    continue
                prefix = in_front + separator
                length = len(prefix)
            message = line[length:]
            kind = message[:5]
            if b" via NET/" in message:
                known = process.channel_lines.get(message)
                if known is not None:
                    known.count += 1
                else:
                    self.line_number = number
                    self._channel(process, message, line)
            elif kind in _KINDS or _INFO in message:
                self.line_number = number
                self._info(process, kind, message.rstrip(), line)
        self.line_number = number
        self.last_prefix, self.last_process = prefix, process

    def _process(self, prefix: bytes, line: bytes) -> ProcessLog | None:
        known = self.by_prefix.get(prefix)
        if known is not None:
            return known
        match = nccl_lines.PREFIX.search(prefix)
        if match is None:
            self.logs.report_damage(f"{self._where()} has no host and process id in front: {_text(line)}")
            return None
        key = (match.group(1).decode(), int(match.group(2)))
        process = self.logs.processes.get(key)
        if process is None:
            process = self.logs.processes[key] = ProcessLog(key, self._evidence(line))
        if len(self.by_prefix) >= _MAX_CACHED_PREFIXES:
            self.by_prefix.clear()
        self.by_prefix[prefix] = process
        if len(nccl_lines.PREFIX.findall(prefix)) > 1:
            self._glued(line)
        return process

    def _info(self, process: ProcessLog, kind: bytes, message: bytes, line: bytes) -> None:
        if _INFO in message or _WARN in message:
            self._glued(line)
        if b"[repeated " in message and _RAY_DEDUPLICATION.search(message):
            self._collapsed()
        elif kind == b"Using":
            if message.startswith(b"Using network"):
                self._network(process, message, line)
        elif kind == b"NET/O" and b"elected" in message[:20]:
            self._provider(process, message, line)
        elif kind == b"NET/O" and (match := nccl_lines.PLUGIN_VERSION.match(message)):
            process.plugin_version = match["version"].decode()
        elif b"- Init " in message:
            self._communicator(process, message, line)
        elif kind == b"comm ":
            if match := nccl_lines.TOPOLOGY.match(message):
                process.num_nodes = max(process.num_nodes, int(match["nodes"]))
        elif kind == b"NCCL " and (match := nccl_lines.VERSION.match(message)):
            self.logs.nccl_version = match["version"].decode()
        else:
            self._symptom(process.symptoms, message, line)

    def _channel(self, process: ProcessLog, message: bytes, line: bytes) -> None:
        parsed = nccl_lines.parse_channel(message.rstrip())
        if parsed is not None:
            process.channel_lines[message] = ChannelLine(*parsed, self._evidence(line))
        elif _RAY_DEDUPLICATION.search(message):
            self._collapsed()
        else:
            self.logs.report_damage(f"{self._where()} is a network channel of an unknown form: {_text(line)}")

    def _collapsed(self) -> None:
        self.logs.report_damage(f"{self._where()} stands for several lines that a log collector collapsed")

    def _network(self, process: ProcessLog, message: bytes, line: bytes) -> None:
        match = nccl_lines.NETWORK.fullmatch(message)
        if match is None:
            self.logs.report_damage(f"{self._where()} names no network: {_text(line)}")
            return
        process.num_network_lines += 1
        name = match["network"].decode()
        if name not in process.networks:
            process.networks[name] = self._evidence(line)

    def _provider(self, process: ProcessLog, message: bytes, line: bytes) -> None:
        match = nccl_lines.PROVIDER.fullmatch(message)
        if match is None:
            self.logs.report_damage(f"{self._where()} names a provider in an unknown form: {_text(line)}")
            return
        name = match["provider"].decode()
        if name not in process.providers:
            process.providers[name] = self._evidence(line)

    def _communicator(self, process: ProcessLog, message: bytes, line: bytes) -> None:
        match = nccl_lines.COMMUNICATOR.fullmatch(message)
        if match is None:
            self.logs.report_damage(f"{self._where()} is a communicator of an unknown form: {_text(line)}")
            return
        pointer, rank, size = match["pointer"], int(match["rank"]), int(match["size"])
        view = process.pointers.get(pointer)
        started = match["phase"] == b"START"
        if view is None or (view.rank, view.size) != (rank, size) or started:
            identity = self._identity(process, match["details"])
            view = process.communicators.get((identity, rank, size))
            if view is None:
                view = CommunicatorView(identity, rank, size, evidence=self._evidence(line))
                process.communicators[identity, rank, size] = view
            process.pointers[pointer] = view
        if started:
            view.num_started += 1
        else:
            view.num_completed += 1

    def _identity(self, process: ProcessLog, details: bytes) -> tuple[str, ...] | None:
        """commId for a communicator of its own; parent, split count and color for a part of another.

        Splits print a parent pointer that is only good inside the process, so it is replaced by the parent's
        identity. NCCL before 2.22 prints the same commId for every split, hence the color.
        """
        found = {
            key.decode(): value.decode() for key, value in nccl_lines.COMMUNICATOR_DETAIL.findall(details)
        }
        own = tuple(f"{key} {found[key]}" for key in ("commId", "splitCount", "color") if key in found)
        if "parent" not in found:
            return own or None
        parent = process.pointers.get(found["parent"].encode())
        return None if parent is None or parent.identity is None else (*parent.identity, "split", *own)

    def _other_line(self, line: bytes) -> None:
        """A line that is no NCCL INFO: a warning, the version banner, libfabric, or something that broke."""
        prefix, separator, message = line.partition(_WARN)
        if separator:
            process = self._process(prefix, line)
            symptoms = self.logs.symptoms if process is None else process.symptoms
            if _WARN in message:
                self._glued(line)
            self._symptom(symptoms, message, line)
        elif match := nccl_lines.VERSION.match(line):
            self.logs.nccl_version = match["version"].decode()
        elif b"via NET/" in line or b"Using network" in line or b"elected provider" in line.lower():
            self.logs.report_damage(f"{self._where()} is only a part of a line: {_text(line)}")
        else:
            self._symptom(self.logs.symptoms, line, line)

    def _glued(self, line: bytes) -> None:
        self.logs.report_damage(f"{self._where()} holds more than one log line: {_text(line)}")

    def _symptom(self, symptoms: dict[str, Evidence], message: bytes, line: bytes) -> None:
        kind = diagnosis.symptom_of(message)
        if kind is not None and kind not in symptoms:
            symptoms[kind] = self._evidence(line)

    def _evidence(self, line: bytes) -> Evidence:
        return Evidence(file=self.path.name, line=self.line_number, text=_text(line))

    def _where(self) -> str:
        return f"{self.path.name}:{self.line_number}"


#: First five bytes of the INFO messages, other than channels, that say something about the network.
_KINDS = frozenset(
    (
        *(b"Using", b"NET/O", b"NET/P", b"NET/S", b"NET/I", b"ncclC", b"comm ", b"[Rank", b"Faile", b"Boots"),
        *(b"NCCL_", b"NCCL "),
    )
)


def _text(line: bytes) -> str:
    return line[:300].decode("utf-8", errors="replace").strip()
