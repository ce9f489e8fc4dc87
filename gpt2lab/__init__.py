"""gpt2lab: understand, run and check how GPT-2 is trained in parallel."""
