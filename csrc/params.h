// The C ABI of the kernels: one struct per op, one entry kdtp_<op>(const Kdtp<Op>Args*) each. The compiler reads it,
// kdtp/kernels/abi.py, which makes ctypes twins, and the selftest, so it keeps to one form: every field is 8 bytes (a
// pointer, int64_t or double), one a line, its shape and dtype behind it. "T" is the type that `dtype` names. Pointers to
// const are inputs, others outputs, or both where "in/out" is said. Last is the stream.
//
// Entries return 0, a cudaError_t, or KDTP_ILLEGAL for arguments that cannot be, before anything is launched;
// kdtp_error() then says which. They launch on `stream`, never wait for the device, and allocate nothing, so they can
// be captured into a CUDA graph. The result of a row never depends on which or how many rows share the call.
#pragma once
#include <stdint.h>
#define KDTP_ILLEGAL (-1)
enum { KDTP_F32 = 0, KDTP_BF16 = 1 }; enum { KDTP_TREE = 0, KDTP_CHAIN = 1, KDTP_SEEDED = 2 };  // `dtype`; `shape`
enum { KDTP_SOFTMAX = 0, KDTP_SIGMOID = 1 }; enum { KDTP_DENSE = 0, KDTP_INT4 = 1 };  // `scoring`; experts' `format`

// out = norm(x) * weight; with `residual`: residual += x first, and that sum is normed.
typedef struct KdtpRmsNormArgs {
  const void* x;          // [rows, width] T; a row is x_stride elements after the one before
  void* residual;         // [rows, width] T in/out, or null
  const void* weight;     // [width] f32
  void* out;              // [rows, width] T
  int64_t rows;
  int64_t width;          // 1..16384
  int64_t x_stride;
  double eps;
  int64_t dtype;
  void* stream;
} KdtpRmsNormArgs;

// out = silu(gate) * up.
typedef struct KdtpSiluMulArgs {
  const void* x;          // [rows, 2 * width] T: gate, then up
  void* out;              // [rows, width] T
  int64_t rows;
  int64_t width;
  int64_t dtype;
  void* stream;
} KdtpSiluMulArgs;

// Rows of a vocabulary shard; zeros for ids that it does not hold.
typedef struct KdtpEmbeddingArgs {
  const void* ids;        // [rows] i64
  const void* weight;     // [vocab, width] T: ids first .. first + vocab - 1
  void* out;              // [rows, width] T
  int64_t rows;
  int64_t vocab;
  int64_t width;
  int64_t first;
  int64_t dtype;
  void* stream;
} KdtpEmbeddingArgs;

// Before attention: rotate the rope parts of queries and key (NeoX: entry j turns with j + rope/2), norm the latent,
// write the new KV row. Rows with kv_rows < 0 are padding: no KV row is written.
typedef struct KdtpMlaPrepArgs {
  const void* q;          // [rows, heads, nope + rope] T; a row is q_stride elements after the one before
  const void* kv_new;     // [rows, lora + rope] T, before norm and rotation; row stride kv_stride
  const void* weight;     // [lora] f32, of the latent's norm
  const void* cos;        // [rows, rope / 2] f32
  const void* sin;        // [rows, rope / 2] f32
  const void* kv_rows;    // [rows] i64: cache row of each row
  void* absorbed;         // [rows, heads, lora + rope] T: its last rope entries per head are written here
  void* kv;               // [*, lora + rope] T: one layer of the cache
  int64_t rows;
  int64_t heads;
  int64_t nope;
  int64_t rope;           // even
  int64_t lora;
  int64_t q_stride;
  int64_t kv_stride;
  double eps;
  int64_t dtype;
  void* stream;
} KdtpMlaPrepArgs;

// Before a drafter's attention: RMS norm of each head of queries and keys, which is rounded to T; then these rotated (NeoX:
// entry j turns with j + width/2); values as they are.
typedef struct KdtpGqaPrepArgs {
  const void* q;          // [rows, heads, width] T
  const void* kv;         // [rows, 2 * kv_heads, width] T: keys, then values
  const void* q_weight;   // [width] f32
  const void* k_weight;   // [width] f32
  const void* cos;        // [rows, width / 2] f32
  const void* sin;        // [rows, width / 2] f32
  void* q_out;            // [rows, heads, width] T
  void* kv_out;           // [2, rows, kv_heads, width] T
  int64_t rows;
  int64_t heads;          // 0..1024; with 0, all that is the queries' may be null
  int64_t kv_heads;       // 1..1024
  int64_t width;          // even, 2..256
  double eps;
  int64_t dtype;
  void* stream;
} KdtpGqaPrepArgs;

// out[r] = sum over taps t of x[r - t] * (base[side, t] + dynamic[r, side, t]), each channel by itself; x is 0 before the
// row's block of n. Factors and products are rounded to T, their sum is not before it is whole.
typedef struct KdtpConvolveArgs {
  const void* x;          // [rows, width] T
  const void* dynamic;    // [rows, 2, taps, groups] T: a group is width / groups channels side by side
  const void* base;       // [2, taps, width] T
  void* out;              // [rows, width] T
  int64_t rows;           // a multiple of n
  int64_t width;
  int64_t taps;           // 1..1024
  int64_t groups;         // a divisor of width
  int64_t side;           // 0 or 1
  int64_t n;
  int64_t dtype;
  void* stream;
} KdtpConvolveArgs;

// softmax(scale * q k) latent over the paged cache. Row r of sequence b sees the committed rows 0 .. starts[b] - 1, its
// ancestors among the sequence's own rows of this call, and itself. Row i of the sequence is stored at start + i; the
// rows of a sequence follow each other in q, parents before children.
typedef struct KdtpMlaTreeArgs {
  const void* q;          // [rows, heads, lora + rope] T
  const void* kv;         // [*, lora + rope] T: one layer of the cache
  void* out;              // [rows, heads, lora] T
  const void* row_seq;    // [rows] i32: sequence of each row, -1 for padding (out is then 0)
  const void* row_depth;  // [rows] i32: depth of each row below its sequence's first row
  const void* path;       // [rows, max_depth] i32: ancestors by depth, as index in the sequence, itself last. Not read where
                          // a row's depth is its index: all rows before it are its ancestors then
  const void* starts;     // [seqs] i32
  const void* first_row;  // [seqs] i32: the sequence's first row in q
  const void* pages;      // [seqs, max_pages] i32: page table, pages of 64 rows
  void* workspace;        // [workspace_bytes]: kdtp_mla_tree_workspace says how many are needed
  int64_t rows;
  int64_t seqs;
  int64_t heads;
  int64_t lora;
  int64_t rope;
  int64_t max_depth;
  int64_t max_pages;
  int64_t max_start;      // the largest of starts, or anything above: sizes the grid
  int64_t split;          // positions per split, shorter at low ones; a power of two from 64; the engine's, not the batch's
  int64_t workspace_bytes;
  double scale;
  int64_t portable;       // 1: the form for every GPU, even where there is a faster one; it gives the same bits
  int64_t dtype;
  void* stream;
} KdtpMlaTreeArgs;

// y = x w for few rows. Weights are stored K-major, [out, in], as a tensor core wants them.
typedef struct KdtpLinearArgs {
  const void* x;          // [rows, in] T; a row is x_stride elements after the one before
  const void* w;          // [out, in] T
  void* y;                // [rows, out] T, or f32 if out_f32; row stride y_stride
  int64_t rows;
  int64_t in;
  int64_t out;
  int64_t x_stride;
  int64_t y_stride;
  int64_t out_f32;        // 0 or 1
  int64_t dtype;
  void* stream;
} KdtpLinearArgs;

// y[r, h] = x[r, h] w[h] for each head.
typedef struct KdtpLinearHeadsArgs {
  const void* x;          // [rows, heads, in] T with strides
  const void* w;          // [heads, out, in] T
  void* y;                // [rows, heads, out] T with strides
  int64_t rows;
  int64_t heads;
  int64_t in;
  int64_t out;
  int64_t x_row;          // elements between rows of x
  int64_t x_head;         // elements between heads of x
  int64_t y_row;
  int64_t y_head;
  int64_t dtype;
  void* stream;
} KdtpLinearHeadsArgs;

// Experts, ids ascending; among equal scores the lowest id. `norm`: weights are divided by their sum, and scaled only if
// there is a bias, as DeepSeek-V2 (without) either norms or scales; a single expert without bias is not normed.
typedef struct KdtpRouterArgs {
  const void* logits;     // [rows, experts] f32
  const void* bias;       // [experts] f32, or null; only with sigmoid
  const void* kv_rows;    // [rows] i64, or null: a row with a negative one is padding, whose ids are -1
  void* ids;              // [rows, topk] i32
  void* weights;          // [rows, topk] f32
  int64_t rows;
  int64_t experts;        // 1..1024
  int64_t topk;           // 1..32
  int64_t groups;         // a divisor of experts; groups of at least 2 if there is a bias and more than one group
  int64_t topk_group;     // 1..groups, of at least topk experts together
  int64_t scoring;
  int64_t norm;           // norm_topk_prob: 0 or 1
  double scale;
  void* stream;
} KdtpRouterArgs;

// The routed experts: out = sum over k, in order, of weights[r, k] * down(silu(gate) * up) of expert ids[r, k], + add.
// Dense weights are T; INT4: 8 nibbles in an int32 along `in`, lowest bits first, value nibble - 8, one T scale per 32.
typedef struct KdtpMoeArgs {
  const void* x;          // [rows, hidden] T
  const void* ids;        // [rows, topk] i32; a negative id stands for padding: it adds nothing
  const void* weights;    // [rows, topk] f32
  const void* w_gate_up;  // dense [experts, 2 * inter, hidden] T (gate rows, then up rows); INT4: as kdtp_moe_repack gives it
  const void* w_down;     // dense [experts, hidden, inter] T; INT4: as kdtp_moe_repack gives it
  const void* s_gate_up;  // INT4 scales as repacked, or null
  const void* s_down;     // INT4 scales as repacked, or null
  const void* add;        // [rows, hidden] T, or null: what comes on top
  const void* add_ready;  // the cudaEvent_t, on another stream, after which `add` is there; null: it is
  void* out;              // [rows, hidden] T
  void* workspace;        // [workspace_bytes]: kdtp_moe_workspace says how many are needed
  int64_t rows;
  int64_t hidden;
  int64_t inter;
  int64_t experts;
  int64_t topk;
  int64_t format;
  int64_t workspace_bytes;
  int64_t dtype;
  void* stream;
} KdtpMoeArgs;

// INT4 weights of all experts from the published packing to the kernel's own, once at load. Sizes stay the same.
typedef struct KdtpMoeRepackArgs {
  const void* packed;     // [experts, out, in / 8] i32
  const void* scales;     // [experts, out, in / 32] bf16
  void* packed_out;       // [experts * out * in / 8] i32
  void* scales_out;       // [experts * out * in / 32] bf16
  int64_t experts;
  int64_t out;
  int64_t in;
  void* stream;
} KdtpMoeRepackArgs;

// The K best of each row by (logit descending, id ascending), with log-probabilities under the row's full softmax.
typedef struct KdtpTopkArgs {
  const void* logits;     // [rows, vocab] f32; row stride `stride`
  void* lp;               // [rows, k] f32, at most 0; NaN for a row whose logsumexp is NaN or +inf
  void* ids;              // [rows, k] i64; 0 .. k - 1 for such a row
  int64_t rows;
  int64_t vocab;          // 1..262144
  int64_t stride;
  int64_t k;              // 1..64, at most vocab
  void* stream;
} KdtpTopkArgs;

// Each row's maximum and the lowest global id that has it; (NaN, *) if the row holds NaN.
typedef struct KdtpArgmaxArgs {
  const void* logits;     // [rows, vocab] f32; row stride `stride`
  void* values;           // [rows] f32
  void* ids;              // [rows] i64: vocab_start added
  int64_t rows;
  int64_t vocab;
  int64_t stride;
  int64_t vocab_start;
  void* stream;
} KdtpArgmaxArgs;

// Best-first trees under kdtp's total order; one block per sequence. Budgets and depths beyond what is legal count as the
// nearest legal one. Rows of lp are by (lp descending, id ascending); with before = k there is one for each candidate of
// the depth above (row 0 at the first), in any order. One with NaN or +inf, or out of order, ends the tree above it.
typedef struct KdtpTreeBuildArgs {
  const void* lp;         // [seqs, depth, before, k] f32
  const void* ids;        // [seqs, depth, k] i64
  const void* roots;      // [seqs] i64
  const void* budgets;    // [seqs] i32: nodes without the root, at most max_nodes - 1
  const void* depths;     // [seqs] i32: deepest level allowed, at most depth
  const void* starts;     // [seqs] i32: position of the root; null without positions
  void* tokens;           // [seqs, max_nodes] i64; entries behind the tree are not written
  void* parents;          // [seqs, max_nodes] i32: -1 for the root
  void* scores;           // [seqs, max_nodes] f32: log-probability of the path
  void* positions;        // [seqs, max_nodes] i32, or null
  void* ancestors;        // [seqs, max_nodes, ceil(max_nodes / 64)] u64, or null: bit j: node j is an ancestor or itself
  void* counts;           // [seqs] i32: nodes, root included
  int64_t seqs;
  int64_t depth;          // 0..64
  int64_t before;         // 1 or k
  int64_t k;              // 1..64
  int64_t max_nodes;      // 1..1025
  int64_t shape;          // KDTP_TREE; KDTP_CHAIN: the most likely path; KDTP_SEEDED: that first, then the best others
  void* stream;
} KdtpTreeBuildArgs;

// The walk of each tree: from the root to the child whose token was chosen, as long as there is one.
typedef struct KdtpTreeAcceptArgs {
  const void* tokens;     // [seqs, max_nodes] i64
  const void* parents;    // [seqs, max_nodes] i32
  const void* counts;     // [seqs] i32
  const void* chosen;     // [seqs, max_nodes] i64: the target's token at each node
  void* path;             // [seqs, max_nodes] i32: accepted nodes, root first; entries behind them are not written
  void* lengths;          // [seqs] i32: accepted nodes, root included; 0 for a malformed tree
  void* bonus;            // [seqs] i64: the token chosen at the last accepted node; -1 for a malformed tree
  int64_t seqs;
  int64_t max_nodes;      // 1..1025
  void* stream;
} KdtpTreeAcceptArgs;

// kv[l, target[i]] = kv[l, source[i]] in every layer; all sources are read before any is overwritten. Two groups must
// not overlap; within a group any overlap is right.
typedef struct KdtpKvMoveArgs {
  void* kv;               // [layers, layer_rows, width] T in/out
  const void* source;     // [moves] i64, grouped
  const void* target;     // [moves] i64
  const void* offsets;    // [groups + 1] i32: moves of each group, at most 1025
  int64_t layers;
  int64_t layer_rows;
  int64_t width;          // width * sizeof(T) is a multiple of 4
  int64_t groups;
  int64_t dtype;
  void* stream;
} KdtpKvMoveArgs;

// out = the sum of x over the ranks, in rank order and float32; with `residual`, that sum goes on as rms_norm's x. Ranks
// make the same calls in the same order. `failure`: of the first that fails; it and all behind it give nothing of worth.
typedef struct KdtpAllReduceArgs {
  const void* x;          // [rows, width] T: this rank's part
  void* residual;         // [rows, width] T in/out, or null
  const void* weight;     // [width] f32, or null: with `residual` only
  void* out;              // [rows, width] T
  void* state;            // [257] i32 in/out, 0 at first: calls so far, as each block counts; whether one has failed
  void* failure;          // [8] i32 that the host sees: 1 late, 2 unlike; rank; own stamp; that rank's stamp, rows, width
  void* room0;            // [2, size, part_bytes]: rank 0's room, all bits 1 at first; null for ranks that are not
  void* room1;
  void* room2;
  void* room3;
  void* room4;
  void* room5;
  void* room6;
  void* room7;
  int64_t rank;
  int64_t size;           // 1..8
  int64_t part_bytes;     // a multiple of 16; 4096 more than the largest x has
  int64_t blocks;         // 1..256, no more than the multiprocessors of any rank's GPU: all blocks must run at once
  int64_t stamp;          // 0..2^31 - 1: which call this is, for the others to compare
  int64_t timeout_ns;     // to wait for another rank
  int64_t rows;
  int64_t width;          // width * sizeof(T) is a multiple of 16; with `residual` at most 8192
  double eps;
  int64_t dtype;
  void* stream;
} KdtpAllReduceArgs;
