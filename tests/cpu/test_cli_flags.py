"""Flags and files of the engine's settings that are no numbers."""

import argparse

import pytest

from kdtp.cli.flags import add_engine_flags, engine_config


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
