"""Sums and exponentials of the reference are accurate, and a row's result is its own."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arith import exp, linear, sigmoid, softmax, tree_sum, vecmat

ULP = 2.0**-24  # half a unit in the last place of float32, relative


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300))
def test_tree_sum_is_accurate(values):
    terms = np.array(values, np.float32)
    depth = math.ceil(math.log2(len(values))) + 1
    bound = depth * ULP * math.fsum(map(abs, values))
    assert abs(float(tree_sum(terms.copy())) - math.fsum(values)) <= bound


def test_tree_sum_has_its_written_order():
    # Five terms: (0 + 3) and (1 + 4), 2 waits; then those with 2 last.
    big, one = np.float32(2**24), np.float32(1)
    terms = np.array([big, one, one, one, one], np.float32)
    assert tree_sum(terms.copy()) == (((big + one) + one) + (one + one))


def test_products_against_float64():
    random = np.random.default_rng(0)
    x, w = random.normal(size=(3, 7, 37)), random.normal(size=(7, 37, 11))
    got = vecmat(x.astype(np.float32), w.astype(np.float32))
    np.testing.assert_allclose(got, np.einsum("ahk,hkn->ahn", x, w), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_the_batch():
    random = np.random.default_rng(0)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in ((9, 33), (33, 5)))
    for rows in ([4], [4, 0], [8, 4, 4, 1]):
        assert linear(x[rows], w).tobytes() == linear(x, w)[rows].tobytes()


def test_exp_is_within_an_ulp():
    x = np.concatenate([np.linspace(-104, 88.7, 40_001), np.linspace(-1e-3, 1e-3, 2_001)]).astype(np.float32)
    want = np.array([math.exp(value) for value in x])
    normal = want > 2.0**-126
    assert np.abs(exp(x)[normal] / want[normal] - 1).max() <= 1.0001 * ULP
    assert np.abs(exp(x)[~normal] - want[~normal]).max() <= 2.0**-149
    assert exp(np.float32([-np.inf, -1e30, 0.0])).tolist() == [0.0, 0.0, 1.0]


def test_softmax_and_sigmoid():
    x = np.float32([[1000.0, 999.0, -1000.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(softmax(x), [[0.7310586, 0.2689414, 0.0], [1 / 3] * 3], rtol=1e-6)
    np.testing.assert_allclose(sigmoid(np.float32([-200, -1, 0, 200])), [0, 0.26894143, 0.5, 1], rtol=1e-6, atol=1e-38)
