"""Flags and files of the engine's settings that are no numbers; flags that cannot be, have no effect, or are none."""

import argparse
import io
import os
import subprocess
import sys

import pytest

from kdtp.__main__ import main
from kdtp.cli import doctor
from kdtp.cli.flags import add_engine_flags, engine_config
from kdtp.config import ConfigError
from tests.paths import TINY


@pytest.mark.parametrize(
    ("file", "flags", "graphs"),
    [
        ("", [], True),
        ("", ["--no-graphs"], False),
        ("graphs = false", [], False),
        ("graphs = false", ["--graphs"], True),
    ],
)
def test_a_switch(tmp_path, file, flags, graphs):
    path = tmp_path / "settings.toml"
    path.write_text(f'model = "m"\n{file}\n')
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    assert engine_config(parser.parse_args(["--config", str(path), *flags])).graphs is graphs


@pytest.mark.parametrize(
    "name, text, flags, words",
    [
        ("a.toml", 'modle = "m"', [], "a.toml: unknown key 'modle'"),
        ("a.toml", "", [], "model: is missing"),
        ("a.json", '{"model": "m", "tp": 2, "tp": 1}', [], "--config a.json: two entries named 'tp'"),
        ("a.toml", 'model = "m"', ["--budget", "4"], "--budget: has no effect with the drafter none; is for oracle, "),
        ("a.toml", 'model = "m"', ["--width", "auto"], "--width: has no effect with the drafter none"),
        ("a.toml", 'model = "m"\n[drafter]\nname = "ngram"', ["--oracle-rank", "2"], "--oracle-rank: has no effect"),
    ],
)
def test_what_is_misspelt_or_has_no_effect(name, text, flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with pytest.raises(ConfigError) as caught:
        engine_config(parser.parse_args(["--config", name, *flags]))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "command, words",
    [
        (["build-kernels", "--jobs", "0"], "--jobs = 0: must be at least 1"),
        (["build-kernels", "--only", "moe", "nonsense"], "--only nonsense: must be among act, "),
        (["build-kernels", "--only", "act", "--selftest"], "--selftest: has no effect with --only"),
        (["chat", "--url", "http://127.0.0.1:1", "--drafter", "ngram"], "--drafter: is not for an endpoint"),
        (["chat", "--url", "http://127.0.0.1:1", "--max-batch", "2"], "--max-batch: is not for an endpoint"),
        (["chat", "--url", "http://127.0.0.1:99999"], "--url 'http://127.0.0.1:99999': Port out of range"),
        (["bench", "serve", "--vocab-size", "0"], "--vocab-size 0: must be at least 1"),
        (["bench", "serve", "--temperature", "nan"], "--temperature nan: must be 0..2"),
        (["generate", "--model", str(TINY), "--prompt-tokens", "1", "--regex", "\udcff"], "--regex: 0xdcff at"),
        (["generate", "--model", "pair", "--stop", "\udcff", "x"], "stop[0]: 0xdcff at character 0 is half"),
    ],
)
def test_values_that_cannot_be(command, words, capsys):
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kdtp {command[0]}: {words}") and said.count("\n") == 1


def test_a_full_disk_behind_standard_output():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "kdtp", "doctor"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (74, "kdtp: standard output: no space left on device\n")


@pytest.mark.parametrize("what", ["pair", str(TINY)])
def test_a_reader_that_leaves(what):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "kdtp", "inspect", what], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_text_that_standard_output_has_no_characters_for(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run", lambda chosen: print("\u00e9"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("kdtp doctor: standard output is ascii: ")
