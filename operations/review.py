"""What a change does to a stack, as one comment for a pull request: price, policies, resources, and the preview.

A snapshot is the recorded graph of a settings file (no cloud, no credentials), so that a fork gets the same report less
the preview. The workflow takes one of the base branch and one of the change, each with its own code:

    python -m operations.review snapshot Pulumi.dev.yaml > after.json
    python -m operations.review comment --before before.json --after after.json --preview preview.txt > comment.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from infra.cost import UnknownPriceError, price
from infra.recorder import CRD, Graph, record
from infra.settings import SettingsError, read_settings_file
from policy.rules import RULES, STACK_RULES, Seen

# By which the workflow finds its own comment and edits it.
MARKER = "<!-- efa-finetune: what this change does -->"
# GitHub refuses a comment of more than 65,536 characters.
MAX_COMMENT = 60_000
MAX_CHANGES = 200

Json = dict[str, Any]


def snapshot(path: Path) -> Json:
    """Price, violated policies and resources of a settings file; `error` where it has mistakes."""
    found: Json = {"stack": path.name.removeprefix("Pulumi.").removesuffix(path.suffix), "error": None}
    try:
        settings = read_settings_file(path)
    except SettingsError as error:
        return {**found, "error": str(error)}
    graph = record(settings)
    try:
        cost = price(settings).to_dict() if settings.on_aws else None
        unpriced = None
    except UnknownPriceError as error:
        cost, unpriced = None, str(error)
    return {
        **found,
        "cost": cost,
        "unpriced": unpriced,
        "violations": list(_violations(graph)),
        "resources": {f"{one.type} {one.name}": _inputs(one.type, one.inputs) for one in graph.resources},
    }


def _inputs(type_: str, inputs: Mapping[str, Any]) -> Any:
    """What a reviewer compares: a CRD, 300 kB of schema, by its digest."""
    plain = json.loads(json.dumps(inputs, default=str))
    if type_ == CRD:
        return {"sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}
    return plain


def _violations(graph: Graph) -> Iterator[Json]:
    seen = [
        Seen(one.type, one.name, one.inputs, one.provider.rpartition("::")[0].rpartition("::")[2])
        for one in graph.resources
        if one.custom
    ]
    for rule in RULES:
        for resource in seen:
            for violation in rule.violations(resource):
                yield {"policy": rule.name, "mandatory": rule.mandatory, "text": violation}
    for rule in STACK_RULES:
        for violation in rule.check(seen):
            yield {"policy": rule.name, "mandatory": True, "text": violation}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Lines of a diff: resources that come (+), go (-) or change (~) with each changed property."""
    lines: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            lines.append(f"+ {key}")
        elif key not in after:
            lines.append(f"- {key}")
        elif before[key] != after[key]:
            lines.append(f"~ {key}")
            lines += [f"    {line}" for line in _differences("", before[key], after[key])]
    return lines


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        left, right = cast("Json", old), cast("Json", new)
        for key in sorted(left.keys() | right.keys()):
            yield from _differences(f"{path}.{key}" if path else key, left.get(key), right.get(key))
    elif (
        isinstance(old, list)
        and isinstance(new, list)
        and len(cast("list[Any]", old)) == len(cast("list[Any]", new))
    ):
        for index, (one, other) in enumerate(
            zip(cast("list[Any]", old), cast("list[Any]", new), strict=True)
        ):
            yield from _differences(f"{path}[{index}]", one, other)
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def comment(pairs: Sequence[tuple[Json | None, Json]], previews: Mapping[str, str] | None = None) -> str:
    """The comment in Markdown. `pairs`: per stack the snapshot before (None: there was none) and after.
    `previews`: what ``pulumi preview`` said, by stack."""
    sections = [_section(before, after, (previews or {}).get(after["stack"])) for before, after in pairs]
    head = f"{MARKER}\n## What this change does\n"
    room = (MAX_COMMENT - len(head)) // max(1, len(sections)) - 1
    return head + "\n".join(_cut(section, room) for section in sections)


def _cut(section: str, room: int) -> str:
    if len(section) <= room:
        return section
    end = "\n```\n</details>\n\nThis part is cut: the log of the workflow has all of it.\n"
    return section[: room - len(end)] + end


def _section(before: Json | None, after: Json, preview: str | None) -> str:
    lines = [f"### Stack {after['stack']}", ""]
    if after["error"]:
        return "\n".join([*lines, "The settings have mistakes:", "", "```text", after["error"], "```", ""])
    known = before if before and not before["error"] else None
    lines += [*_price_lines(known, after), "", *_policy_lines(after), ""]
    difference = changes(known["resources"], after["resources"]) if known else []
    if known is None:
        lines += [f"{len(after['resources'])} resources; there is nothing to compare them with.", ""]
    elif not difference:
        lines += ["The program registers the same resources as before.", ""]
    else:
        shown = difference[:MAX_CHANGES]
        if len(difference) > len(shown):
            shown.append(f"... and {len(difference) - len(shown)} lines more")
        lines += _details(f"Resources of the program: {_counts(difference)}", "diff", "\n".join(shown))
    if preview is not None:
        lines += _details("pulumi preview --diff", "text", preview.strip())
    return "\n".join(lines)


def _counts(difference: Sequence[str]) -> str:
    signs = [line[0] for line in difference]
    return f"{signs.count('+')} come, {signs.count('-')} go, {signs.count('~')} change"


def _details(summary: str, language: str, body: str) -> list[str]:
    safe = body.replace("```", "'''")
    return ["<details>", f"<summary>{summary}</summary>", "", f"```{language}", safe, "```", "</details>", ""]


def _price_lines(before: Json | None, after: Json) -> list[str]:
    if after["unpriced"]:
        return ["Price: not known.", "", "```text", after["unpriced"], "```"]
    if after["cost"] is None:
        return ["Price: nothing; the cluster is somebody else's."]
    old = _by_name(before["cost"]) if before and before["cost"] else None
    new = _by_name(after["cost"])
    if old is None:
        return [f"Price: **{after['cost']['hourly_usd']:.2f} USD an hour**."]
    was = sum(old.values())
    total = sum(new.values())
    table = ["| USD an hour | before | after | change |", "|---|---:|---:|---:|"]
    table += [
        f"| {name} | {_usd(old.get(name))} | {_usd(new.get(name))} | {_change(old.get(name), new.get(name))} |"
        for name in sorted(old.keys() | new.keys(), key=lambda name: -max(old.get(name, 0), new.get(name, 0)))
        if old.get(name) != new.get(name)
    ]
    table.append(f"| **all of it** | **{was:.2f}** | **{total:.2f}** | **{_change(was, total)}** |")
    return table


def _by_name(cost: Json) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in cost["lines"]:
        found[line["name"]] = found.get(line["name"], 0.0) + line["hourly_usd"]
    return found


def _usd(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _change(old: float | None, new: float | None) -> str:
    difference = (new or 0.0) - (old or 0.0)
    return "none" if abs(difference) < 0.00005 else f"{difference:+.4f}"


def _policy_lines(after: Json) -> list[str]:
    violations = after["violations"]
    if not violations:
        return [f"Policies: all {len(RULES) + len(STACK_RULES)} hold."]
    lines = [f"Policies: **{len(violations)} violated**", ""]
    return lines + [
        f"- {'' if one['mandatory'] else '(advice) '}`{one['policy']}`: {one['text']}" for one in violations
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1: a settings file has mistakes or a mandatory policy is violated; the comment says which."""
    parser = argparse.ArgumentParser(prog="python -m operations.review")
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("snapshot")
    take.add_argument("settings", type=Path, nargs="+")
    write = commands.add_parser("comment")
    write.add_argument("--before", type=Path, help="snapshots of the base; left out where it has none")
    write.add_argument("--after", type=Path, required=True)
    write.add_argument(
        "--preview", action="append", default=[], metavar="STACK=FILE", help="what the preview said"
    )
    options = parser.parse_args(arguments)
    if options.command == "snapshot":
        sys.stdout.write(json.dumps([snapshot(path) for path in options.settings]) + "\n")
        return 0
    after = json.loads(options.after.read_text(encoding="utf-8"))
    before = {one["stack"]: one for one in _read_optional(options.before)}
    previews = {
        stack: Path(file).read_text(encoding="utf-8")
        for stack, _, file in (one.partition("=") for one in options.preview)
    }
    sys.stdout.write(comment([(before.get(one["stack"]), one) for one in after], previews))
    refused = [
        one["stack"] for one in after if one["error"] or any(v["mandatory"] for v in one["violations"])
    ]
    return 1 if refused else 0


def _read_optional(path: Path | None) -> list[Json]:
    """An older base has no such module and leaves an empty file."""
    if path is None or not path.is_file() or not path.read_text(encoding="utf-8").strip():
        return []
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
