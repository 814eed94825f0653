"""What an op cannot take is refused by an error that names the op and the tensor."""

import pytest
import torch

from kdtp import kernels

F, B, I = torch.float32, torch.bfloat16, torch.int64  # noqa: E741


def zeros(*shape, dtype=F, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def routing():
    return kernels.Routing(1, "sigmoid", 1, 1, True, 1.0)


def keys():
    return kernels.plan_keys([torch.tensor([0])], [[-1]])


# op: (call, its tensors in order with name, shape and dtype)
OPS = {
    "linear": (kernels.linear, [("x", (2, 3), F), ("w", (3, 4), F)]),
    "linear_heads": (kernels.linear_heads, [("x", (2, 5, 3), F), ("w", (5, 3, 4), F)]),
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w, 1e-6), [("x", (2, 3), F), ("weight", (3,), F)]),
    "add_rms_norm": (
        lambda r: kernels.add_rms_norm(zeros(2, 3), r, zeros(3), 1e-6),
        [("residual", (2, 3), F)],
    ),
    "rope": (kernels.rope, [("x", (2, 5, 4), F), ("cos", (2, 1, 4), F), ("sin", (2, 1, 4), F)]),
    "silu_mul": (kernels.silu_mul, [("x", (2, 6), F)]),
    "embedding": (lambda i, w: kernels.embedding(i, w, 0), [("ids", (2,), I), ("weight", (3, 4), F)]),
    "kv_write": (kernels.kv_write, [("kv", (5, 4), F), ("rows", (2,), I), ("new", (2, 4), F)]),
    "kv_move": (
        kernels.kv_move,
        [("kv", (2, 5, 4), F), ("source", (2,), I), ("target", (2,), I), ("offsets", (2,), torch.int32)],
    ),
    "mla_tree": (
        lambda q, kv: kernels.mla_tree(q, kv, keys(), 1.0, 2),
        [("q", (2, 3, 4), F), ("kv", (5, 4), F)],
    ),
    "router": (lambda x, b: kernels.router(x, b, routing()), [("logits", (2, 4), F), ("bias", (4,), F)]),
    "moe": (
        kernels.moe,
        [
            ("x", (2, 3), F),
            ("ids", (2, 1), I),
            ("weights", (2, 1), F),
            ("w_gate_up", (4, 3, 10), F),
            ("w_down", (4, 5, 3), F),
        ],
    ),
    "topk_logsumexp": (lambda x: kernels.topk_logsumexp(x, 2), [("logits", (2, 5), F)]),
}
CASES = [(op, i) for op, (_, tensors) in OPS.items() for i in range(len(tensors))]


def call(op, changed, **change):
    run, tensors = OPS[op]
    made = [zeros(*shape, dtype=dtype) for _, shape, dtype in tensors]
    _, shape, dtype = tensors[changed]
    made[changed] = zeros(*change.get("shape", shape), dtype=change.get("dtype", dtype), device=change.get("on", "cpu"))
    return run(*made)


@pytest.mark.parametrize(("op", "which"), CASES)
def test_another_device(op, which):
    name = OPS[op][1][which][0]
    with pytest.raises(NotImplementedError, match=rf"^{op}: {name} is on meta: this op has only a CPU form"):
        call(op, which, on="meta")


@pytest.mark.parametrize(("op", "which"), CASES)
def test_another_dtype(op, which):
    name = OPS[op][1][which][0]
    with pytest.raises(TypeError, match=rf"^{op}: {name} is torch.float64"):
        call(op, which, dtype=torch.float64)


@pytest.mark.parametrize(("op", "which"), CASES)
def test_another_shape(op, which):
    with pytest.raises(ValueError, match=rf"^{op}: \w+ has shape"):
        call(op, which, shape=(2, *OPS[op][1][which][1]))


@pytest.mark.parametrize("op", OPS)
def test_as_they_should_be(op):
    call(op, 0)


def test_values_outside():
    with pytest.raises(ValueError, match="silu_mul: x has 5 columns"):
        kernels.silu_mul(zeros(1, 5))
    with pytest.raises(ValueError, match="topk_logsumexp: k = 0"):
        kernels.topk_logsumexp(zeros(1, 5), 0)
    with pytest.raises(ValueError, match="moe: x has 1 rows"):
        kernels.moe(zeros(1, 3), zeros(2, 1, dtype=I), zeros(2, 1), zeros(4, 3, 10), zeros(4, 5, 3))
