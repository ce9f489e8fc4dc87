"""The commands of `gpt2lab`, one file each: `add_arguments(parser)`, and `run(args)` returns the status."""
