"""What a TP=8 rank of Kimi K2.6 keeps, reads, computes and waits for, by arithmetic on scripts/k26.py's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from kdtp.kernels.cuda import SPLIT
from kdtp.model.graphs import ROWS
from scripts import k26
from scripts.k26 import EXPERTS, HEADS, HIDDEN, KV_ROW, LAYERS, LORA, TOPK

SPARSE = LAYERS - k26.DENSE_LAYERS  # layers with experts
KV_BYTES = LAYERS * KV_ROW * 2  # of a position, on every rank
ROPE_BYTES = k26.ROPE * 4  # cosines and sines of a position
ALL_REDUCES = 2 * LAYERS + 1  # after attention, after the MLP; the embedding's
LONGEST = 262_144
FOLDED = 256  # rows of 8 heads from which the attention keeps fewer states (csrc/ops/mla_tree.cu)
RESERVE = 2.0e9  # CUDA, NCCL and the graphs' own nodes: assumed
PREFILL = 8 * 256  # rows of the largest forward by the engine's defaults


@dataclass(frozen=True)
class Part:
    """A part of the weights. width: bytes per weight; read: whether a step reads all of it."""

    name: str
    layers: int
    weights: int
    width: float = 2.0
    read: bool = True

    @property
    def bytes(self) -> float:
        """On a rank."""
        return self.layers * self.weights * self.width


PARTS = (
    Part("q_a + kv_a, whole on every rank", LAYERS, HIDDEN * (k26.Q_LORA + KV_ROW)),
    Part("q_b", LAYERS, k26.Q_LORA * HEADS * (k26.NOPE + k26.ROPE)),
    Part("w_kc + w_vc", LAYERS, HEADS * LORA * (k26.NOPE + k26.V)),
    Part("w_o", LAYERS, HEADS * k26.V * HIDDEN),
    Part("routed experts, INT4", SPARSE, EXPERTS * 3 * HIDDEN * k26.INTER, 1 / 2 + 2 / 32, read=False),
    Part("shared expert", SPARSE, 3 * HIDDEN * k26.SHARED),
    Part("router, whole on every rank", SPARSE, HIDDEN * EXPERTS),
    Part("dense MLP", k26.DENSE_LAYERS, 3 * HIDDEN * k26.DENSE),
    Part("embedding", 1, k26.VOCAB * HIDDEN, read=False),
    Part("head", 1, k26.VOCAB * HIDDEN),
)
WEIGHTS = sum(part.bytes for part in PARTS)
ALWAYS = sum(part.bytes for part in PARTS if part.read)
MORE = next(part.bytes for part in PARTS if "router" in part.name)  # the engine has it in float32
EXPERT_BYTES = next(part.bytes for part in PARTS if "experts" in part.name) / EXPERTS  # of all layers


@dataclass(frozen=True)
class Machine:
    """Eight GPUs. memory: GiB of each; rates: bytes and FLOP per second; all_reduce: microseconds by bytes."""

    name: str
    memory: float
    read_rate: float
    matrix_rate: float
    all_reduce: tuple[tuple[float, float], ...]

    def wait(self, nbytes: float) -> float:
        """Microseconds of an all-reduce: a line between two points, the first's below them, the last line above."""
        points = self.all_reduce
        if nbytes <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = next((i for i, (size, _) in enumerate(points) if size >= nbytes), len(points) - 1)
        (x, y), (x_next, y_next) = points[at - 1], points[at]
        return y + (y_next - y) * (nbytes - x) / (x_next - x)

    def collectives(self, rows: int) -> float:
        """Milliseconds of a step's all-reduces, and of the gather by which the ranks choose tokens."""
        return (ALL_REDUCES * self.wait(2 * HIDDEN * rows) + self.wait(16 * rows)) / 1e3

    def floor(self, rows: int, context: int, overlap: float) -> float:
        """Milliseconds to read what a step reads; attention may take longer to compute."""
        kv = kv_read(rows, context)
        attention = max(kv / self.read_rate, attention_flops(rows, context) / self.matrix_rate)
        return 1e3 * ((step_bytes(rows, context, overlap) - kv) / self.read_rate + attention)

    def step(self, rows: int, context: int, overlap: float) -> float:
        """The floor and the collectives."""
        return self.floor(rows, context, overlap) + self.collectives(rows)


def expected_experts(rows: int, overlap: float) -> float:
    """Distinct experts of a layer if M rows choose 8 each: `overlap` of them common to all, the others at random."""
    common = overlap * TOPK
    left, each = EXPERTS - common, TOPK - common
    return common + left * (1 - (1 - each / left) ** rows)


def kv_read(rows: int, context: int) -> float:
    """Bytes of latent KV that a step reads on each rank, once for all nodes."""
    return float((context + rows) * KV_BYTES)


def attention_flops(rows: int, context: int) -> float:
    """Scores and weighted sums of a rank's heads, all layers."""
    return 2.0 * rows * HEADS * (context + rows) * (KV_ROW + LORA) * LAYERS


def step_bytes(rows: int, context: int, overlap: float) -> float:
    """Bytes that a step reads on each rank."""
    return ALWAYS + expected_experts(rows, overlap) * EXPERT_BYTES + kv_read(rows, context)


def graph_memory(rows: int, depth: int) -> float:
    """Bytes of a graph of so many rows, in trees of that depth, at the longest context: what its kernels want, and its
    logits."""
    # Splits are shorter at the start of a context, by up to 8 times: 24 more than there would be. Many rows have one
    # state for what they share, and those of the splits that a path can touch.
    own = 3 + depth // max(64, SPLIT // 8)
    return _scratch(rows, own if rows >= FOLDED else 25 + (LONGEST + rows) // SPLIT)


def working_memory() -> float:
    """Bytes beside weights and cache: the largest graph, and the largest prefill."""
    return max(graph_memory(rows, rows) for rows in ROWS) + _scratch(
        PREFILL, 5
    )  # a chunk's rows have 3 states, and 2 of their own


def _scratch(rows: int, states: int) -> float:
    attention = states * rows * HEADS * (4 * LORA + 8)
    experts = rows * TOPK * (2 * k26.INTER + 4 * HIDDEN)
    return attention + experts + rows * k26.VOCAB * 4


def kv_tokens(machine: Machine) -> int:
    """Positions of cache that fit beside the weights."""
    left = machine.memory * 2**30 - WEIGHTS - MORE - working_memory() - RESERVE
    return int(left / (KV_BYTES + ROPE_BYTES))
