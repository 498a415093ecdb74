"""Settings of the draft service: what fits together, and what is refused by name."""

from __future__ import annotations

import pytest

from draft_svc.settings import DraftSettings
from engine.attention.table_native import ROWS
from specwire.errors import Reason, SpecwireError
from target_svc.settings import TargetSettings


def test_defaults_host_every_method_and_the_last_is_the_default() -> None:
    settings = DraftSettings.load([])
    assert settings.methods == ("ngram", "hybrid", "dspark", "dflash")
    assert (settings.chosen_default, settings.hybrid_neural) == ("dflash", "dflash")
    assert settings.limits().rows_buffer_bytes == 64 * 1024 * 1024


def test_another_target_hosts_what_it_names_drafts_for() -> None:
    """The shipped drafts are for the default target."""
    other = DraftSettings.load(["--target", "other", "--draft", "folder"])
    assert other.methods == ("ngram", "hybrid", "dflash")
    both = DraftSettings.load(["--target", "other", "--draft", "folder", "--dspark", "spark"])
    assert set(both.methods) == {"ngram", "hybrid", "dspark", "dflash"}
    asked = DraftSettings.load(["--target", "other", "--methods", "ngram,dspark"])
    assert asked.methods == ("ngram", "dspark")


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_DRAFT_ROWS_WAIT_MS", "5")
    monkeypatch.setenv("SPECWIRE_DRAFT_METHODS", "ngram,dflash")
    settings = DraftSettings.load(["--methods", "ngram", "--default-method", "ngram"])
    assert settings.methods == ("ngram",) and settings.rows_wait_ms == 5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--methods", "ngram,magic"], "magic"),
        (["--methods", "ngram", "--default-method", "dflash"], "default_method"),
        (["--ngram-min", "5", "--ngram-max", "4"], "ngram_min"),
        (["--rows-wait-ms", "-1"], "rows_wait_ms"),
        (["--max-draft-tokens", "0"], "max_draft_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(flags: list[str], named: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        DraftSettings.load(flags)
    assert caught.value.reason is Reason.SETTINGS_INVALID
    assert named in caught.value.message


def test_engine_options_are_those_of_the_target_and_the_drafts_own() -> None:
    flags = ["--dtype", "float32", "--threads", "3", "--page-tokens", "8", "--device", "cpu"]
    config = DraftSettings.load(flags).engine_config("model")
    assert (config.model, config.dtype, config.threads) == ("model", "float32", 3)
    assert (config.page_tokens, config.device, config.kv_memory_mb) == (8, "cpu", 128)
    assert TargetSettings.load(flags).engine_config("other").kv_memory_mb == 1024


@pytest.mark.parametrize(
    ("settings", "field"),
    [(DraftSettings, "kv_dtype"), (TargetSettings, "kv_dtype"), (TargetSettings, "draft_kv_dtype")],
)
def test_the_text_of_a_kv_dtype_names_what_is_accepted(
    settings: type[DraftSettings | TargetSettings], field: str
) -> None:
    """All that some backend of ours takes, and nothing else."""
    accepted = {name for backend in ROWS for rule in backend.kv for name in rule.accepts}
    text = settings.model_fields[field].description or ""
    named = {word.strip(",") for word in text.partition(":")[2].partition("(")[0].split()} - {"or"}
    assert named == accepted


def test_a_method_that_is_none_is_told_the_others() -> None:
    with pytest.raises(SpecwireError, match=r"methods is 'eagle'; accepted: ngram, hybrid, "):
        DraftSettings.load(["--methods", "eagle"])
