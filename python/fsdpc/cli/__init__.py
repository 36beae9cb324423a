"""The commands: ``fsdpc train``, ``run``, ``plan``, and the others."""
