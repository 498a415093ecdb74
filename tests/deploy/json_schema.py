"""The part of JSON Schema that the Compose Specification uses; any other keyword is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SILENT = {"$schema", "$id", "$defs", "title", "description", "default", "deprecated", "format"}


class Validator:
    def __init__(self, root: Schema) -> None:
        self._root = root

    def errors(self, value: Any, schema: Schema | None = None, at: str = "") -> Iterator[str]:
        """What is wrong, each with the path of the value that it is about."""
        schema = self._root if schema is None else schema
        for keyword, rule in schema.items():
            if keyword not in _SILENT:
                yield from getattr(self, "_" + keyword.strip("$"))(value, rule, schema, at)

    def valid(self, value: Any, schema: Schema) -> bool:
        return next(self.errors(value, schema), None) is None

    def _resolve(self, reference: str) -> Schema:
        found: Any = self._root
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        return found

    def _ref(self, value: Any, rule: str, schema: Schema, at: str) -> Iterator[str]:
        yield from self.errors(value, self._resolve(rule), at)

    def _type(self, value: Any, rule: Any, schema: Schema, at: str) -> Iterator[str]:
        names = [rule] if isinstance(rule, str) else rule
        fits = [n for n in names if isinstance(value, _TYPES[n])]
        if isinstance(value, bool):  # an int to Python, not to JSON
            fits = [n for n in fits if n == "boolean"]
        if not fits:
            yield f"{at} is {value!r}; accepted: {', '.join(names)}"

    def _enum(self, value: Any, rule: list[Any], schema: Schema, at: str) -> Iterator[str]:
        if value not in rule:
            yield f"{at} is {value!r}; accepted: {rule}"

    def _pattern(self, value: Any, rule: str, schema: Schema, at: str) -> Iterator[str]:
        if isinstance(value, str) and not re.search(rule, value):
            yield f"{at} is {value!r}; accepted: what matches {rule}"

    def _minimum(self, value: Any, rule: float, schema: Schema, at: str) -> Iterator[str]:
        if isinstance(value, (int, float)) and value < rule:
            yield f"{at} is {value}; accepted: {rule} or more"

    def _maximum(self, value: Any, rule: float, schema: Schema, at: str) -> Iterator[str]:
        if isinstance(value, (int, float)) and value > rule:
            yield f"{at} is {value}; accepted: {rule} or less"

    def _required(self, value: Any, rule: list[str], schema: Schema, at: str) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (f"{at}.{name} is missing" for name in rule if name not in value)

    def _items(self, value: Any, rule: Schema, schema: Schema, at: str) -> Iterator[str]:
        if isinstance(value, list):
            for i, item in enumerate(value):
                yield from self.errors(item, rule, f"{at}[{i}]")

    def _uniqueItems(self, value: Any, rule: bool, schema: Schema, at: str) -> Iterator[str]:
        if rule and isinstance(value, list) and any(v in value[:i] for i, v in enumerate(value)):
            yield f"{at} has an item twice"

    def _properties(self, value: Any, rule: Schema, schema: Schema, at: str) -> Iterator[str]:
        if isinstance(value, dict):
            for name in value.keys() & rule.keys():
                yield from self.errors(value[name], rule[name], f"{at}.{name}")

    def _patternProperties(
        self, value: Any, rule: Schema, schema: Schema, at: str
    ) -> Iterator[str]:
        if isinstance(value, dict):
            for name, item in value.items():
                for pattern, inner in rule.items():
                    if re.search(pattern, name):
                        yield from self.errors(item, inner, f"{at}.{name}")

    def _additionalProperties(
        self, value: Any, rule: bool | Schema, schema: Schema, at: str
    ) -> Iterator[str]:
        if isinstance(value, dict) and rule is not True:
            for name in value:
                if not _declares(schema, name):
                    if rule is False:
                        yield f"{at}.{name} is not a field"
                    else:
                        yield from self.errors(value[name], rule, f"{at}.{name}")

    def _unevaluatedProperties(
        self, value: Any, rule: bool, schema: Schema, at: str
    ) -> Iterator[str]:
        assert rule is False
        parts = [schema, *schema.get("allOf", ())]
        parts = [self._resolve(p["$ref"]) if "$ref" in p else p for p in parts]
        for name in value if isinstance(value, dict) else ():
            if not any(_declares(part, name) for part in parts):
                yield f"{at}.{name} is not a field"

    def _allOf(self, value: Any, rule: list[Schema], schema: Schema, at: str) -> Iterator[str]:
        for part in rule:
            yield from self.errors(value, part, at)

    def _anyOf(self, value: Any, rule: list[Schema], schema: Schema, at: str) -> Iterator[str]:
        if not any(self.valid(value, part) for part in rule):
            yield f"{at} fits none of {len(rule)} forms"

    def _oneOf(self, value: Any, rule: list[Schema], schema: Schema, at: str) -> Iterator[str]:
        if (count := sum(self.valid(value, part) for part in rule)) != 1:
            yield f"{at} fits {count} of {len(rule)} forms, not one"


def _declares(schema: Schema, name: str) -> bool:
    patterns = schema.get("patternProperties", {})
    return name in schema.get("properties", {}) or any(re.search(p, name) for p in patterns)
