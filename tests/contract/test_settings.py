from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict

from specwire.errors import Reason, SpecwireError
from specwire.settings import ServiceSettings


class Example(ServiceSettings):
    """An example service."""

    model_config = SettingsConfigDict(env_prefix="SPECWIRE_EXAMPLE_")

    listen: tuple[str, ...] = Field(("127.0.0.1:1",), description="Addresses to listen at.")
    kv_pages: int | None = Field(None, ge=1, description="Pages; 100% of the pool.")
    share: float = Field(0.5, gt=0, le=1, description="Share of a step.")
    reflection: bool = Field(False, description="Answer reflection.")
    token: SecretStr | None = Field(None, description="Bearer token.")


def failure(*argv: str) -> str:
    with pytest.raises(SpecwireError) as caught:
        Example.load(list(argv))
    assert caught.value.reason is Reason.SETTINGS_INVALID
    return caught.value.message


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_flag_beats_environment_beats_file_beats_default(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"s.{suffix}"
    texts = {
        "yaml": "share: 0.2\nkv-pages: 2\nlisten: [a:1, b:2]\n",
        "toml": 'share = 0.2\nkv_pages = 2\nlisten = ["a:1", "b:2"]\n',
        "json": json.dumps({"share": 0.2, "kv_pages": 2, "listen": ["a:1", "b:2"]}),
    }
    file.write_text(texts[suffix])
    assert Example.load([]) == Example()
    monkeypatch.setenv("SPECWIRE_EXAMPLE_SHARE", "0.3")
    monkeypatch.setenv("SPECWIRE_EXAMPLE_KV_PAGES", "3")
    settings = Example.load(["--config", str(file), "--share", "0.4"])
    assert (settings.share, settings.kv_pages, settings.listen) == (0.4, 3, ("a:1", "b:2"))
    assert settings.reflection is False
    monkeypatch.setenv("SPECWIRE_EXAMPLE_CONFIG", str(file))
    assert Example.load([]).listen == ("a:1", "b:2")


def test_lists_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Example.load(["--listen", "a:1, b:2"]).listen == ("a:1", "b:2")
    assert Example.load(["--listen", '["a:1"]']).listen == ("a:1",)
    assert Example.load(["--reflection"]).reflection
    monkeypatch.setenv("SPECWIRE_EXAMPLE_REFLECTION", "true")
    assert Example.load([]).reflection
    assert not Example.load(["--no-reflection"]).reflection
    for given in (["--reflection=false"], ["--reflection", "false", "--share", "0.5"]):
        assert not Example.load(given).reflection
    assert "reflection is 'perhaps'" in failure("--reflection=perhaps")
    assert "--no-reflection: ignored explicit argument 'true'" in failure("--no-reflection=true")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Example().share = 0.1  # type: ignore[misc]


def test_unknown_keys_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("shared: 0.2\n")
    message = failure("--config", str(file))
    assert "shared in" in message and "is not a setting of this service" in message
    assert "share, reflection" in message and "0.2" not in message
    assert "--shar" in failure("--shar", "0.5")
    monkeypatch.setenv("SPECWIRE_EXAMPLE_TOKN", "hunter2")
    message = failure()
    assert "SPECWIRE_EXAMPLE_TOKN" in message and "hunter2" not in message


def test_service_links_of_containers_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_EXAMPLE_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("SPECWIRE_EXAMPLE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SPECWIRE_EXAMPLE_PORT_80_TCP_ADDR", "10.0.0.1")
    assert Example.load([]) == Example()


def test_invalid_values_name_field_value_and_what_is_accepted(tmp_path: Path) -> None:
    assert failure("--share", "2") == "share is '2'; accepted: less than or equal to 1"
    assert failure("--share", "x") == "share is 'x'; accepted: a valid number"
    assert "kv_pages is 'many'" in failure("--kv-pages", "many")
    assert "listen is" in failure("--listen", "[a")
    for name, text in (("s.ini", ""), ("s.toml", "a"), ("s.json", "[]"), ("s.yaml", "a: [")):
        (tmp_path / name).write_text(text)
        assert failure("--config", str(tmp_path / name)).startswith("config is")
    assert "No such file" in failure("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("s.yaml", "share: 0.2\nlisten: [a", "(line 2, column 11: expected ',' or ']'"),
        ("s.yml", "share: 0.2\nshare: 0.3\n", "each setting once (share is there twice)"),
        ("s.yaml", "kv-pages: 1\nkv_pages: 2", "(kv_pages is there twice, spelled in two ways)"),
        ("s.toml", "share = 0.2\nkv_pages = ", "(Invalid value (at "),
        ("s.toml", "share = 0.2\nshare = 0.3\n", "line 2"),
        ("s.json", '{"share": 0.2,\n}', "(line "),
        ("s.json", '{"share": 0.2, "share": 0.3}', "each setting once (share is there twice)"),
        ("s.yaml", "kv_pages: true", "kv_pages is True; accepted: a number"),
        ("s.json", '{"share": true}', "share is True; accepted: a number"),
    ],
)
def test_a_file_that_is_wrong_says_where(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert said in failure("--config", str(tmp_path / name))


def test_secrets_have_no_flag_and_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECWIRE_EXAMPLE_TOKEN", "hunter2")
    settings = Example.load([])
    assert settings.token is not None and settings.token.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings)
    assert "--token" in failure("--token", "x")
    monkeypatch.delenv("SPECWIRE_EXAMPLE_TOKEN")
    file = tmp_path / "s.json"
    file.write_text('{"token": 12345}')
    assert "12345" not in failure("--config", str(file))


def test_help_describes_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Example.load(["--help"])
    text = capsys.readouterr().out
    for part in ("An example service.", "--kv-pages N", "Addresses", "100% of", "default: 0.5"):
        assert part in text
    assert "SPECWIRE_EXAMPLE_NAME" in text and "--token" not in text
