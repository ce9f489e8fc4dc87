"""What pyproject.toml cannot say: an editable install brings the lab's settings, as a wheel does.

setuptools asks for `has_data` before it installs data files beside an editable package, and has no such method.
"""

from setuptools import Distribution, setup


class Checkout(Distribution):
    """gpt2lab, installed from a checkout."""

    has_data = Distribution.has_data_files


setup(distclass=Checkout)
