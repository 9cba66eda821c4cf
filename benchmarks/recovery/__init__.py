"""How much training a converted checkpoint needs to be as good as it was: `make bench-recovery`."""
