"""`kdtp bench accept`: what it counts, its prompts, that a text which parts is seen, and a small run of everything."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from kdtp import pair
from kdtp.__main__ import main
from kdtp.bench import accept
from kdtp.cli import bench_accept
from kdtp.config import ConfigError, DrafterConfig, EngineConfig
from kdtp.engine.api import Engine
from kdtp.engine.rpc import EngineDead
from kdtp.messages import Usage
from kdtp.text import tokenizer
from kdtp.train.corpus import Document
from kdtp.watch import Round
from tests import pair_cases
from tests.processes import TINY

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("bench-accept")]
SMALL = ["--prompts", "2", "--prompt-tokens", "24", "--max-tokens", "12", "--budgets", "6", "--threads", "1"]


def shown(parents, path):
    size = len(parents)
    return Round(1, 0, tuple(range(size)), tuple(parents), (0.0,) * size, tuple(path), 7, {})


def test_depths_and_ranks():
    """
    0 -> 1 (rank 1), 3 (rank 2), 5 (rank 3); 1 -> 2; 3 -> 4, 6.
    """
    parents = (-1, 0, 1, 0, 3, 0, 3)
    ranks = accept.Ranks()
    for path in ((0, 3, 6), (0, 3), (0,), (0, 1, 2)):
        ranks.add(shown(parents, path))
    assert ranks.reached == {1: 4, 2: 3}
    assert ranks.taken == {(1, 2): 2, (1, 1): 1, (2, 2): 1, (2, 1): 1}
    ranks.add(shown((-1,), (0,)))  # nothing drafted
    ranks.add(shown((-1, 0), (0, 1)))  # not so deep that a second token could be taken
    assert ranks.reached == {1: 5, 2: 3}
    assert ranks.shares() == [[0.4, 0.4], [0.3333, 0.3333]]


def test_figures_of_a_point():
    stages = {"prefill": 500.0, "draft": 20.0, "verify": 70.0, "commit": 10.0}
    usages = [Usage(10, 0, 9, rounds=r, forwards=r + 1, committed=8, timings_ms=stages) for r in (2, 8)]
    way = accept.Way("x", "tree", 6, DrafterConfig("ngram"))
    found = accept.Point(way, 0.5, usages, accept.Ranks(), [1], 0.3, 6).figures()
    assert (found["tokens_per_round"], found["least"], found["most"]) == (2.5, 1.0, 4.0)
    assert found["spread"] == pytest.approx(2.1213) and found["tokens_per_second"] == 80.0
    assert (found["round_ms"], found["draft_ms"], found["verify_ms"]) == (20.0, 4.0, 14.0)
    assert found["equal_to_plain"] == 1 and found["prompts"] == 2 and found["round_cpu_ms"] == 50.0
    assert accept.Point(way, 0.5, usages, accept.Ranks(), [], 0.0, 0).figures()["round_cpu_ms"] is None


def test_prompts_come_from_many_modules():
    codec = tokenizer.load(pair.TARGET)
    text = "def f(x):\n    return x + 1\n" * 40
    documents = [Document(module, f"{module}{i}.py", f"# {module} {i}\n{text}") for module in "abc" for i in range(3)]
    documents.append(Document("d", "d.py", "short = 1\n"))
    found = accept.prompts(documents, codec, 5, 30, 3)
    assert {name[0] for name, _ in found[:3]} == set("abc") and len({name for name, _ in found}) == 5
    assert all(len(ids) == 30 and ids[0] == codec.begin[0] for _, ids in found)
    assert found == accept.prompts(documents, codec, 5, 30, 3) != accept.prompts(documents, codec, 5, 30, 4)
    with pytest.raises(ConfigError, match="prompts = 10: 9 of the held-out files have at least 60 tokens"):
        accept.prompts(documents, codec, 10, 30, 3)


def test_ways_share_a_block():
    found = accept.ways({"n": DrafterConfig("ngram", topk=3)}, [2, 9], 5)
    assert [(w.drafter, w.method, w.budget) for w in found] == [
        ("none", "AR", 0),
        ("n", "chain", 4),
        ("n", "tree", 2),
        ("n", "tree", 9),
    ]
    assert [w.config.shape for w in found[1:]] == ["chain", "tree", "tree"]
    assert all(w.config.block == 5 and w.config.topk == 3 for w in found[1:])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A few modules, some of which are held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        body = f"class C{i}:\n    def get_{i}(self, name):\n        return self.values[name]\n\n" * 12
        (folder / f"module{i}.py").write_text(f'"""Module {i}."""\n\n{body}')
    return folder


def test_everything_in_small(corpus, tmp_path, capsys):
    picture = tmp_path / "accept.png"
    drafters = [flag for name in ("ngram", "dflash=pair", "dflash+ngram=pair") for flag in ("--drafter", name)]
    flags = [*SMALL, "--corpus", str(corpus), *drafters, "--png", str(picture), "--temperatures", "0,1"]
    assert main(["bench", "accept", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "pair" and found["block"] == 8 and len(found["files"]) == 2 and found["complete"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    points = {(p["drafter"], p["method"], p["temperature"]): p for p in found["points"]}
    assert len(points) == 14 and all(p["equal_to_plain"] == 2 for p in points.values())
    assert points["none", "AR", 0.0]["tokens_per_round"] == 1.0
    assert all(0.1 < p["round_cpu_ms"] < 1000 for p in points.values())
    tree = points["dflash=pair", "tree", 0.0]
    assert tree["budget"] == 6 and tree["tokens_per_round"] > 1.5 and tree["draft_ms"] > 0
    assert 0.3 < sum(tree["taken_by_depth_and_rank"][0]) <= 1


def test_a_text_that_parts_is_seen(corpus, capsys, monkeypatch):
    measure = accept.Bench._measure

    def spoilt(self, engine, way, temperature):
        point, texts = measure(self, engine, way, temperature)
        return point, texts if way.method != "tree" else [texts[0], (*texts[1][:-1], 5)]

    monkeypatch.setattr(accept.Bench, "_measure", spoilt)
    flags = [*SMALL, "--corpus", str(corpus), "--drafter", "ngram", "--temperatures", "0"]
    assert main(["bench", "accept", *flags]) == 1
    out, error = capsys.readouterr()
    assert "NOT EQUAL: ngram tree 6 T=0, prompt 1 (module" in error
    assert "5 of 6 texts are plain decoding's" in out and "tokens/round" in out


def test_a_chat_template_comes_on_top(corpus, tmp_path, capsys):
    for path in pair.TARGET.iterdir():
        (tmp_path / path.name).symlink_to(path)
    template = "{{ bos_token }}{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}{% endfor %}def "
    (tmp_path / "chat_template.jinja").write_text(template)
    codec = tokenizer.load(tmp_path)
    ids = bench_accept._asked(codec, bench_accept._template(codec), [*codec.begin, *codec.encode("import os\n")])
    assert ids == [*codec.begin, *codec.encode("# user\nimport os\ndef ")]
    flags = [*SMALL, "--corpus", str(corpus), "--model", str(tmp_path), "--drafter", "ngram", "--chat"]
    assert main(["bench", "accept", *flags, "--temperatures", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chat"] and found["tp"] == 1 and all(p["equal_to_plain"] == 2 for p in found["points"])
    assert main(["bench", "accept", *flags, "--max-tokens", "2020"]) == 2
    assert "--prompt-tokens 24: the chat template makes up to 29 of it; with" in capsys.readouterr().err


def test_two_ranks_accept_what_one_does():
    """Greedy, depth by depth, from the first round on; ranks in processes of their own tell no processor time."""
    way, found = accept.Way("dflash", "tree", 6, DrafterConfig("dflash", budget=6, model="pair")), []
    asked = pair_cases.prompts()[:2]
    for tp in (1, 2):
        bench = accept.Bench(EngineConfig("pair", tp=tp, threads=1, drafter=way.config), asked, [0.0], 24, 0)
        with Engine.of(bench.config) as engine:
            point, texts = bench._measure(engine, way, 0.0)
        counted = {key: value for key, value in point.figures().items() if not key.endswith(("_ms", "_second"))}
        found.append((counted, texts, point.ranks, point.figures()["round_cpu_ms"] is None))
    (*one, measured), (*two, not_measured) = found
    assert one == two and one[0]["tokens_per_round"] > 1.5 and (measured, not_measured) == (False, True)


def dies():
    raise EngineDead("rank 1 ended")


def refused():
    raise ConfigError("a.safetensors: tensor 'x'")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "interrupted"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 130, "interrupted"),
        (dies, 70, "kdtp bench: rank 1 ended"),
        (refused, 2, "kdtp bench: a.safetensors: tensor 'x'"),
    ],
    ids=["Ctrl-C", "SIGTERM", "a dead engine", "an unsound drafter"],
)
def test_what_was_measured_before_an_end_is_shown(end, code, words, corpus, tmp_path, capsys, monkeypatch):
    picture = tmp_path / "accept.png"
    end_after(monkeypatch, 4, end)
    before = signal.getsignal(signal.SIGTERM)
    flags = ["bench", "accept", *SMALL, "--corpus", str(corpus), "--drafter", "ngram", "--png", str(picture)]
    assert main(flags) == code and signal.getsignal(signal.SIGTERM) == before
    out, error = capsys.readouterr()
    assert error.endswith(f"{words}\n4 of 6 rows were measured\n")
    assert out.count("12 behind each; PARTIAL, 4 of 6 rows, T =") == 2 and "8 of 8 texts are plain decoding's" in out
    assert out.count("chain") == 4 and "tree" not in out and picture.exists()


def end_after(monkeypatch, rows, end):
    """Let something end it when so many rows were measured; from then on at once."""
    measure, left = accept.Bench._measure, iter(range(rows))

    def ends(self, engine, way, temperature):
        if next(left, None) is None:
            end()
        return measure(self, engine, way, temperature)

    monkeypatch.setattr(accept.Bench, "_measure", ends)


def test_an_end_after_one_row_and_before_any(corpus, capsys, monkeypatch):
    flags = ["bench", "accept", *SMALL, "--corpus", str(corpus), "--drafter", "ngram"]
    end_after(monkeypatch, 1, dies)
    assert main([*flags, "--json"]) == 70
    found = json.loads(capsys.readouterr().out)
    assert not found["complete"] and [point["method"] for point in found["points"]] == ["AR"]
    assert main(flags) == 70
    out, error = capsys.readouterr()
    assert out == "" and error.endswith("rank 1 ended\n0 of 6 rows were measured\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chat"], "target has no chat template; must have chat_template.jinja, or chat_template in"),
        (["--tp", "3"], "tp = 3"),
        (["--prompts", "0"], "--prompts 0: must be 1..1000"),
        (["--prompt-tokens", "3000"], "--prompt-tokens 3000: must be 2..2046"),
        (["--max-tokens", "2000"], "--max-tokens 2000: must be 2..1856"),
        (["--block", "1"], "--block 1: must be at least 2"),
        (["--model", str(TINY), "--drafter", "dflash=pair"], "vocab_size = 3072: the model's is 512"),
        (["--model", str(TINY)], "no tokenizer; looked for"),
        (["--png", "/nonexistent/a.png"], "there is no folder /nonexistent"),
        (["--png", "/tmp"], "--png /tmp: is a folder; must be a file"),
        (["--temperatures", "0,3", "--corpus", "CORPUS", *SMALL], "temperature = 3.0: must be"),
    ],
)
def test_refusals(flags, words, corpus, capsys):
    flags = [str(corpus) if flag == "CORPUS" else flag for flag in flags]
    assert main(["bench", "accept", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and "AR" not in error  # before anything is measured


def test_a_picture_that_cannot_be_written_loses_no_figures(corpus, capsys):
    flags = [*SMALL, "--corpus", str(corpus), "--drafter", "ngram", "--temperatures", "0", "--png", "/proc/x.png"]
    assert main(["bench", "accept", *flags]) == 2
    out, error = capsys.readouterr()
    assert "6 of 6 texts are plain decoding's" in out and "--png /proc/x.png" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drafter", "oracle"], "'oracle': must be one of ngram, dflash, dflash+ngram"),
        (["--drafter", "dflash"], "drafter.model = '': must be a folder with dflash"),
        (["--drafter", "ngram=x"], "drafter.model = 'x'"),
        (["--budgets", "0,4"], "must be counts of 1..1024"),
        (["--temperatures", "-1"], "must be temperatures"),
    ],
)
def test_flags_that_cannot_be(flags, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "accept", *flags])
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_plain_decoding_comes_first():
    way = accept.ways({}, [4], 8)[0]
    bench = accept.Bench(None, [], [], 4, 0)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="nothing to compare with"):
        next(bench.run([replace(way, method="tree")], print))
