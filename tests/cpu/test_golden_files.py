"""The golden files: what the script writes, sound to measure an engine by, and sensitive to every part of the model."""

import dataclasses

import numpy as np
import pytest
from reference_cases import run_text

import kdtp.config
import reference.config
from kdtp.model.weights.kdtr import Reader
from reference import mla, moe, rope
from reference.arith import sigmoid
from reference.config import YarnConfig, from_metadata, to_metadata
from reference.model import Model
from reference.weights import shapes
from scripts import gen_model_ref

REFS = gen_model_ref.ROOT / "tests" / "refs"
NAMES = ("model_tiny", "model_v3")
BOTH = pytest.mark.parametrize("name", NAMES)


def read(name):
    """Model, whole text, prompt length and golden logits of a file."""
    file = Reader(REFS / f"{name}.kdtr")
    config = from_metadata(file.metadata)
    model = Model(config, {key: file.array(key) for key in shapes(config)})
    prompt, tokens = file.array("golden.prompt"), file.array("golden.tokens")
    return model, [*prompt.tolist(), *tokens.tolist()], len(prompt), file.array("golden.logits")


def largest_difference(got, want):
    """Largest absolute difference of two arrays."""
    return float(np.abs(got - want).max())


def test_the_script_writes_these_bytes(tmp_path, capsys):
    gen_model_ref.main(["--out-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in NAMES:
        # Not the files themselves in the assertion: pytest would print a difference of megabytes.
        same = (tmp_path / f"{name}.kdtr").read_bytes() == (REFS / f"{name}.kdtr").read_bytes()
        assert same, f"{name}.kdtr differs from what scripts/gen_model_ref.py writes"
        assert str(tmp_path / f"{name}.kdtr") in printed
        assert ",".join(map(str, read(name)[1][-24:])) in printed


@BOTH
def test_golden_tokens_follow_from_the_file(name):
    """One pass over the whole text gives the logits that were collected token by token, bit for bit."""
    model, text, prompt, logits = read(name)
    assert run_text(model, text[:-1])[prompt - 1 :].tobytes() == logits.tobytes()
    assert logits.argmax(-1).tolist() == text[prompt:]


@BOTH
def test_contents(name):
    with Reader(REFS / f"{name}.kdtr") as file:
        file.verify()
        config = from_metadata(file.metadata)
        for key, shape in shapes(config).items():
            assert (file.entries[key].dtype, file.entries[key].shape) == ("float32", shape)
        extra = set(file.entries) - set(shapes(config))
        assert extra == {"golden.prompt", "golden.tokens", "golden.logits"}
        assert file.metadata["format"] == "kdtp-model" and isinstance(file.metadata["seed"], int)
        assert file.array("golden.tokens").dtype == file.array("golden.prompt").dtype == np.int64
        kdtp_config = kdtp.config.ModelConfig.from_metadata(file.metadata, name)
        assert dataclasses.asdict(kdtp_config) == dataclasses.asdict(config)
        assert {1, 2, 4} <= set(kdtp_config.legal_tp())
        assert {f"model.{key}" for key in to_metadata(config)} <= {f"model.{key}" for key in file.metadata}


def test_reference_and_kdtp_name_the_same_fields():
    for name in ("ModelConfig", "YarnConfig"):
        ours, theirs = (dataclasses.fields(getattr(module, name)) for module in (reference.config, kdtp.config))
        assert [(f.name, f.default) for f in ours] == [(f.name, f.default) for f in theirs]


@BOTH
def test_the_text_is_neither_close_nor_a_loop(name):
    _, text, prompt, logits = read(name)
    tokens = text[prompt:]
    margins = gen_model_ref.margins(logits)
    with Reader(REFS / f"{name}.kdtr") as file:
        assert margins.min() == np.float32(file.metadata["golden.min_margin"]) >= 1e-2
    assert len(set(tokens)) > 0.75 * len(tokens)
    assert len(set(zip(tokens, tokens[1:], tokens[2:], strict=False))) > 0.9 * (len(tokens) - 2)


def test_v3_runs_past_the_original_context():
    model, text, _, _ = read("model_v3")
    assert len(text) > 1.5 * model.config.rope_scaling.original_max_position_embeddings


@BOTH
def test_rounding_is_harmless(name):
    """Weights off by an ulp, as much as another order of summation: below the engine's bar of 1e-4, no expert flips."""
    model, text, prompt, logits = read(name)
    random = np.random.default_rng(0)
    noisy = {k: w * (1 + 1e-7 * random.uniform(-1, 1, w.shape)).astype(np.float32) for k, w in model.weights.items()}
    assert largest_difference(run_text(Model(model.config, noisy), text[:-1])[prompt - 1 :], logits) < 5e-5


def test_a_close_text_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"model_tiny: seed 7 has margin .*try another seed"):
        gen_model_ref.main(["--out-dir", str(tmp_path), "--seed", "7"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out-dir", "/nowhere"], "--out-dir /nowhere: not a folder"),
        (["--seed", "-1"], "--seed -1: must be 0..2^63-1"),
        (["--seed", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_options(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        gen_model_ref.main(argv)
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- every part shows

SHORT = 12  # tokens run by the tests below


@pytest.fixture(scope="module")
def short_runs():
    """Per file: the model, a text, and its logits."""
    runs = {}
    for name in NAMES:
        model, text, _, _ = read(name)
        runs[name] = model, text[:SHORT], run_text(model, text[:SHORT])
    return runs


def parts(name):
    """One weight of every part of the network, whose scale its successor does not divide out."""
    config = gen_model_ref.TINY.config if name == "model_tiny" else gen_model_ref.V3.config
    for i in range(config.num_hidden_layers):
        kinds = ["w_q_b" if config.q_lora_rank else "w_q", "kv_a_norm", "w_o"]
        moe_kinds = ["router", "experts.w_down", "shared.w_down"]
        kinds += ["w_down"] if i < config.first_k_dense_replace else moe_kinds
        yield from (f"layers.{i}.{kind}" for kind in kinds)
    yield from ("embed", "final_norm", "head")


@pytest.mark.parametrize(("name", "part"), [(name, part) for name in NAMES for part in parts(name)])
def test_one_percent_of_any_part_shows(name, part, short_runs):
    model, text, logits = short_runs[name]
    scaled = Model(model.config, {**model.weights, part: model.weights[part] * np.float32(1.01)})
    assert largest_difference(run_text(scaled, text), logits) > 2e-3  # 20 times the engine's bar


def changed(**fields):
    """A mutation of the configuration."""
    return lambda config, patch: dataclasses.replace(config, **fields)


def yarn(**fields):
    """A mutation of the YaRN settings."""
    return lambda config, patch: dataclasses.replace(
        config, rope_scaling=dataclasses.replace(config.rope_scaling, **fields)
    )


def patched(module, name, function):
    """A mutation of the code."""

    def apply(config, patch):
        patch.setattr(module, name, function)
        return config

    return apply


def route_with_biased_weights(config, logits, bias):
    scores = sigmoid(logits) + bias
    experts = moe.largest(moe.eligible(config, scores), config.num_experts_per_tok)
    return experts, scores[experts] / scores[experts].sum() * np.float32(config.routed_scaling_factor)


def route_without_bias(config, logits, bias, route=moe.route):
    return route(config, logits, np.zeros_like(bias))


def rotate_neighbours(config, x, positions, rotate=rope.rotate):
    """Pairs (0, 1), (2, 3)... where the weights are for halves."""
    order = np.arange(x.shape[-1]).reshape(-1, 2).T.reshape(-1)
    return rotate(config, x[..., order], positions)[..., np.argsort(order)]


MUTATIONS = {
    "no mscale in the softmax scale": patched(
        mla, "softmax_scale", lambda config: (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    ),
    "amplitude of cos and sin": yarn(mscale=1.1),
    "yarn factor 1 % off": yarn(factor=4.04),
    "original length halved": yarn(original_max_position_embeddings=32),
    "beta_fast 1": yarn(beta_fast=1.0),
    "no yarn": changed(rope_scaling=None),
    "rope_theta 10000": changed(rope_theta=10000.0),
    "rope pairs are neighbours": patched(mla, "rotate", rotate_neighbours),
    "bias in the weights": patched(moe, "route", route_with_biased_weights),
    "bias ignored": patched(moe, "route", route_without_bias),
    "groups ignored": changed(n_group=1),
    "group score by the largest": changed(topk_method="group_limited_greedy"),
    "softmax for sigmoid": changed(scoring_func="softmax"),
    "not normalised": changed(norm_topk_prob=False),
    "scaling factor dropped": changed(routed_scaling_factor=1.0),
    "shared expert dropped": changed(n_shared_experts=0),
    "eps 1 % of the mean square": changed(rms_norm_eps=1e-2),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mistake_shows(mutation, short_runs, monkeypatch):
    model, text, logits = short_runs["model_v3"]
    config = MUTATIONS[mutation](model.config, monkeypatch)
    assert isinstance(config.rope_scaling, YarnConfig | None)
    assert largest_difference(run_text(Model(config, model.weights), text), logits) > 1e-2
