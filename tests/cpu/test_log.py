"""The log's two forms: neither can be forged by what is logged."""

import json

import pytest

from kdtp import log
from kdtp.log import logger


@pytest.fixture
def restored():
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_forms(restored, capsys):
    log.setup("worker tp=1", "info")
    logger.info("a %s", "b\n2026 forged")
    assert log.form() == "text"
    (line,) = capsys.readouterr().err.splitlines()
    assert "(worker tp=1 pid=" in line and line.endswith("a b\\n2026 forged")
    log.setup("server", "info", "json")
    logger.warning("x %s", 'a"\n{"forged": 1}')
    logger.debug("not this")
    try:
        raise ValueError("ünklar")
    except ValueError:
        logger.exception("failed")
    assert log.form() == "json"
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == 'x a"\n{"forged": 1}' and (first["level"], first["role"]) == ("warning", "server")
    assert set(first) == {"time", "level", "role", "pid", "message"}
    assert second["message"] == "failed" and "ValueError: ünklar" in second["error"]
