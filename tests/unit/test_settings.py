"""What a person has set of the cache and the log: kept, checked, and put into force for our logger alone."""

import io
import logging

import pytest
from comfy_accel.accel.core import settings
from comfy_accel.accel.core.events import emit, log
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.core.settings import LARGEST_MB, MOST_ENTRIES, Settings
from comfy_accel.accel.report import log as report_log


def test_what_is_written_is_read_again_and_the_rest_has_its_default(tmp_path):
    assert settings.read(tmp_path / "none") == Settings() and not (tmp_path / "none").exists()
    wanted = Settings(max_mb=64, max_entries=7, store_mb=9, verbosity="quiet", weights_in_place=True)
    settings.write(tmp_path / "home", wanted)
    assert settings.read(tmp_path / "home") == wanted
    (tmp_path / settings.NAME).write_text('{"max_mb": 5, "of a later version": 1}')
    assert settings.read(tmp_path) == Settings(max_mb=5)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"max_mb": -1}', '{"verbosity": "loud"}', "[" * 9999])
def test_damaged_file_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / settings.NAME).write_text(text)
    with pytest.raises(OSError, match="fix or delete"):
        settings.read(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_mb": -1}, f"0 to {LARGEST_MB}"),
        ({"max_mb": True}, "whole number"),
        ({"max_mb": 1.5}, "whole number"),
        ({"max_entries": MOST_ENTRIES + 1}, f"0 to {MOST_ENTRIES}"),
        ({"store_mb": LARGEST_MB + 1}, f"0 to {LARGEST_MB}"),
        ({"verbosity": "loud"}, "quiet, normal, debug"),
        ({"verbosity": []}, "quiet, normal, debug"),
        ({"weights_in_place": 1}, "true or false"),
    ],
)
def test_wrong_values_are_refused_with_the_range(wrong, said):
    with pytest.raises(ValueError, match=said):
        Settings(**wrong)


@pytest.fixture
def verbosity():
    root = logging.getLogger()
    before = root.level, list(root.handlers), log.level
    yield report_log.set_verbosity
    report_log.set_verbosity("normal")
    root.handlers[:] = before[1]
    root.setLevel(before[0])
    log.setLevel(before[2])


def lines_at(level):
    """A handler of the program's, in place of all others; and what it was given."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setLevel(level)
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger().setLevel(logging.INFO)
    return out


@pytest.mark.parametrize(("level", "said"), [("quiet", "E"), ("normal", "IWE"), ("debug", "DIWE")])
def test_verbosity_is_of_our_logger_alone(verbosity, level, said):
    out = lines_at(logging.NOTSET)
    verbosity(level)
    for logger in (log, logging.getLogger("somebody.else")):
        logger.debug("D"), logger.info("I"), logger.warning("W"), logger.error("E")
    assert out.getvalue().replace("\n", "") == said + "IWE"
    assert logging.getLogger().level == logging.INFO


@pytest.mark.parametrize(
    ("value", "wanted"), [("1", "debug"), ("yes", "debug"), ("0", None), ("off", None), ("", None), (None, None)]
)
def test_environment_asks_for_debugging(monkeypatch, value, wanted):
    monkeypatch.delenv(report_log.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(report_log.VARIABLE, value)
    assert report_log.read_environment() == wanted


def test_script_without_log_handlers_is_debugged_on_standard_error(verbosity, monkeypatch, capsys):
    handlers = logging.getLogger().handlers
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setenv(report_log.VARIABLE, "off")
    report_log.obey_environment()
    handlers.clear()
    log.debug("unheard")
    monkeypatch.setenv(report_log.VARIABLE, "1")
    report_log.obey_environment()
    report_log.obey_environment()
    log.debug("a line")
    assert capsys.readouterr().err == "a line\n"


def test_every_event_is_logged_and_the_key_of_what_is_made(verbosity):
    out, reason = lines_at(logging.NOTSET), Reason("compile_failed", error="no compiler")
    emit("graph_hit", name="Block", key="a key")
    assert out.getvalue() == ""
    verbosity("debug")
    emit("graph_hit", name="Block", key="a key")
    emit("compile_failed", name="Block", key="a key", reason=reason, seconds=0.5)
    emit("fallback", block="Block", reason=Reason("patched", patch="attn1"))
    assert "'a key'" not in out.getvalue()
    emit("graph_loaded", name="Block", key="a key", seconds=0.125)
    for said in ("graph_hit: ", "name Block, reason no compiler, seconds 0.5", "(attn1)", "seconds 0.125", ": 'a key'"):
        assert said in out.getvalue()
