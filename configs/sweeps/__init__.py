"""The paper's ablations, one file each. `--sweep=NAME` finds them."""
