"""How rank processes are started, watched and ended; `fsdpc.launcher` is the public module."""
