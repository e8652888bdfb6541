"""Studies, one file each: what is compared, decided before it is run; `--study=NAME` finds them."""
