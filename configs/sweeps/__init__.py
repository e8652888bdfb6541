"""The paper's ablations, with one file each. `--sweep=NAME` finds them."""
