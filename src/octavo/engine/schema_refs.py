"""The references of a JSON Schema: what they lead to, and whether they ever come to an end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from octavo.errors import InvalidRequestError

Schema = dict[str, Any]

IN_PLACE = ("anyOf", "oneOf", "allOf")  # lists of schemas for the same value
LISTS = (*IN_PLACE, "prefixItems")  # of schemas
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # from a name to a schema
SINGLES = ("items", "additionalItems", "additionalProperties")  # one schema


def refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", "structured_outputs")


def bad_value(keyword: str, value: object, path: str, wanted: str) -> InvalidRequestError:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return refusal(f"the JSON schema's {keyword} at {path} is {shown}, it must be {wanted}")


def children(node: Schema, path: str) -> Iterator[tuple[Any, str]]:
    """The schemas directly inside a schema."""
    for keyword in SINGLES:
        if keyword in node and not isinstance(node[keyword], list):
            yield node[keyword], f"{path}/{keyword}"
    for keyword in (*LISTS, "items"):
        if isinstance(node.get(keyword), list):
            for index, schema in enumerate(node[keyword]):
                yield schema, f"{path}/{keyword}/{index}"
    for keyword in MAPS:
        for name, schema in node.get(keyword, {}).items():
            yield schema, f"{path}/{keyword}/{name}"


def resolve(root: Schema, reference: object, path: str) -> Any:
    """What a ``$ref`` points at; it must be a JSON pointer into the same schema."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        raise bad_value("$ref", reference, path, "a pointer into the schema itself (#/...)")
    node: Any = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise refusal(f"$ref {reference!r} at {path} points at nothing")
    return node


def check_finite(root: Schema) -> None:
    """Refuse a schema that applies itself to the same value, or every instance of which contains
    another one without end."""
    targets: dict[str, Any] = {}
    inner: dict[str, set[str]] = {}  # the references inside each target
    in_place: dict[str, set[str]] = {}  # those of them that apply to the same value
    todo = _references(root, deep=True)
    while todo:
        reference = todo.pop()
        if reference not in targets:
            targets[reference] = resolve(root, reference, "#")
            inner[reference] = _references(targets[reference], deep=True)
            in_place[reference] = _references(targets[reference], deep=False)
            todo |= inner[reference]
    try:
        TopologicalSorter(in_place).prepare()
    except CycleError as cycle:
        raise refusal(
            f"the JSON schema has no finite instance: $ref {cycle.args[1][0]!r} applies itself to "
            "the same value again"
        ) from None

    users: dict[str, set[str]] = {reference: set() for reference in targets}
    for reference, used in inner.items():
        for one in used:
            users[one].add(reference)
    finite: set[str] = set()
    open_questions = set(targets)
    while open_questions:
        reference = open_questions.pop()
        if _is_finite(targets[reference], finite):
            finite.add(reference)
            open_questions |= users[reference] - finite
    for reference in targets:
        if reference not in finite:
            raise refusal(
                f"the JSON schema has no finite instance at $ref {reference!r}: it leads back to "
                "itself in every case; make a property optional, or add an alternative such as null"
            )


def _references(schema: Any, deep: bool) -> set[str]:
    """Each ``$ref`` in a schema; unless ``deep``, only those that apply to the same value."""
    found: set[str] = set()
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, bool):
            continue
        if "$ref" in node:
            found.add(node["$ref"])
        if deep:
            todo += [child for child, _ in children(node, "#")]
        else:
            todo += [one for keyword in IN_PLACE for one in node.get(keyword, ())]
    return found


def _is_finite(node: Any, finite: set[str]) -> bool:
    """Whether a schema has a finite instance, given the references that are known to have one.
    It looks at structure alone: other contradictions are llguidance's to find."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and node["$ref"] not in finite:
        return False
    if not all(_is_finite(one, finite) for one in node.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_is_finite(one, finite) for one in node[keyword]):
            return False
    if "const" in node or "enum" in node or "type" not in node:
        return True
    types = [node["type"]] if isinstance(node["type"], str) else node["type"]
    return any(
        _is_finite_array(node, finite)
        if name == "array"
        else _is_finite_object(node, finite)
        if name == "object"
        else True
        for name in types
    )


def _is_finite_array(node: Schema, finite: set[str]) -> bool:
    count, items = node.get("minItems", 0), node.get("items", True)
    first = items if isinstance(items, list) else node.get("prefixItems", [])
    rest = node.get("additionalItems", True) if isinstance(items, list) else items
    needed = [*first[:count], *([rest] if count > len(first) else [])]
    return all(_is_finite(one, finite) for one in needed)


def _is_finite_object(node: Schema, finite: set[str]) -> bool:
    named = node.get("properties", {})
    required = set(node.get("required", ()))
    free = [*node.get("patternProperties", {}).values(), node.get("additionalProperties", True)]
    some_free = any(_is_finite(one, finite) for one in free)
    if not all(
        _is_finite(named[name], finite) if name in named else some_free for name in required
    ):
        return False
    optional = [schema for name, schema in named.items() if name not in required]
    return (
        node.get("minProperties", 0) <= len(required)
        or some_free
        or any(_is_finite(one, finite) for one in optional)
    )
