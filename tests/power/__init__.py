"""How much the tests notice: small bugs made by rule, each run against the tests that reach it.

    python -m power reach      run the tests once and record which functions each of them enters, ranks included
    python -m power run        make the mutants and run those that are not decided yet; may be stopped and called again
    python -m power again      run those that were killed against their killers: what they no longer see is open
    python -m power planted    the same for bugs by hand, those of planted.toml
    python -m power table      the score of each room, and the mutants that live

from the folder `tests`, with the environment of `make test`. `mutate.py` draws the mutants, `recorder` sees what is
entered, `killing.py` runs tests against a mutant. The results are lines of `results.tsv`.
"""
