"""The version; setuptools reads it here without an import."""

__version__ = "0.1.0"
