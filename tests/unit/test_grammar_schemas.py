"""JSON Schema: what is enforced is enforced exactly, all else is refused by name."""

from __future__ import annotations

import json
import random
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from helpers.schemas import SCHEMAS, Schema, accepts, byte_matcher, random_answer
from jsonschema.validators import validator_for

from octavo.engine.grammar import check_structure
from octavo.errors import InvalidRequestError
from octavo.sampling_params import StructuredOutputs

CHECKED_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")  # its "time" knows no offsets
INT = {"type": "integer"}
LOOP = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}


def in_property(schema: Any) -> Schema:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_follows_the_mask_is_valid(name: str) -> None:
    schema = SCHEMAS[name]
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker(CHECKED_FORMATS)
    )
    whole = 0
    for seed in range(25):
        answer = random_answer(random.Random(f"{name} {seed}"), 400, json=schema)
        if answer is not None:
            validator.validate(json.loads(answer.decode(), parse_constant=no_constant))
            whole += 1
    assert whole >= 15


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        pytest.param(
            {"type": "integer", "minimum": -5, "maximum": 12},
            ["-5", "-1", "0", "7", "9", "10", "12"],
            ["-6", "13", "100", "01", "1.0"],
            id="O17 -5 to 12",
        ),
        pytest.param(
            {"type": "integer", "minimum": 2}, ["2", "9", "10", "19"], ["0", "1"], id="O17 from 2"
        ),
        pytest.param(
            {"type": "integer", "minimum": -5},
            ["-5", "-4", "-3", "-2", "-1", "0", "1", "99"],
            ["-6", "-10"],
            id="O17 from -5",
        ),
        pytest.param({"type": "integer", "exclusiveMinimum": 0}, ["1"], ["0"], id="O17 above 0"),
        pytest.param(
            {"type": "number", "minimum": -4, "maximum": 4},
            ["-4.0", "-0.5", "-0.1", "0", "0.5", "4"],
            ["4.7", "-4.1"],
            id="O17 number -4 to 4",
        ),
        pytest.param(
            {"type": "number", "exclusiveMinimum": 0},
            ["0.1"],
            ["0", "0.0"],
            id="O17 number above 0",
        ),
        pytest.param(
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            ["0.5", "0.1", "0.000001"],
            ["0", "0.0", "0.51", "-0.1"],
            id="above 0 to 0.5",
        ),
        pytest.param(
            {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1},
            ["-1.5", "-1.01"],
            ["-1", "-1.0", "-0.9", "-1.51"],
            id="-1.5 to below -1",
        ),
        pytest.param(
            {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
            ["4", "5"],
            ["3", "6"],
            id="integers between",
        ),
        pytest.param(
            {"enum": ["在线", "é", "🌶", 'a"b', "", None, 3, True]},
            ['"在线"', '"é"', '"🌶"', '"a\\"b"', '""', "null", "3", "true"],
            ['"x"', "4", "false", '"åœ¨çº¿"'],
            id="O18 a",
        ),
        pytest.param(
            SCHEMAS["linked list"],
            ['{"v":1,"next":null}', '{"v":1,"next":{"v":2,"next":null}}'],
            ['{"v":1}', '{"v":1,"next":{}}'],
            id="O18 c",
        ),
        pytest.param(
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"2023-12-31"', '"2023-01-30"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2024-13-01"', '"2024-04-31"'],
            id="leap years",
        ),
        pytest.param(
            {"type": "string", "format": "date-time"},
            ['"2024-02-29T23:59:59Z"', '"2023-05-01T00:00:00+02:00"'],
            ['"2023-02-29T00:00:00Z"', '"2024-01-01T10:47:60Z"', '"2024-01-01"'],
            id="date-time",
        ),
        pytest.param(
            {
                "type": "object",
                "properties": {"a": INT},
                "additionalProperties": {"type": "string"},
            },
            ['{"a":1,"b":"x"}', '{"b":"x"}', '{"a":1,"\\n":"x"}'],
            ['{"a":"x"}', '{"a":1,"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}'],
            id="a key has one spelling",
        ),
        pytest.param(
            {"type": "string", "pattern": '^[^"\\s]*$'},
            ['"a"', '"\\\\"'],
            ['"\\""', '"a\\"b"', '"\\n"'],
            id="class without quote",
        ),
        pytest.param(
            {
                "type": "object",
                "patternProperties": {'^[^"]*$': INT},
                "additionalProperties": False,
            },
            ['{"a":1}'],
            ['{"\\"":1}'],
            id="key pattern without quote",
        ),
        pytest.param({"type": "string"}, ['"\\n"', '"é"'], ['"\\ud800"', '"\n"'], id="strings"),
    ],
)
def test_boundaries(schema: Schema, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(text, json=schema)] == []
    assert [text for text in wrong if accepts(text, json=schema)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "'not' at #"),
        ({"if": INT, "then": INT}, "'if'"),
        (in_property({"propertyNames": {}}), "'propertyNames' at #/properties/x"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}}, "depend"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": INT}, "'contains'"),
        ({"anyOf": [{"type": "object", "unevaluatedProperties": False}]}, "#/anyOf/0"),
        ({"type": "string", "minLenght": 3}, "'minLenght'"),
        ({"type": "string", "nullable": True}, "'nullable'"),
        ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding'"),
        ({"type": "string", "x-guidance": {"lenient": True}}, "'x-guidance'"),
        (in_property({"$id": "http://example.com"}), "'$id'"),
        ({"type": "string", "format": "regex"}, "format at # is"),
        ({"type": "integer", "format": "int32"}, "format at # is"),
        ({"type": "string", "format": "unknown"}, "format at # is"),
        ({"oneOf": [INT, {"type": "number"}]}, "oneOf"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "minimum (5)"),  # O17
        ({"minimum": 1.2, "maximum": 1.8, "type": "integer"}, "no integer"),
        (in_property({"type": "string", "enum": []}), "enum at #/properties/x"),  # O18 b
        (LOOP, "no finite instance"),  # O18 d
        ({"$ref": "#"}, "applies itself"),
        ({"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}]}]}, "applies itself"),
        (
            {
                "type": "object",
                "properties": {"a": LOOP | {"properties": {"x": {"$ref": "#/properties/a"}}}},
            },
            "no finite instance",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite instance"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "finite"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": in_property({"$ref": "#/$defs/b"}), "b": LOOP}},
            "no finite instance",
        ),
        ({"$ref": "#/definitions/missing"}, "'#/definitions/missing'"),  # O18 e
        ({"$ref": "http://example.com/x.json"}, "$ref at # is"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "$ref at # is"),
        ({"const": 2**53 + 1}, "const at # is"),
        ({"enum": [{"a": [-(2**60)]}]}, "enum at # is"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum at # is"),
        ({"type": "integer", "minimum": "3"}, "minimum at # is"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum at # is"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf at # is"),
        ({"type": "integer", "multipleOf": -2}, "multipleOf at # is"),
        ({"allOf": [{"multipleOf": 196611}, {"multipleOf": 327695}]}, "multipleOf has the values"),
        ({"type": "string", "minLength": 1.5}, "minLength at # is"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3)"),
        ({"const": "\x01"}, "const at # is"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"type": "string", "pattern": "[a-z&&[^b]]"}, "pattern at # is"),
        ({"type": "string", "pattern": "\\p{Cc}"}, "pattern at # is"),
        ({"type": "string", "pattern": "\\P{Po}"}, "pattern at # is"),
        ({"type": "string", "pattern": "[]a]"}, "pattern at # is"),
        ({"type": "string", "pattern": '[^]"]'}, "pattern at # is"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": 5}}}, "type at #/$defs/a is"),
        ({"type": "string", "pattern": "^aaaa$", "maxLength": 3}, "empty"),
        ({"type": "object", "minProperties": 2}, "minProperties 2"),
        ({"type": "array", "prefixItems": [INT], "additionalItems": False}, "additionalItems"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [INT]},
            "prefixItems at #",
        ),
        ({"type": "object", "required": "a"}, "required at # is"),
        ({"items": {"type": "whole"}}, "type at #/items is"),
        ({"type": ["string", "whole"]}, "type at # is"),
        ({"anyOf": []}, "anyOf at # is"),
        ({"properties": {"a": 3}}, "#/properties/a is 3"),
        ("false", "enum"),
    ],
)
def test_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_structure(StructuredOutputs(json=schema))
    assert caught.value.param == "structured_outputs"
    assert named in str(caught.value)
    assert len(str(caught.value)) < 450


def test_long_chains_of_references_neither_crash_nor_take_long() -> None:
    """O18: llguidance follows them by recursion, which overflows an ordinary thread's stack."""

    def chain(length: int) -> Schema:
        links = {f"d{i}": in_property({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": INT}}

    check_structure(StructuredOutputs(json=chain(3000)))
    with pytest.raises(InvalidRequestError, match="10,000 subschemas"):
        check_structure(StructuredOutputs(json=chain(6000)))
    endless = chain(3000)
    endless["$defs"]["d3000"] = {"$ref": "#"}
    with pytest.raises(InvalidRequestError, match="no finite instance"):
        check_structure(StructuredOutputs(json=endless))


def test_nested_too_deeply_is_refused() -> None:
    schema: Schema = INT
    for depth in range(900):
        schema = {"type": "array", "items": schema}
        if depth in (150, 899):
            with pytest.raises(InvalidRequestError, match=r"recursion|nested too deeply"):
                check_structure(StructuredOutputs(json=schema))


@pytest.mark.parametrize("kind", ["date-time", "time"])
def test_times_are_real(kind: str) -> None:
    for seed in range(25):
        answer = random_answer(random.Random(seed), 80, json={"type": "string", "format": kind})
        assert answer is not None
        moment = json.loads(answer).upper().replace("0000-", "2000-")
        moment = moment if kind == "date-time" else f"2000-01-01T{moment}"
        datetime.strptime(moment[:19].replace(" ", "T"), "%Y-%m-%dT%H:%M:%S")


def test_white_space_is_bounded_and_only_inside() -> None:
    """O19: at most one space, or a new line and indentation, in a place."""
    schema = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
    for text in ('{"a":1}', '{ "a" : 1 }', '{\n  "a": 1\n}', "{\n" + 16 * " " + '"a":1}'):
        assert accepts(text, json=schema)
    for text in ('{  "a":1}', ' {"a":1}', '{"a":1} ', '{"a":1}\n', '{\n\n"a":1}', '{\t"a":1}'):
        assert not accepts(text, json=schema)
        assert not accepts(text, json_object=True)
    assert accepts('{"b": [1, {"c": null}]}', json_object=True)
    assert not accepts("[1]", json_object=True)


def test_a_schema_may_be_text() -> None:
    assert accepts("12", json='{"type": "integer"}')
    assert accepts("[null]", json="true")
    matcher = byte_matcher(json='{"type": "object", "properties": {"b": {}, "a": {}}}')
    for byte in b'{"b":1,"':
        matcher.accept(byte)
    assert matcher.mask() is not None  # b before a, as written
