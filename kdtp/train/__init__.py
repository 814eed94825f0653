"""Training of a small target and of its DFlash drafter, in plain PyTorch on one device; docs/training.md."""
