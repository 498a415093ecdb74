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

_LOADERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
    ".json": json.loads,
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
        if field.annotation is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, dest=name, action=action, help=text)
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
    except (ValueError, yaml.YAMLError) as error:
        raise _bad_file(path, f"a well-formed {path.suffix[1:]} file") from error
    if values is None:  # an empty YAML file
        return {}
    if not isinstance(values, dict):
        raise _bad_file(path, "a mapping of setting names to values")
    # The same spelling as the flags is accepted.
    return {str(key).replace("-", "_"): value for key, value in values.items()}


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
    if first["type"] == "extra_forbidden":
        accepted = f"one of the settings {_names(cls, name)}"
    field = cls.model_fields.get(name)
    if field is None and first["type"] != "extra_forbidden":
        text = f"the settings do not fit together: {accepted}"
        return SpecwireError(Reason.SETTINGS_INVALID, text, {"field": "settings"})
    if field is not None and _is_secret(field):
        value = "(secret)"
    return SpecwireError.field(name, value, accepted, Reason.SETTINGS_INVALID)


def _accepted(text: str) -> str:
    """What pydantic says would be accepted, without the words around it."""
    return re.sub(r"^(Value error, |Input should be )|, unable to parse .*$", "", text)
