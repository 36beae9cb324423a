"""The ``fsdpc`` commands, such as ``train``, ``run`` and ``plan``."""
