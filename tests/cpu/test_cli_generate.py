"""`kdtp generate` as scripts use it: JSON, checks and exit codes, refusals, interruption."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from kdtp.__main__ import main
from kdtp.cli.check import check
from kdtp.cli.flags import add_engine_flags, engine_config
from kdtp.config import EngineConfig
from kdtp.engine.api import Completion
from kdtp.engine.plan import plan
from kdtp.messages import Usage
from kdtp.model.weights import kdtr
from tests.conftest import ROOT
from tests.processes import TINY, V3, until

GOLDEN = plan(EngineConfig(str(TINY))).golden
PERFECT = ("--drafter", "oracle", "--block", "8", "--budget", "16")


def generate(capsys, *flags: object, model=TINY) -> tuple[int, dict]:
    """Run in this process; exit code and the JSON object."""
    code = main(["generate", "--model", str(model), "--threads", "1", "--json", *map(str, flags)])
    return code, json.loads(capsys.readouterr().out)


def rewritten(tmp_path, metadata=None, **arrays):
    """A copy of the tiny model with some arrays or metadata replaced."""
    with kdtr.Reader(TINY) as reader:
        all_arrays = {name: np.array(reader.array(name)) for name in reader.entries}
        path = tmp_path / "model.kdtr"
        kdtr.write(path, reader.metadata | (metadata or {}), all_arrays | arrays)
    return path


def test_the_main_job(capsys):
    code, out = generate(capsys, *PERFECT, "--check")
    assert code == 0
    assert out["prompt"] == list(GOLDEN.prompt) and out["tokens"] == list(GOLDEN.tokens)
    assert (out["rounds"], out["forwards"], out["tokens_per_round"], out["finish_reason"]) == (3, 4, 8.0, "length")
    assert out["accepted_by_depth"] == [3] * 7
    assert {"draft", "build", "verify", "accept", "commit"} <= set(out["timings_ms"])
    assert out["matches_ar"] is True and out["matches_golden"] is True
    assert out["max_abs_logit_diff"] <= 1e-4 and out["max_abs_logit_diff_ar"] == 0.0


def test_plain_decoding_is_the_default(capsys):
    code, out = generate(capsys, "--check")
    assert code == 0 and (out["rounds"], out["forwards"], out["tokens_per_round"]) == (23, 24, 1.0)


@pytest.mark.parametrize("model", [TINY, V3])
@pytest.mark.parametrize("flags", [(), ("--shape", "chain"), ("--oracle-hit", "0.7,0.5", "--oracle-rank", 3)])
def test_checks_hold_for_every_shape(capsys, model, flags):
    code, out = generate(capsys, *PERFECT, *flags, "--check", model=model)
    assert code == 0 and out["matches_golden"] and out["max_abs_logit_diff_ar"] == 0.0


def test_a_wrong_golden_token_is_found(capsys, tmp_path):
    tokens = np.array(GOLDEN.tokens)
    tokens[13] = (tokens[13] + 1) % 512
    code, out = generate(capsys, "--check", model=rewritten(tmp_path, **{"golden.tokens": tokens}))
    assert code == 1 and out["matches_golden"] is False and out["matches_ar"] is True
    assert main(["generate", "--model", str(tmp_path / "model.kdtr"), "--check"]) == 1
    assert "AR != AR again != golden: 23/24" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "count", "golden"),
    [
        (["--max-tokens", 30], 30, 24),
        (["--max-tokens", 7], 7, 7),
        (["--stop-tokens", GOLDEN.tokens[5]], GOLDEN.tokens.index(GOLDEN.tokens[5]) + 1, None),
    ],
)
def test_how_much_of_the_golden_text_is_compared(capsys, flags, count, golden):
    code, out = generate(capsys, "--check", *PERFECT, *flags)
    assert code == 0 and len(out["tokens"]) == count and out["golden_tokens"] == (golden or count)
    assert main(["generate", "--model", str(TINY), "--check", *map(str, flags)]) == 0
    name = "golden" if count == out["golden_tokens"] else f"golden[:{golden}]"
    assert f"AR == AR again == {name}: {count}/{count}, " in capsys.readouterr().out


def test_a_text_that_ends_early_is_not_golden():
    short = Completion(GOLDEN.prompt, GOLDEN.tokens[:5], "length", Usage(), GOLDEN.logits[:5])
    verdict = check(short, short, GOLDEN)
    assert verdict.matches_ar and not verdict.holds
    assert (verdict.equal, verdict.tokens) == (5, 24)


def test_a_wrong_weight_shows_in_the_logits(capsys, tmp_path):
    with kdtr.Reader(TINY) as reader:
        norm = np.array(reader.array("layers.2.attn_norm")) * np.float32(1.01)
    _, out = generate(capsys, "--check", model=rewritten(tmp_path, **{"layers.2.attn_norm": norm}))
    assert out["max_abs_logit_diff"] > 2e-3


def test_limits_and_stops(capsys):
    _, out = generate(capsys, "--max-tokens", 5, *PERFECT)
    assert out["tokens"] == list(GOLDEN.tokens[:5]) and out["finish_reason"] == "length"
    stop = GOLDEN.tokens[12]
    _, out = generate(capsys, "--stop-tokens", f"511,{stop}", *PERFECT)
    assert out["tokens"] == list(GOLDEN.tokens[: GOLDEN.tokens.index(stop) + 1]) and out["finish_reason"] == "stop"


def test_end_tokens_of_the_model(capsys, tmp_path):
    end = GOLDEN.tokens[9]
    model = rewritten(tmp_path, {"model.eos_token_ids": [end]})
    _, out = generate(capsys, model=model)
    assert out["finish_reason"] == "stop" and out["tokens"][-1] == end
    _, out = generate(capsys, "--ignore-eos", model=model)
    assert out["tokens"] == list(GOLDEN.tokens)


def test_sampling_is_a_function_of_the_seed(capsys):
    flags = (
        "--prompt-tokens",
        "5,6,7",
        "--max-tokens",
        12,
        "--temperature",
        1.0,
        "--top-p",
        0.95,
        "--top-k",
        50,
        "--min-p",
        0.01,
    )
    texts = [generate(capsys, *flags, "--seed", s, "--drafter", d)[1]["tokens"] for s, d in
             ((1, "none"), (1, "ngram"), (2, "none"))]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
    code, out = generate(capsys, *flags, "--drafter", "ngram", "--check")
    assert code == 0 and out["matches_ar"] and out["matches_golden"] is None and out["max_abs_logit_diff"] is None


@pytest.mark.parametrize("flag", ["repetition", "presence", "frequency"])
def test_penalties(capsys, flag):
    flags = (f"--{flag}-penalty", 1.9, "--drafter", "ngram", "--max-tokens", 24, "--check")
    code, out = generate(capsys, "--prompt-tokens", "5,6,7,5,6,7", *flags)
    _, plain = generate(capsys, "--prompt-tokens", "5,6,7,5,6,7", "--max-tokens", 24)
    assert code == 0 and out["matches_ar"] and out["tokens"] != plain["tokens"]
    assert len(set(out["tokens"])) > len(set(plain["tokens"]))
    code, out = generate(capsys, f"--{flag}-penalty", 1.9, "--check")  # the file's own prompt, but not its text
    assert code == 0 and out["matches_golden"] is None


def test_no_end_before_so_many(capsys):
    stop = GOLDEN.tokens[3]
    _, out = generate(capsys, "--stop-tokens", stop, "--min-tokens", 9, "--max-tokens", 12)
    assert len(out["tokens"]) >= 9 and out["tokens"][:3] == list(GOLDEN.tokens[:3]) and stop not in out["tokens"][:9]


def test_bfloat16_runs_and_tree_equals_plain(capsys):
    code, out = generate(capsys, *PERFECT, "--dtype", "bfloat16", "--check")
    assert out["matches_ar"] is True and out["max_abs_logit_diff_ar"] == 0.0
    assert 1e-4 < out["max_abs_logit_diff"] < 1.0
    assert code == (0 if out["matches_golden"] else 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", 3], ["tp = 3", "1, 2, 4"]),
        (["--temperature", -1], ["temperature = -1.0"]),
        (["--temperature", "nan"], ["temperature = nan"]),
        (["--top-p", 0], ["top_p = 0.0"]),
        (["--max-tokens", 0], ["max_tokens = 0"]),
        (["--repetition-penalty", 0], ["repetition_penalty = 0.0", "0.01..100"]),
        (["--min-tokens", 99, "--max-tokens", 9], ["min_tokens = 99: must be 0..9"]),
        (["--prompt-tokens", "1,512"], ["prompt[1] = 512", "[0, 512)"]),
        (["--prompt-tokens", ""], ["--prompt-tokens = ''", "at least one token id"]),
        (["--prompt-tokens", ",".join(["1"] * 600)], ["600", "512"]),
        (["--prompt-tokens", "1", "--drafter", "oracle"], ["oracle"]),
        (["--stop-tokens", 777], ["stop_tokens[0] = 777"]),
        (["--config", "/nonexistent.toml"], ["/nonexistent.toml"]),
        (["--oracle-rank", 99], ["--oracle-rank: drafter.rank = 99: must be 1..topk (16)"]),
        (["--oracle-hit", "0.5,2"], ["--oracle-hit: drafter.hit = (0.5, 2.0)", "probabilities 0..1"]),
        (["--drafter-seed", 2**63], ["--drafter-seed: drafter.seed = "]),
        (["--drafter", "dflash"], ["--drafter-model: drafter.model = '': must be a folder with dflash"]),
        (["--drafter", "ngram", "--drafter-window", 5], ["--drafter-window: has no effect with the drafter ngram;"]),
        (["--oracle-hit", 1], ["--oracle-hit: has no effect with the drafter none; is for oracle"]),
        (["--drafter", "magic"], ["--drafter: drafter = 'magic': must be one of none, oracle, ngram"]),
        (["--max-queue", 0], ["--max-queue: max_queue = 0: must be 1..1048576"]),
        (["--step-timeout", "nan"], ["--step-timeout: step_timeout = nan"]),
        (["--kv-tokens", 64, "--max-tokens", 200], ["KV pages"]),
    ],
)
def test_bad_input_is_one_line(capsys, flags, words):
    assert main(["generate", "--model", str(TINY), *map(str, flags)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget", "x"], "argument --budget: invalid int value: 'x'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--prompt-tokens", "1,x"], "argument --prompt-tokens: '1,x': must be token ids, such as 5 or 5,6,7"),
        (["--stop-tokens", ","], "argument --stop-tokens: ',': must be token ids"),
        (["--oracle-hit", ""], "argument --oracle-hit: '': must be numbers, such as 0.9 or 1,0.8,0.6"),
    ],
)
def test_unreadable_flags(capsys, flags, words):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--model", str(TINY), *flags])
    assert words in capsys.readouterr().err


def test_a_file_without_a_prompt(capsys, tmp_path):
    with kdtr.Reader(TINY) as reader:
        kdtr.write(tmp_path / "m.kdtr", reader.metadata, {})
    assert main(["generate", "--model", str(tmp_path / "m.kdtr")]) == 2
    assert "--prompt-tokens: is missing, and the model file has no prompt of its own" in capsys.readouterr().err


def test_settings_from_a_file(capsys, tmp_path):
    settings = tmp_path / "s.toml"
    settings.write_text(f'model = "{TINY}"\nthreads = 1\n[drafter]\nname = "oracle"\nblock = 4\nbudget = 16\n')
    assert main(["generate", "--config", str(settings), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_round"] == 4.0
    assert main(["generate", "--config", str(settings), "--block", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_round"] == 8.0
    settings.write_text(settings.read_text() + "hit = [0.5]\n")  # is no use to another drafter, and no mistake either
    assert main(["generate", "--config", str(settings), "--drafter", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_round"] == 1.0
    settings.write_text(f'model = "{TINY}"\n[drafter]\nnmae = "oracle"\n')
    assert main(["generate", "--config", str(settings)]) == 2
    assert "s.toml: drafter: unknown key 'nmae'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("s.toml", 'drafter = "oracle"\n', "drafter = 'oracle': must be a table, with a name and settings"),
        ("s.toml", "[drafter]\nrank = 17\n", "drafter.rank = 17: must be 1..topk (16)"),
        ("s.toml", "[drafter]\nrank = 'x'\n", "drafter.rank: Expected `int`, got `str`"),
        ("s.json", '{"ping_interval": NaN}', "ping_interval = nan: must be 0.001..86400.0"),
        ("s.json", "[" * 100_000, "recursion"),
        ("s.json", "[]", "must be a table"),
        ("s.toml", "tp = ", "at end of document"),
    ],
)
def test_bad_settings_in_a_file(capsys, tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    assert main(["generate", "--model", str(TINY), "--config", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{name}: " in error and complaint in error and "$" not in error, error


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tokens", [0, 10], ids=["while starting", "while generating"])
def test_ctrl_c(tp, tokens):
    command = [
        sys.executable,
        "-m",
        "kdtp",
        "generate",
        "--model",
        TINY,
        "--tp",
        tp,
        "--max-tokens",
        500,
        "--ignore-eos",
    ]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for _ in range(tokens):
        assert process.stdout.readline()
    time.sleep(0.0 if tokens else 1.0)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    # Python itself ends by the signal when it comes while a module is imported; a shell shows 130 for both.
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in error, error
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 20)


@pytest.mark.parametrize("command", [["inspect", TINY], ["generate", "--model", TINY], ["doctor"], ["--help"]])
def test_output_that_nobody_reads(command):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kdtp", *map(str, command)]
    # Without a buffer argparse hides the error, and the code is 0.
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=buffered, text=True, timeout=60)
    os.close(writing)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "Broken" not in done.stderr, done.stderr


@pytest.mark.timeout(120)
def test_a_reader_that_leaves_ends_the_processes_too():
    command = [
        sys.executable,
        "-m",
        "kdtp",
        "generate",
        "--model",
        TINY,
        "--tp",
        2,
        "--max-tokens",
        400,
        "--ignore-eos",
    ]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    process.stdout.close()
    assert len(family) >= 3 and process.wait(30) == 141
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 20)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_settings_are_legal(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    assert plan(engine_config(parser.parse_args(["--config", str(path)]))).golden is not None
