"""fsdpc inside other people's trainers: a module for each framework, which imports it."""
