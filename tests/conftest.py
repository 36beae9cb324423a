"""What all tests share: the plugin that runs them on ranks, and pytest's own for testing it."""

pytest_plugins = ["fsdpc.testing", "pytester"]
