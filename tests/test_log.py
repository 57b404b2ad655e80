import io
import json
import logging
import subprocess
import sys

import pytest
import structlog

from framework import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


pytestmark = pytest.mark.usefixtures("logging_restored")


def configured(level: str = "info", format: str = "json", process: str = "server") -> io.StringIO:
    stream = io.StringIO()
    log.configure(level, format, stream, process)
    return stream


def objects(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_line_has_event_fields_request_and_process() -> None:
    stream = configured(process="engine")
    with structlog.contextvars.bound_contextvars(request_id="req-1"):
        log.get_logger("framework.test").info("step %d done", 7, tokens=3)
    (line,) = objects(stream)
    assert line.pop("timestamp")
    assert line == {
        "event": "step 7 done",
        "tokens": 3,
        "request_id": "req-1",
        "logger": "framework.test",
        "level": "info",
        "process": "engine",
    }


def test_standard_logging_goes_through_the_same_renderer_with_the_request_id() -> None:
    stream = configured()
    with structlog.contextvars.bound_contextvars(request_id="req-2"):
        logging.getLogger("some.library").warning("retry %s", "soon")
    (line,) = objects(stream)
    assert (line["event"], line["request_id"], line["logger"]) == ("retry soon", "req-2", "some.library")
    assert "positional_args" not in line


def test_access_line_is_structured() -> None:
    stream = configured()
    logging.getLogger("uvicorn.access").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "POST", "/v1/completions", "1.1", 200
    )
    (line,) = objects(stream)
    assert line["event"] == "http request"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["client"], line["http_version"]) == ("127.0.0.1:5", "1.1")


@pytest.mark.parametrize(("told", "client"), [("", "unix"), ("9.9.9.9:0", "9.9.9.9"), ("::1:80", "::1:80")])
def test_clients_that_have_no_port(told: str, client: str) -> None:
    """On a Unix socket uvicorn knows nobody, and a proxy tells no port."""
    stream = configured()
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', told, "GET", "/", "1.1", 200)
    assert objects(stream)[0]["client"] == client


def test_exception_is_one_json_line() -> None:
    stream = configured()
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        log.get_logger("framework.test").exception("failed")
    (line,) = objects(stream)
    assert "ValueError: bad\nvalue" in str(line["exception"])


def test_text_is_readable_and_coloured_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = configured(format="auto")
    log.get_logger("framework.test").info("ready", port=8000)
    assert "\x1b" not in plain.getvalue()
    assert "ready" in plain.getvalue() and "port=8000" in plain.getvalue()
    assert "process=" not in plain.getvalue()

    terminal = Terminal()
    log.configure("info", "auto", terminal)
    log.get_logger("framework.test").info("ready")
    assert "\x1b" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    log.configure("info", "text", terminal)
    log.get_logger("framework.test").info("ready")
    assert "\x1b" not in terminal.getvalue()


def test_level_hides_and_debug_names_the_process() -> None:
    stream = configured(level="warning", format="text")
    log.get_logger("framework.test").info("hidden")
    assert stream.getvalue() == ""
    stream = configured(level="debug", format="text", process="engine")
    log.get_logger("framework.test").debug("shown")
    assert "process=engine" in stream.getvalue() and "framework.test" in stream.getvalue()


def test_noise_of_http_clients_needs_debug() -> None:
    stream = configured()
    logging.getLogger("httpx").info("HTTP Request: HEAD ...")
    assert stream.getvalue() == ""
    stream = configured(level="debug")
    logging.getLogger("httpx").info("HTTP Request: HEAD ...")
    assert len(objects(stream)) == 1


def test_configuring_again_does_not_repeat_lines() -> None:
    first = configured()
    second = configured()
    log.get_logger("framework.test").info("once")
    assert first.getvalue() == "" and len(objects(second)) == 1


def test_a_logger_made_before_configure_follows_it() -> None:
    logger = log.get_logger("framework.early")
    stream = configured(level="warning")
    logger.info("hidden")
    logger.warning("shown")
    assert [line["event"] for line in objects(stream)] == ["shown"]


UNCONFIGURED = """
import logging
from framework.log import get_logger
log = get_logger("framework.engine")
log.info("hidden")
log.warning("request %s ended", "a", tokens=3)
try:
    raise ValueError("bad value")
except ValueError as error:
    log.error("step failed", step=7, exc_info=error)
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
log.warning("once more", why="a reason")
"""


def test_lines_read_well_in_a_program_that_configured_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", UNCONFIGURED], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[:3] == ["request a ended tokens=3", "step failed step=7", "Traceback (most recent call last):"]
    assert lines[-2:] == ["ValueError: bad value", "WARNING framework.engine once more why='a reason'"]


LIBRARY = """
import sys
from framework import log
log.configure("info", "json", sys.stdout)
import huggingface_hub
huggingface_hub.logging.get_logger("huggingface_hub.file_download").warning("slow")
"""


def test_huggingface_hub_prints_each_line_once() -> None:
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["event"] == "slow"
    assert done.stderr == ""
