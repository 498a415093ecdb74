"""One frozen settings object per service: flags > environment > `--config` file > defaults.

A service subclasses `ServiceSettings`, sets `env_prefix` and describes each field; the flag, its
help text and the environment variable follow from the field. Needs the `serve` extra.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, get_args, get_origin

import yaml
from pydantic import SecretBytes, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, SettingsConfigDict

from specwire.errors import Reason, SpecwireError

# Kubernetes and Docker put addresses of services into variables that may share a service's prefix.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*)$")

# So many names fit into a message.
_FEW_NAMES = 8


class _YamlLoader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which the library would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _refuse_repeated(keys)
        return super().construct_mapping(node, deep)


class _Repeated(ValueError):
    """A key that is in a file twice."""


def _refuse_repeated(keys: Sequence[str]) -> None:
    for at, key in enumerate(keys):
        if key in keys[:at]:
            raise _Repeated(key)


def _json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([key for key, _ in pairs])
    return dict(pairs)


def _load_yaml(text: str) -> Any:
    return yaml.load(text, _YamlLoader)


_LOADERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _load_yaml,
    ".yml": _load_yaml,
    ".toml": tomllib.loads,
    ".json": partial(json.loads, object_pairs_hook=_json_object),
}


class ServiceSettings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", enable_decoding=False, validate_default=True
    )

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Builds the settings from flags (default: the command line), environment and file."""
        flags = vars(_parser(cls).parse_args(sys.argv[1:] if argv is None else list(argv)))
        environment = _from_environment(cls, os.environ)
        file = flags.pop("config", None) or environment.pop("config", None)
        from_file = _from_file(cls, Path(file)) if file else {}
        try:
            return cls(**{**from_file, **environment, **flags})
        except ValidationError as error:
            raise _invalid(cls, error) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: Any) -> Any:
        """A file may say `threads: true`, which Python takes for 1."""
        field = cls.model_fields.get(info.field_name)
        if isinstance(value, bool) and field and _mentions(field.annotation, (int, float)):
            raise ValueError("a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: Any, info: Any) -> Any:
        """Lists in flags and environment are written `a,b,c` or as JSON."""
        field = cls.model_fields.get(info.field_name)
        if not isinstance(value, str) or field is None or not _is_list(field.annotation):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [part.strip() for part in value.split(",") if part.strip()]


def _mentions(annotation: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a type is, or a union contains, one of these kinds."""
    if annotation in kinds or get_origin(annotation) in kinds:
        return True
    if isinstance(annotation, type) or get_origin(annotation) in (list, tuple, dict, set):
        return False
    return any(_mentions(part, kinds) for part in get_args(annotation))


def _is_list(annotation: Any) -> bool:
    return _mentions(annotation, (list, tuple, set, frozenset))


def _is_secret(field: FieldInfo) -> bool:
    return _mentions(field.annotation, (SecretStr, SecretBytes))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecwireError(Reason.SETTINGS_INVALID, f"{message}; see --help")


def _parser(cls: type[ServiceSettings]) -> argparse.ArgumentParser:
    prefix = cls.model_config.get("env_prefix", "")
    parser = _Parser(
        prog=f"python -m {cls.__module__.partition('.')[0]}",
        description=(cls.__doc__ or "").strip() or None,
        epilog=f"Each flag is also read from the environment ({prefix}NAME) and from the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="settings file: .yaml, .toml or .json")
    for name, field in cls.model_fields.items():
        if _is_secret(field):  # other users of the machine can read command lines
            continue
        text = (field.description or "").replace("%", "%%")
        default = field.get_default(call_default_factory=True, validated_data={})
        if default is not PydanticUndefined:
            text += f" (default: {_shown(default)})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if _mentions(field.annotation, (bool,)):
            metavar = "true|false"
            parser.add_argument(flag, dest=name, nargs="?", const=True, metavar=metavar, help=text)
            no, text = "--no-" + flag.removeprefix("--"), f"{flag}=false"
            parser.add_argument(no, dest=name, action="store_false", help=text)
        else:
            parser.add_argument(flag, dest=name, metavar=_metavar(field), help=text)
    return parser


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)


def _metavar(field: FieldInfo) -> str:
    annotation = field.annotation
    if _is_list(annotation):
        return "A,B,..."
    if _mentions(annotation, (int,)):
        return "N"
    return "X" if _mentions(annotation, (float,)) else "TEXT"


def _from_environment(cls: type[ServiceSettings], environment: Mapping[str, str]) -> dict[str, str]:
    prefix = cls.model_config.get("env_prefix", "").lower()
    found = {}
    for variable, value in environment.items():
        name = variable.lower()
        if not prefix or not name.startswith(prefix) or _SERVICE_LINK.search(variable):
            continue
        name = name.removeprefix(prefix)
        if name == "port" and "://" in value:  # a service link too
            continue
        if name != "config" and name not in cls.model_fields:
            # Not with its value: it may be a secret under a misspelled name.
            text = f"{variable} is not a setting; accepted: {_names(cls, variable, prefix.upper())}"
            raise SpecwireError(Reason.SETTINGS_INVALID, text, {"field": variable})
        found[name] = value
    return found


def _from_file(cls: type[ServiceSettings], path: Path) -> dict[str, Any]:
    load = _LOADERS.get(path.suffix.lower())
    if load is None:
        raise _bad_file(path, "a file that ends in .yaml, .yml, .toml or .json")
    try:
        values = load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad_file(path, f"a readable file ({error.strerror})") from error
    except _Repeated as error:
        raise _bad_file(path, f"each setting once ({error} is there twice)") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        where = _where(error)
        raise _bad_file(path, f"a well-formed {path.suffix[1:]} file{where}") from error
    if values is None:  # an empty YAML file
        return {}
    if not isinstance(values, dict):
        raise _bad_file(path, "a mapping of setting names to values")
    # The same spelling as the flags is accepted.
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise _bad_file(path, f"each setting once ({name} is there twice, spelled in two ways)")
        if name not in cls.model_fields:
            # Not with its value, as above.
            text = f"{key} in {path} is not a setting of this service; accepted: "
            raise SpecwireError(
                Reason.SETTINGS_INVALID, text + _names(cls, name), {"field": str(key)}
            )
        found[name] = value
    return found


def _where(error: Exception) -> str:
    """What a parser says of the place that it could not read."""
    if isinstance(error, json.JSONDecodeError):
        return f" (line {error.lineno}, column {error.colno}: {error.msg})"
    if isinstance(error, tomllib.TOMLDecodeError):
        return f" ({error})"  # has line and column in it
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f" (line {mark.line + 1}, column {mark.column + 1}: {error.problem})"
    return " in UTF-8" if isinstance(error, UnicodeDecodeError) else ""


def _bad_file(path: Path, accepted: str) -> SpecwireError:
    return SpecwireError.field("config", str(path), accepted, Reason.SETTINGS_INVALID)


def _names(cls: type[ServiceSettings], given: str, prefix: str = "") -> str:
    """The settings that `given` may have meant: all where they are few, else the nearest."""
    names = [prefix + (name.upper() if prefix else name) for name in cls.model_fields]
    if len(names) <= _FEW_NAMES:
        return ", ".join(names)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    return ", ".join([*near, "those that --help lists"])


def _invalid(cls: type[ServiceSettings], error: ValidationError) -> SpecwireError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    value, accepted = first["input"], _accepted(first["msg"])
    field = cls.model_fields.get(name)
    if field is None:
        text = f"the settings do not fit together: {accepted}"
        return SpecwireError(Reason.SETTINGS_INVALID, text, {"field": "settings"})
    if _is_secret(field):
        value = "(secret)"
    return SpecwireError.field(name, value, accepted, Reason.SETTINGS_INVALID)


def _accepted(text: str) -> str:
    """What pydantic says would be accepted, without the words around it."""
    return re.sub(r"^(Value error, |Input should be )|, unable to parse .*$", "", text)
