"""The golden model and the method in numpy, float32: written to be read as a specification.

The same words as in `kdtp`: config, norm, rope, mla, moe, model, cache; tree, mask, accept, pick, drafter, generate.
Dimension letters: M query rows (tree nodes), N visible KV rows, H hidden, h heads, V vocabulary, E experts,
L draft depth, K candidates per depth. Imports nothing but numpy and the standard library.
"""
