"""The table of what is proven in README: its plans and planted bugs are those of today, its errors within the bound."""

from proven import BEGIN, END, FAMILIES, KINDS, ROOT, planted, table

from gpt2lab.verify import TOLERANCE


def test_the_table_in_readme_is_that_of_today():
    shown = (ROOT / "README.md").read_text().split(BEGIN)[1].split(END)[0]
    one = {words: dict.fromkeys(KINDS, 1e-15) for words in FAMILIES}
    lines = zip(shown.splitlines(), table(one, planted()).splitlines(), strict=True)
    for line, today in ((line.split("|"), today.split("|")) for line, today in lines):
        errors = slice(3, 3 + len(KINDS))
        assert line[:3] + line[7:] == today[:3] + today[7:], "run python tests/proven.py"
        if "e-15" in today[3]:
            assert all(float(error) <= TOLERANCE for error in line[errors] if error.strip())
