"""Models small enough for hundreds of generations by the reference, and ways to run them."""

from collections.abc import Sequence

import numpy as np

from reference import mask
from reference.cache import Cache
from reference.config import ModelConfig, YarnConfig
from reference.model import Model
from reference.weights import random_weights

MICRO = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=0,
    kv_lora_rank=8,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=3,
    intermediate_size=12,
    moe_intermediate_size=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    max_position_embeddings=40,
)

MICRO_V3 = ModelConfig(
    vocab_size=53,
    hidden_size=14,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=3,
    q_lora_rank=7,
    kv_lora_rank=9,
    qk_nope_head_dim=5,
    qk_rope_head_dim=6,
    v_head_dim=4,
    intermediate_size=10,
    moe_intermediate_size=6,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    max_position_embeddings=32,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=8, mscale_all_dim=1.0),
)


def random_model(config: ModelConfig, seed: int = 0) -> Model:
    """A model of random weights."""
    return Model(config, random_weights(config, np.random.PCG64(seed)))


def chain_parents(n: int) -> list[int]:
    """Parents of a chain of n nodes."""
    return list(range(-1, n - 1))


def run(model: Model, cache: Cache, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """Logits [M, V] of a tree behind the committed rows; nothing is committed."""
    start = cache.length
    return model.forward_tokens(tokens, mask.positions(start, parents), mask.dense(start, parents), cache)


def run_text(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of a whole text."""
    return run(model, Cache(model.config, len(tokens)), tokens, chain_parents(len(tokens)))
