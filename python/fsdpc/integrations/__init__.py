"""fsdpc inside other libraries' trainers: one module per framework, which imports it."""
