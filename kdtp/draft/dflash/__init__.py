"""DFlash, a block-diffusion drafter (arXiv 2602.06036), versions 1 and 2; in numpy: reference/dflash.py."""
