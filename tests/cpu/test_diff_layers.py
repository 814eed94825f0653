"""Where the engine and the reference part is found at the right stage; what is compared is what both compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_cases import GOLDEN, RANDOM, write_random
from reference_cases import random_model

from kdtp.model.weights import kdtr
from reference.cache import Cache
from scripts.diff_layers import TOLERANCE, Line, compare, diff, main, parting, show
from scripts.layer_stages import run_reference, stages

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def parts_at(engine, reference, last="head"):
    lines = diff(engine, reference, PROMPT, last, "float32", CPU)
    first = parting(lines, TOLERANCE["float32"])
    return first.stage if first else None


@pytest.fixture(scope="module", params=RANDOM)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "m.kdtr"
    return RANDOM[request.param], write_random(path, RANDOM[request.param])


def test_every_stage_of_both_is_compared_in_order(model):
    config, path = model
    lines = diff(path, path, PROMPT, "head", "float32", CPU)
    assert [line.stage for line in lines] == stages(config)
    assert parting(lines, TOLERANCE["float32"]) is None
    assert all(0 <= line.ratio < 1e-4 and 1 - 1e-6 < line.cosine < 1 + 1e-6 for line in lines)
    assert sum(line.ratio == 0 for line in lines) < len(lines) // 2  # two computations, not one twice


def test_the_reference_is_the_reference(model):
    config, path = model
    told = {}
    run_reference(path, PROMPT, lambda stage, values: told.setdefault(stage, values))
    mask = np.tri(len(PROMPT), dtype=bool)
    cache = Cache(config, len(PROMPT))
    want = random_model(config).forward_tokens(PROMPT, range(len(PROMPT)), mask, cache)
    np.testing.assert_array_equal(told["head"], want)
    last = config.num_hidden_layers - 1
    np.testing.assert_array_equal(told[f"{last}.kv"], cache.rows[last])


@pytest.mark.parametrize(
    ("array", "stage"),
    [
        ("embed", "embed"),
        ("layers.0.attn_norm", "0.attn_norm"),
        ("layers.1.kv_a_norm", "1.kv"),
        ("layers.0.w_kv_a", "0.kv"),
        ("layers.1.w_q_a", "1.queries"),
        ("layers.1.w_kc", "1.queries"),
        ("layers.0.w_vc", "0.heads"),
        ("layers.1.w_o", "1.attn"),
        ("layers.1.mlp_norm", "1.mlp_norm"),
        ("layers.0.w_up", "0.mlp"),
        ("layers.1.router", "1.router"),
        ("layers.1.router_bias", "1.experts"),
        ("layers.1.experts.w_down", "1.moe"),
        ("layers.1.shared.w_gate", "1.moe"),
        ("final_norm", "head"),
        ("head", "head"),
    ],
)
def test_one_changed_weight_is_found_at_its_stage(array, stage, tmp_path):
    config = RANDOM["micro_v3"]
    changed = random_model(config).weights[array].copy()
    half = changed[..., : changed.shape[-1] // 2]  # a norm forgets a factor that all have
    half += np.float32(10) if array.endswith("router_bias") else np.float32(0.05) * half
    right = write_random(tmp_path / "right.kdtr", config)
    wrong = write_random(tmp_path / "wrong.kdtr", config, **{array: changed})
    assert parts_at(wrong, right) == parts_at(right, wrong) == stage


@pytest.mark.parametrize("last", ["embed", "0.kv", "0.queries", "1.experts", "1.moe"])
def test_it_stops_after_a_stage(last, tmp_path):
    config = RANDOM["micro_v3"]
    path = write_random(tmp_path / "m.kdtr", config)
    lines = diff(path, path, PROMPT, last, "float32", CPU)
    assert [line.stage for line in lines] == stages(config)[: stages(config).index(last) + 1]


def test_a_comparison():
    want = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    found = want + np.array([[0.0, 0.0], [0.0, -0.5]], np.float32)
    line = compare("x", found, want)
    assert (line.largest, line.at, line.ratio) == (0.5, (1, 1), pytest.approx(0.2))
    assert line.cosine == pytest.approx(25 / (5 * 25.25**0.5))
    assert compare("x", want, want).ratio == 0.0 and compare("x", 0 * want, 0 * want).cosine == 1.0
    lost = compare("x", np.where(want == 4, np.float32(np.nan), found), want)
    assert lost.at == (0, 1) and parting([line, lost], 0.5) == lost and parting([line], 0.1) == line
    assert compare("x", want, 0 * want).ratio == np.inf


def test_lines_are_shown():
    lines = [Line("embed", (2, 8), 0.0, (0, 0), 0.0, 1.0), Line("0.kv", (2, 4), 0.5, (1, 3), 0.25, 0.99)]
    text = show(lines, 1e-3).splitlines()
    assert text[0].split() == ["stage", "shape", "largest", "at", "ratio", "cosine"]
    assert text[2].split() == ["0.kv", "2x4", "0.5", "1,3", "2.50e-01", "0.990000000"]
    assert text[3] == "they part at 0.kv: ratio 2.50e-01" and show(lines, 0.3).endswith("no ratio above 0.3")


def test_the_command(capsys):
    tiny = str(GOLDEN["model_tiny"])
    assert main([tiny, "--stop-after", "1.moe"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("1.moe  ")
    assert main([tiny, "--stop-after", "0.mlp", "--dtype", "bfloat16", "--prompt", "1", "2", "3"]) == 0
    assert "3x256" in capsys.readouterr().out
    assert main([tiny, "--stop-after", "0.kv", "--tolerance", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("they part at 0.attn_norm: ratio ")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--stop-after", "9.moe"], "--stop-after 9.moe: must be one of embed, 0.attn_norm, "),
        (["--prompt", "1", "512"], "--prompt 512: must be in [0, 512)"),
        (["--prompt", *["1"] * 9000], "--prompt: 9000 tokens of at most "),
        (["--tolerance", "nan"], "--tolerance nan: must be at least 0"),
        (["--reference", str(GOLDEN["model_v3"])], "another model than"),
        (["--reference", "none.kdtr"], "none.kdtr"),
    ],
)
def test_illegal_flags(flags, error, capsys):
    with pytest.raises(SystemExit):
        main([str(GOLDEN["model_tiny"]), *flags])
    assert error in capsys.readouterr().err


def test_files_without_a_model_or_a_prompt(capsys, tmp_path):
    kdtr.write(tmp_path / "x.kdtr", {"format": "other"}, {})
    for path, error in (
        (tmp_path / "x.kdtr", "want 'kdtp-model', found 'other'"),
        (write_random(tmp_path / "m.kdtr", RANDOM["micro"]), "has no golden prompt: give --prompt"),
    ):
        with pytest.raises(SystemExit):
            main([str(path)])
        assert error in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="diff_layers: no CUDA device"):
        main([str(GOLDEN["model_tiny"]), "--device", "cuda"])
