"""`import no_address_parser` before nbformat, or `pytest -p no_address_parser`: notebooks are read seconds sooner.

nbformat imports jsonschema, which imports, if it can, a parser of internationalized addresses that compiles its grammar
for six seconds of a core. Notebooks have no such addresses.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)
