"""The commands, such as ``fsdpc train``, ``run`` and ``plan``."""
