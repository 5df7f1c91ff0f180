"""What of JSON Schema is enforced exactly; all else is refused, by the keyword's name.

llguidance refuses most of what it can't do, but ignores keywords it doesn't know, and is wrong in
a few places that :func:`check_schema` refuses or writes differently. Each was found by experiment
with version 1.9:

- numbers are held as float64, which rounds whole numbers beyond 2^53;
- ``additionalItems`` or an older ``$schema`` makes it overlook ``prefixItems``;
- a character class that holds every control character is taken to hold ``"`` and ``\\`` too;
- keys of a map may repeat, so that it counts too many of them (``minProperties``);
- 29 February passes as a date in any year, and a 60th second at any time;
- a number may equal an exclusive bound that is whole, where the other bound is near (0 < x < 0.5);
- several ``multipleOf`` of one number are multiplied in 32 bits;
- a schema may have no finite instance (``{"$ref": "#"}``).
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from octavo.engine.schema_refs import (
    LISTS,
    MAPS,
    SINGLES,
    Schema,
    bad_value,
    check_finite,
    children,
    refusal,
    resolve,
)

MAX_EXACT_INTEGER = 2**53
MAX_SUBSCHEMAS = 10_000  # llguidance goes through them by recursion
FORMATS = (
    *("date-time", "time", "date", "duration", "email"),
    *("hostname", "ipv4", "ipv6", "uuid", "uri"),
)

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OTHERS = ("$ref", "const", "enum", "type", "required", "pattern", "format")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$comment", "$anchor", "discriminator"),
)
_ROOT_ONLY = ("$schema", "$id")
_KNOWN = frozenset(
    (*LISTS, *MAPS, *SINGLES, *_NUMBERS, *_COUNTS, *_OTHERS, *_ANNOTATIONS, *_ROOT_ONLY)
)
_NEWEST_DRAFT = "https://json-schema.org/draft/2020-12/schema"

# JSON has short escapes for these; \u is switched off, because it can spell a key a second way.
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"^(?:{_LEAP_YEAR}-02-29|[0-9]{{4}}-(?:02-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-[0-9]{{2}}))"
)
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_STRICTER = {"date": _DATE, "time": f"^{_TIME}", "date-time": f"{_DATE}[Tt ]{_TIME}"}

# Unicode classes that may hold the control characters but not the quote.
_CONTROL_CLASS = re.compile(r"\\P|\\pC|\\p\{\s*(?:\^|(?i:C|Cc|Other|Control|Cntrl)\s*\}|[^}]*[=:])")
_CHANGING_FLAGS = re.compile(r"\(\?[a-zA-Z]*[ux-]")  # they give a pattern another syntax
# A pattern falls into escapes, whole character classes and single characters.
_PATTERN_PART = re.compile(r"\\.|\[(\^?)((?:\\.|\[|[^\]\\])*)\]|.", re.DOTALL)
_NUL = r"(?:\\x00|\\u0000|\\x\{0+\}|\\u\{0+\}|\x00)"


def check_schema(text: str) -> Schema:
    """A JSON Schema that llguidance enforces, or refuses, exactly as ``text`` means it.

    Raises :class:`InvalidRequestError` naming the keyword that can't be enforced, and its place.
    """
    parsed = json.loads(text)
    root: Schema = ({} if parsed else {"enum": []}) if isinstance(parsed, bool) else parsed
    seen: set[int] = set()
    factors: set[Decimal] = set()
    todo: list[tuple[Any, str]] = [(root, "#")]
    while todo:
        node, path = todo.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        if not isinstance(node, dict):
            raise refusal(f"{path} is {json.dumps(node)[:60]}, it must be a schema")
        seen.add(id(node))
        if len(seen) > MAX_SUBSCHEMAS:
            raise refusal(f"the JSON schema has more than {MAX_SUBSCHEMAS:,} subschemas")
        _check_keywords(node, path, root)
        _check_values(node, path)
        _check_arrays(node, path, root)
        todo += children(node, path)
        if "multipleOf" in node:
            factors.add(Decimal(str(node["multipleOf"])))
        if "$ref" in node:
            todo.append((resolve(root, node["$ref"], path), node["$ref"]))
    _check_factors(factors)
    try:
        check_finite(root)
    except RecursionError:
        raise refusal("the JSON schema is nested too deeply") from None
    return root


def _check_factors(factors: set[Decimal]) -> None:
    """Refuse values of ``multipleOf`` whose product, should they meet in one number, is too large.
    One alone is llguidance's to refuse."""
    smallest = min((Decimal(1), *factors), key=lambda factor: factor.as_tuple().exponent)
    scaled = [factor.scaleb(-int(smallest.as_tuple().exponent)) for factor in factors]
    if len(factors) > 1 and math.prod(scaled) >= 2**32:
        raise refusal(
            f"multipleOf has the values {', '.join(map(str, sorted(factors)[:5]))}, which are too "
            "large to be combined; use fewer or smaller ones"
        )


def _check_keywords(node: Schema, path: str, root: Schema) -> None:
    for keyword in node:
        known = keyword in _KNOWN or (keyword.startswith("x-") and keyword != "x-guidance")
        if not known or (keyword in _ROOT_ONLY and node is not root):
            raise refusal(
                f"the JSON schema keyword {keyword!r} at {path} can't be enforced; "
                "leave it out, or say the same with other keywords"
            )


def _check_values(node: Schema, path: str) -> None:
    """Check every keyword that holds no schema, and rewrite patterns and dates."""
    for keyword in _NUMBERS:
        if keyword in node:
            _check_number(keyword, node[keyword], path)
    _avoid_exclusive_bounds(node)
    for keyword in _COUNTS:
        value = node.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise bad_value(keyword, value, path, "a whole number, 0 or more")
    for keyword in LISTS:
        if keyword in node and not (isinstance(node[keyword], list) and node[keyword]):
            raise bad_value(keyword, node[keyword], path, "a list with one schema at least")
    for keyword in MAPS:
        if not isinstance(node.get(keyword, {}), dict):
            raise bad_value(keyword, node[keyword], path, "an object")
    types = node.get("type", [])
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or any(name not in _TYPES for name in names):
        raise bad_value("type", types, path, f"one of {', '.join(_TYPES)}, or a list of them")
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_value("required", required, path, "a list of names")
    if "enum" in node:
        if not isinstance(node["enum"], list) or not node["enum"]:
            raise bad_value("enum", node["enum"], path, "a list with one value at least")
        _check_literal("enum", node["enum"], path)
    if "const" in node:
        _check_literal("const", node["const"], path)
    if "pattern" in node:
        node["pattern"] = _without_nul(node["pattern"], path)
    if "patternProperties" in node:
        node["patternProperties"] = {
            _without_nul(pattern, path): schema
            for pattern, schema in node["patternProperties"].items()
        }
    if "format" in node:
        if node["format"] not in FORMATS:
            raise bad_value("format", node["format"], path, f"one of {', '.join(FORMATS)}")
        if node["format"] in _STRICTER:
            node["allOf"] = [*node.get("allOf", ()), {"pattern": _STRICTER[node["format"]]}]
    has_free_keys = node.get("additionalProperties") is not False or "patternProperties" in node
    if has_free_keys and node.get("minProperties", 0) > len(set(required)) + 1:
        raise refusal(
            f"minProperties {node['minProperties']} at {path} can't be enforced, because free keys "
            f"may repeat; name the keys in required, or ask for {len(set(required)) + 1} at most"
        )


def _check_arrays(node: Schema, path: str, root: Schema) -> None:
    """The old spelling (a list of ``items``, and ``additionalItems``) and the new one
    (``prefixItems`` and ``items``) are both fine, but not mixed."""
    is_old = isinstance(node.get("items"), list)
    if "additionalItems" in node and not is_old:
        raise refusal(
            f"additionalItems at {path} has no effect without a list of items; use prefixItems "
            "and items"
        )
    draft = str(root.get("$schema", _NEWEST_DRAFT)).rstrip("#")
    if "prefixItems" in node and (is_old or draft != _NEWEST_DRAFT):
        raise refusal(
            f"prefixItems at {path} belongs to JSON Schema 2020-12; leave out $schema {draft} "
            "and the list of items"
        )


def _check_number(keyword: str, value: object, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_value(keyword, value, path, "a number")
    if keyword == "multipleOf" and value <= 0:
        raise bad_value(keyword, value, path, "above 0")
    _check_literal(keyword, value, path)


def _avoid_exclusive_bounds(node: Schema) -> None:
    """Write a whole exclusive bound as an inclusive one a little further from zero."""
    for exclusive, inclusive, sign, tighter in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound = node.get(exclusive)
        if bound is not None and bound * sign >= 0 and bound == int(bound):
            del node[exclusive]
            near = bound + sign * max(1e-9, abs(bound) * 1e-12)
            node[inclusive] = tighter(near, node.get(inclusive, near))


def _check_literal(keyword: str, value: object, path: str) -> None:
    """Check that a value can be written, and is kept to the last digit."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, int) and abs(one) > MAX_EXACT_INTEGER:
            raise bad_value(keyword, one, path, "within 2^53 (larger ones would be rounded)")
        if isinstance(one, str) and _UNWRITABLE.search(one):
            raise bad_value(keyword, one, path, "free of control characters that need \\u")
        if isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()


def _without_nul(pattern: object, path: str) -> str:
    """The pattern with NUL taken out of its character classes: no class then holds every control
    character. A string can't contain NUL anyway."""
    if not isinstance(pattern, str):
        raise bad_value("pattern", pattern, path, "a string")
    if _CONTROL_CLASS.search(pattern):
        raise bad_value(
            "pattern", pattern, path, "free of \\P and of classes of control characters"
        )
    if _CHANGING_FLAGS.search(pattern):
        raise bad_value("pattern", pattern, path, "free of the flags u and x")

    def rewrite(part: re.Match[str]) -> str:
        negated, members = part.group(1), part.group(2)
        if members is None:
            return part.group()
        if not members or re.search(r"&&|--|~~|(?<!\\)(?:\\\\)*\[", members):
            # Programs differ in how they read these.
            raise bad_value(
                "pattern", pattern, path, "free of [], and of [, &&, -- and ~~ within a class"
            )
        if negated:
            return f"[^\\x00{members}]"
        return "[" + re.sub(f"{_NUL}-", r"\\x01-", members) + "]"

    return _PATTERN_PART.sub(rewrite, pattern)
