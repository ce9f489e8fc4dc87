"""The commands of `gpt2lab`, one file each: a table OPTIONS, and `run(args)`, which returns the status (None: 0)."""
