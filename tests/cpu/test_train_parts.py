"""The parts of `kdtp train`: INT4, networks against their references, the corpus, the shipped recipes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.config import ConfigError, build
from kdtp.draft.dflash import config as dflash
from kdtp.model.weights import safetensors
from kdtp.model.weights.hf_model import unpacked
from kdtp.text import tokenizer
from kdtp.train import bpe, config, corpus, drafter_folder, folder, int4, job_drafter, job_target, sample
from kdtp.train.config import RECIPES, DrafterTrain, TargetTrain
from kdtp.train.drafter import Drafter
from kdtp.train.job_drafter import DrafterJob
from kdtp.train.job_target import TargetJob, Text
from kdtp.train.journal import Journal, read
from kdtp.train.sample import continuations
from kdtp.train.target import Gate, Norm
from reference.dflash import log_softmax
from tests import dflash_cases, train_cases


@given(st.integers(0, 1 << 32), st.sampled_from([1e-12, 1e-3, 1.0, 1e4]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_int4_is_what_the_engine_unpacks(seed: int, size: float, zeros: bool) -> None:
    w = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(seed)) * size
    if zeros:
        w[0, 1] = 0
    numbers, scales = int4.quantise(w)
    assert numbers.min() >= -8 and numbers.max() <= 7 and torch.equal(scales, scales.bfloat16().float())
    want = int4.values(numbers, scales)
    words = int4.words(numbers)
    assert torch.equal(torch.stack([unpacked(*each) for each in zip(words, scales, strict=True)]), want)
    assert torch.equal(int4.rounded(w), w + (want - w))
    assert ((want - w).abs() <= scales.repeat_interleave(32, -1) * 0.6).all()


def test_rounding_lets_the_gradient_through() -> None:
    w = torch.randn(4, 32, requires_grad=True)
    (int4.rounded(w) * 3).sum().backward()  # type: ignore[no-untyped-call]
    (int4.rounded_bf16(w) * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None and torch.equal(w.grad, torch.full_like(w, 5))


_TRAINED = ["v1", "one_kv_head", "causal", "nested_causal", "sliding", "sliding_both_ways", "yarn", "kimi"]
_TRAINED += ["deepseek_yarn", "attention_factor", "v2"]


@pytest.mark.parametrize("name", _TRAINED)
def test_a_drafter_in_training_is_the_reference(name: str) -> None:
    reference = dflash_cases.random_drafter(name)
    network = Drafter(dflash.parse(dflash_cases.CASES[name], name))
    for module in network.modules():
        assert not isinstance(module, Norm) or module._eps == 1e-5
    network.load_state_dict({key: torch.from_numpy(value) for key, value in reference.weights.items()})
    features = np.random.default_rng(1).standard_normal((2, 12, network.config.features)).astype(np.float32)
    starts, roots = torch.tensor([[3, 11, 1], [7, 2, 12]]), torch.tensor([[5, 90, 7], [1, 7, 33]])
    with torch.no_grad():
        found = network(torch.from_numpy(features), starts, roots, torch.from_numpy(reference.embed))
    for sequence in range(2):
        for block in range(3):
            start, root = int(starts[sequence, block]), int(roots[sequence, block])
            want = reference.hidden(features[sequence, :start], root)
            assert np.abs(found[sequence, block].numpy() - want).max() < 1e-4, (sequence, block)


def test_the_selector_in_training_is_the_reference() -> None:
    reference = dflash_cases.random_drafter("v2")
    network = Drafter(dflash.parse(dflash_cases.CASES["v2"], "v2"))
    network.load_state_dict({key: torch.from_numpy(value) for key, value in reference.weights.items()})
    features = np.random.default_rng(1).standard_normal((9, network.config.features)).astype(np.float32)
    want = reference.conditionals(features, 17)
    hidden = torch.from_numpy(reference.hidden(features, 17)[1:])
    logits, ids = (hidden @ torch.from_numpy(reference.head)).topk(8, -1)
    selector = network.candidate_selector
    assert selector is not None and ids.tolist() == want.ids.tolist()
    for depth, rank in ((0, 0), (1, 0), (1, 5), (4, 7)):
        before = torch.tensor(17 if depth == 0 else want.ids[depth - 1, rank])
        with torch.no_grad():
            scores = logits[depth] + selector(hidden[depth], before, ids[depth])
        assert np.abs(log_softmax(scores.numpy()) - want.lp[depth, rank]).max() < 1e-4


def test_seldom_chosen_experts_are_helped() -> None:
    gate = Gate(folder.build(train_cases.MODEL, "recipe").config)
    gate(torch.randn(50, 64))
    load = gate.load
    assert load.sum() == 50 * 2
    gate.rebalance(0.25)
    bias = gate.get_buffer("e_score_correction_bias")
    assert torch.equal(bias, 0.25 * (load.mean() - load).sign()) and bias.any()


def test_a_module_and_its_tests_are_on_one_side(tmp_path: Path) -> None:
    text = "x = y\n" * 1000
    names = ["cmd.py", "test/test_cmd.py", "heapq.py", "json/tool.py", "test/test_json/test_tool.py"]
    for name in [*names, "site-packages/heapq.py", "pydoc_data/topics.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text if name != "json/tool.py" else text + "# more\n")
    (tmp_path / "table.py").write_text("0x12345, " * 1000)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 1000)
    (tmp_path / "empty.py").write_text("")
    found = corpus.read(tmp_path)
    assert sorted(document.name for document in found.documents) == sorted(names)
    held_out = {"cmd.py", "test/test_cmd.py", "json/tool.py", "test/test_json/test_tool.py"}
    assert {document.name for document in found.held_out} == held_out
    assert {document.module for document in found.documents} == {"cmd", "heapq", "json"}


def test_some_of_the_modules_are_held_out() -> None:
    of = [corpus.Document(f"module{i}", "", "").is_held_out for i in range(2000)]
    assert 0.05 < sum(of) / 2000 < 0.09


def test_a_trained_tokenizer_gives_every_text_back(tmp_path: Path) -> None:
    texts = [path.read_text() for path in sorted(train_cases.write_corpus(tmp_path / "corpus").glob("*.py"))]
    bpe.train(tmp_path, texts, 400)
    tokens = tokenizer.load(tmp_path, 400)
    assert tokens.controls == {name: i for i, name in enumerate(bpe.CONTROLS)} and tokens.begin == (0,)
    assert tokens.stop_ids == {1}
    for text in (*texts[:3], "x\r\n\t\ty  = 'é 你好 [EOS]'  \n\n", "12345", ""):
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text and not {0, 1, 2, 3} & set(ids)
    assert len(tokens.encode("\n        ")) == 1  # a line break and its indentation are one token


def test_stretches_begin_as_prompts_do() -> None:
    text = Text(np.arange(100, dtype=np.uint16), 99, torch.device("cpu"))
    for tokens, after in (text.drawn(7, 10, torch.Generator().manual_seed(0)), text.spread(5, 10)):
        assert (tokens[:, 0] == 99).all() and torch.equal(tokens[:, 1:], after[:, :-1])
        assert torch.equal(after[:, 1:], after[:, :-1] + 1)
    assert text.spread(50, 10)[0].shape == (9, 10)
    with pytest.raises(ConfigError, match="must be below 100"):
        text.drawn(1, 100, torch.Generator())


def test_a_journal_forgets_what_comes_behind_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    journal = Journal(path, 0)
    journal.losses(1, [3.0, 2.0, 1.0])
    journal.held_out(3, 1.5, {"loss": 2.5})
    path.write_text(path.read_text() + '{"step"')
    assert [line["step"] for line in read(path)] == [1, 2, 3, 3]
    Journal(path, 2)
    assert [line["loss"] for line in read(path)] == [3.0, 2.0]
    for text in ("garbage", "[]", '{"loss": 2}'):
        path.write_text(f'{{"step": 1, "loss": 2.5}}\n{text}\n')
        with pytest.raises(ConfigError, match=r"loss\.jsonl: line 2 = .*: must be an object with a step"):
            Journal(path, 1)
    path.unlink()
    with pytest.raises(ConfigError, match="has none of the checkpoint's 3 steps"):
        Journal(path, 3)


def test_the_shipped_pair_fits() -> None:
    """Package data stays below 16 MB, with a tokenizer, a picture and cards; both split over two GPUs."""
    values, train = config.read(RECIPES / "target.json", TargetTrain, {})
    with torch.device("meta"):
        model = folder.build(values, "target.json")
    assert train.seq <= model.config.max_position_embeddings and model.config.moe_intermediate_size % 128 == 0
    sizes = {}
    for version in (1, 2):
        recipe, _ = config.read(RECIPES / f"drafter-v{version}.json", DrafterTrain, {})
        network = dflash.parse(drafter_folder.complete(recipe, model.config, 2), "recipe")
        assert network.version == version and 2 in network.legal_tp()
        with torch.device("meta"):
            sizes[version] = 2 * sum(p.numel() for p in Drafter(network).parameters())
    experts = sum(p.numel() for experts in model.experts for p in experts.parameters())
    others = sum(p.numel() for p in model.parameters()) - experts
    target = experts * (4 + 16 / 32) / 8 + 2 * others
    assert 9e6 < target < 10.5e6 and 4e6 < sizes[2] < 5e6
    assert target + sizes[2] < 15.4e6


def test_a_recipe_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": {}}))
    with pytest.raises(ConfigError, match="must be an object of two, model and train"):
        config.read(path, TargetTrain, {})
    train = train_cases.DRAFTERS[1]["train"]
    path.write_text(json.dumps({"model": {}, "train": {**train, "prompt": 48}}))
    with pytest.raises(ConfigError, match=r"recipe.json: train: train.seq = 48: must be above prompt, 48"):
        config.read(path, DrafterTrain, {})
    values = train_cases.DRAFTERS[1]["model"] | {"output_multiplier": 2.0}
    with pytest.raises(ConfigError, match=r"output_multiplier = 2.0: must be 1.0 in a drafter to be trained"):
        Drafter(dflash.parse(drafter_folder.complete(values, folder.build(train_cases.MODEL, "m").config, 2), "x"))


def test_a_target_with_fp8_is_refused(tmp_path: Path) -> None:
    from tests import hf_cases

    with pytest.raises(ConfigError, match=r"is FP8|a model to train has"):
        folder.load(hf_cases.write("fp8", tmp_path / "fp8"))


def test_what_is_written_is_sound(tmp_path: Path) -> None:
    """Names, shapes and forms of a target's tensors are those that the engine's own table asks for."""
    from kdtp.model.weights.hf import Checkpoint

    (tmp_path / "m").mkdir()
    model = folder.build(train_cases.MODEL | {"tie_word_embeddings": False}, "recipe")
    folder.write(tmp_path / "m", train_cases.MODEL | {"tie_word_embeddings": False}, model, 0, 1)
    with Checkpoint(tmp_path / "m") as checkpoint:
        assert checkpoint.quantized == ["INT4"] and not checkpoint.skipped and checkpoint.model.eos_token_ids == (1,)
    names = safetensors.File(tmp_path / "m" / "model.safetensors").tensors
    assert "lm_head.weight" in names and "model.layers.2.mlp.experts.5.down_proj.weight_packed" in names


def test_products_in_bfloat16_change_the_loss_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What training on a GPU does, and a CPU can."""
    torch.manual_seed(0)
    target = folder.build(train_cases.MODEL, "recipe").eval()
    values = drafter_folder.complete(train_cases.DRAFTERS[2]["model"], target.config, 2)
    drafter = Drafter(dflash.parse(values, "recipe"))
    texts = torch.randint(384, (9, 48), generator=torch.Generator().manual_seed(0))
    text = Text(texts.flatten().numpy().astype(np.uint16), 0, torch.device("cpu"))
    trains = (build(kind, case["train"], "recipe") for kind, case in _KINDS)
    jobs = [
        TargetJob(target, next(trains), text, text, 3.0),  # type: ignore[arg-type]
        DrafterJob(drafter, target, next(trains), texts.int(), texts.int()),  # type: ignore[arg-type]
    ]

    def losses() -> list[torch.Tensor]:
        return [job.loss(torch.Generator().manual_seed(1)) for job in jobs]

    plain = losses()
    for module in (job_target, job_drafter, sample):
        monkeypatch.setattr(module, "precision", lambda device: torch.autocast("cpu", torch.bfloat16))
    for loss, want in zip(losses(), plain, strict=True):
        assert 0 < (loss - want).abs() < 0.02 * want
        loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in target.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
    assert continuations(target, texts[:3, :5], 9, torch.tensor([0.0, 1.0, 0.5]), seed=0).shape == (3, 9)


_KINDS = ((TargetTrain, train_cases.TARGET), (DrafterTrain, train_cases.DRAFTERS[2]))
