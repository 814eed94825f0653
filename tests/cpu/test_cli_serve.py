"""What `kdtp serve` refuses before it serves, and what it calls a model."""

from __future__ import annotations

import pytest

from kdtp.__main__ import main
from kdtp.cli.serve import served_name
from tests.paths import TINY


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--served-model-name", ""), "--served-model-name '': must be printable"),
        (("--served-model-name", "a\nb"), r"--served-model-name 'a\nb': must be printable"),
        (("--allowed-host", ""), "--allowed-host '': must be a name"),
        (("--allowed-host", "http://my.name"), "--allowed-host 'http://my.name': must be a name"),
        (("--allowed-host", "my.name:80"), "without scheme and port"),
        (("--drafter", "oracle"), "must be none, ngram or dflash"),
    ],
)
def test_bad_flags(capsys, flags, words):
    assert main(["serve", "--model", str(TINY), "--port", "0", *flags]) == 2
    assert words in capsys.readouterr().err


def test_names_of_models(tmp_path, monkeypatch):
    folder = tmp_path / "Kimi-K2.5"
    folder.mkdir()
    assert served_name(str(folder)) == "Kimi-K2.5"
    monkeypatch.chdir(folder)
    assert served_name(".") == "Kimi-K2.5"
    assert served_name(str(TINY)) == "model_tiny" and served_name("pair") == "pair"
