"""The ops of the engine: one function each, chosen by the device of its tensors.

Every op has a torch form for CPU tensors and a CUDA form (kernels.cuda, csrc/), chosen by the tensor's device and never
as a fallback. A form that does not exist is an error that says so: walks on the CPU are kdtp.spec's.

Row invariance, bit for bit: what an op gives for a row depends on that row alone (and on its visible KV rows), never
on which or how many rows share the call. It holds for one machine and one number of threads; the modules say how each
op keeps it, and tests hold it for MKL's kernels for Intel and AMD.
"""

from kdtp.kernels.act import silu_mul
from kdtp.kernels.cache import kv_move, kv_write
from kdtp.kernels.convolve import convolve
from kdtp.kernels.embedding import embedding
from kdtp.kernels.gqa_prep import gqa_prep, gqa_prep_kv
from kdtp.kernels.linear import empty_weight, linear, linear_heads
from kdtp.kernels.mla import BLOCK, Keys, mla_tree, plan_keys
from kdtp.kernels.moe import moe
from kdtp.kernels.norm import add_rms_norm, rms_norm
from kdtp.kernels.prep import mla_prep
from kdtp.kernels.rope import rope
from kdtp.kernels.router import Routing, router
from kdtp.kernels.topk import topk_logsumexp
from kdtp.kernels.tree import Trees, Walks, tree_accept, tree_build

__all__ = [
    "BLOCK",
    "Keys",
    "Routing",
    "Trees",
    "Walks",
    "add_rms_norm",
    "convolve",
    "embedding",
    "empty_weight",
    "gqa_prep",
    "gqa_prep_kv",
    "kv_move",
    "kv_write",
    "linear",
    "linear_heads",
    "mla_prep",
    "mla_tree",
    "moe",
    "plan_keys",
    "rms_norm",
    "rope",
    "router",
    "silu_mul",
    "topk_logsumexp",
    "tree_accept",
    "tree_build",
]
