"""What all tests share: the plugin that runs them on ranks, and how long hypothesis searches."""

from hypothesis import settings

pytest_plugins = ["fsdpc.testing", "pytester"]

# No deadline: a test's first example builds what later ones reuse, and machines are shared.
settings.register_profile("default", deadline=None)
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("default")
