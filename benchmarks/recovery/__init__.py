"""How much training a converted checkpoint needs to recover its quality: `make bench-recovery`."""
